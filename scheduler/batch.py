"""`Batch`: the work of one step while it is planned, and whose it was when its results arrive.

What goes into a step, and what becomes of its sequences, the scheduler decides.
"""

from penstock.scheduler.cache.sequence import Sequence
from penstock.scheduler.types import (
    BlockCopy,
    FinishReason,
    SampledTokens,
    ScheduledBatch,
    SlotAssignment,
    StateSnapshot,
    TableUpdate,
)


class Batch:
    """A `ScheduledBatch` being built, and the sequences of its rows, in row order.

    sampling: those that get a token. prompt_only: those that end their prompt and get none.
    with_prompt_output: of both, those whose prompt has outputs.
    """

    def __init__(self) -> None:
        self.assignments: list[SlotAssignment] = []
        self.table_updates: list[TableUpdate] = []
        self.copies: list[BlockCopy] = []
        self.slots: list[int] = []
        self.starts: list[int] = []
        self.num_tokens: list[int] = []
        self.samples: list[bool] = []
        self.sampling: list[Sequence] = []
        self.prompt_only: list[Sequence] = []
        self.with_prompt_output: list[Sequence] = []
        self.num_decodes = 0
        self.num_scored = 0
        self.snapshots: list[StateSnapshot] = []

    def scheduled(self, step: int) -> ScheduledBatch:
        return ScheduledBatch(
            step=step,
            assignments=tuple(self.assignments),
            table_updates=tuple(self.table_updates),
            copies=tuple(self.copies),
            slots=tuple(self.slots),
            starts=tuple(self.starts),
            num_tokens=tuple(self.num_tokens),
            samples=tuple(self.samples),
            num_decodes=self.num_decodes,
            num_scored=self.num_scored,
            snapshots=tuple(self.snapshots),
        )

    def failures(self, sampled: SampledTokens) -> dict[Sequence, FinishReason]:
        """The sequences that its results say cannot continue, and why."""
        failures = {self.sampling[row]: reason for row, reason in sampled.failed.items()}
        for sequence, prompt in zip(self.with_prompt_output, sampled.prompts, strict=True):
            if prompt is None:
                failures[sequence] = FinishReason.INVALID_LOGITS
        return failures
