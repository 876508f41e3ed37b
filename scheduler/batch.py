"""`Batch`: the work of one step while it is planned, and whose it was when its results arrive;
`StepOutputs`: the new tokens of a step.

The scheduler decides what goes into a step, and what becomes of its sequences.
"""

from collections.abc import Iterable, Iterator
from collections.abc import Sequence as Items
from dataclasses import dataclass, field
from math import inf
from typing import Self

from penstock.scheduler.cache.sequence import Sequence
from penstock.scheduler.stats import NO_GRAPHS, AttentionWork, GraphSizes, StepWork
from penstock.scheduler.types import (
    BlockCopy,
    Encode,
    Finish,
    FinishReason,
    PromptOutput,
    RequestId,
    RequestOutput,
    SampledTokens,
    ScheduledBatch,
    SlotAssignment,
    StateSnapshot,
    TableUpdate,
    TokenLogprobs,
)


class Batch:
    """A `ScheduledBatch` being built, and the sequences of its rows, in row order.

    sampling: those that get a token. prompt_only: those that end their prompt and get none.
    with_prompt_output: of both, those whose prompt has outputs.
    """

    drafts: tuple[tuple[int, ...], ...] = ()
    wanted_drafts: tuple[int, ...] = ()
    num_unresolved: tuple[int, ...] = ()
    wants_forced = False
    encodes: tuple[Encode, ...] = ()
    dropped: tuple[bytes, ...] = ()

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
        # By position, in less time than by name.
        return ScheduledBatch(
            step,
            tuple(self.assignments),
            tuple(self.table_updates),
            tuple(self.copies),
            tuple(self.slots),
            tuple(self.starts),
            tuple(self.num_tokens),
            tuple(self.samples),
            self.num_decodes,
            self.num_scored,
            tuple(self.snapshots),
            self.drafts,
            self.wanted_drafts,
            self.num_unresolved,
            self.wants_forced,
            self.encodes,
            self.dropped,
        )

    def failures(self, sampled: SampledTokens) -> dict[Sequence, FinishReason]:
        """The sequences that its results say cannot continue, and why."""
        failures = {self.sampling[row]: reason for row, reason in sampled.failed.items()}
        for sequence, prompt in zip(self.with_prompt_output, sampled.prompts, strict=True):
            if prompt is None:
                failures[sequence] = FinishReason.INVALID_LOGITS
        return failures


@dataclass(slots=True)
class StepOutputs:
    """The `RequestOutput`s of a step, in row order. Iterate over it to get them.

    Nearly all of them are one token and nothing else. Those are kept as columns, because an object
    for each takes as long as all else that is done with a step's token. others: by position in the
    columns, the outputs that are anything else; what the columns have in their place is void.
    """

    request_ids: list[RequestId] = field(default_factory=list)
    indices: list[int] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    num_cached_tokens: list[int] = field(default_factory=list)
    others: dict[int, RequestOutput] = field(default_factory=dict)

    @classmethod
    def of(cls, outputs: Iterable[RequestOutput]) -> Self:
        made = cls()
        for output in outputs:
            made.add(output)
        return made

    def add(self, output: RequestOutput) -> None:
        """One that is more, or less, than a token."""
        self.others[len(self.request_ids)] = output
        self.request_ids.append(output.request_id)
        self.indices.append(output.index)
        self.token_ids.append(0)
        self.num_cached_tokens.append(output.num_cached_tokens)

    def __len__(self) -> int:
        return len(self.request_ids)

    def __iter__(self) -> Iterator[RequestOutput]:
        new = tuple.__new__  # a NamedTuple's own constructor is a function of Python's
        columns = (self.request_ids, self.indices, self.token_ids, self.num_cached_tokens)
        outputs = [
            new(RequestOutput, (request_id, index, [token_id], None, None, num_cached, None, None))
            for request_id, index, token_id, num_cached in zip(*columns, strict=True)
        ]
        for at, output in self.others.items():
            outputs[at] = output
        return iter(outputs)

    @property
    def num_tokens(self) -> int:
        others = self.others.values()
        return len(self) - len(others) + sum(len(output.token_ids) for output in others)

    def add_prompts(
        self, sequences: list[Sequence], prompts: tuple[PromptOutput | None, ...]
    ) -> None:
        """Adds those of the prompts to the outputs, where they were requested, once."""
        prompt_of = {}
        for sequence, prompt in zip(sequences, prompts, strict=True):
            sequence.prompt_request = None
            prompt_of[sequence.request.id] = prompt
        for at, output in enumerate(self):
            if output.index == 0 and output.request_id in prompt_of:
                self.others[at] = output._replace(prompt=prompt_of[output.request_id])


def output_of(
    sequence: Sequence,
    token_ids: list[int],
    logprobs: list[TokenLogprobs] | None,
    finish: Finish | None,
) -> RequestOutput:
    """With what became of its prediction since the last one."""
    predicted, sequence.predicted = sequence.predicted, None
    return RequestOutput(
        sequence.request.id,
        sequence.index,
        token_ids,
        logprobs,
        finish,
        sequence.num_cached_tokens,
        predicted=predicted,
    )


def work_of(
    batch: Batch | ScheduledBatch,
    windows: Iterable[int | None],
    graph_sizes: GraphSizes = NO_GRAPHS,
) -> StepWork:
    """windows: those that the model's layers have, each once; None for a layer without one."""
    num_decodes, num_rows = batch.num_decodes, len(batch.slots)
    num_chunks, num_tokens = num_rows - num_decodes, sum(batch.num_tokens)
    num_prefill_tokens = sum(batch.num_tokens[num_decodes:]) if num_chunks else 0
    num_decode_tokens = num_tokens - num_prefill_tokens
    decodes, chunks = batch.starts, []
    if num_chunks:
        decodes = batch.starts[:num_decodes]
        chunks = list(zip(batch.starts[num_decodes:], batch.num_tokens[num_decodes:], strict=True))
    drafts = zip(decodes, map(len, batch.drafts), strict=True) if batch.drafts else ()
    drafted = [(start, num) for start, num in drafts if num]
    return StepWork(
        num_prefill_tokens,
        num_decode_tokens,
        num_rows,
        num_decode_tokens + sum(batch.samples[num_decodes:]),
        batch.num_scored,
        tuple([_attention_work(decodes, chunks, drafted, window) for window in windows]),
        None,
        graph_sizes.padding(num_tokens, has_chunks=num_chunks > 0, has_drafts=bool(drafted)),
        num_chunks,
    )


def _attention_work(
    decodes: Items[int],
    rows: Items[tuple[int, int]],
    drafted: Items[tuple[int, int]],
    window: int | None,
) -> AttentionWork:
    """decodes: positions. rows: (first position, tokens) of chunks. drafted: (position, drafts) of
    those decodes that have any: a query and a key more for each.

    A query at position p attends to p + 1 keys, or as many as the window has: a row's keys begin
    with those of its first query.
    """
    num_drafts = sum([n for _, n in drafted]) if drafted else 0
    if window is None:
        keys = sum(decodes) + len(decodes) + num_drafts
        if not (rows or drafted):
            return AttentionWork(keys, keys, keys)
    else:
        keys = sum([min(start + 1, window) for start in decodes]) + num_drafts
    reach = inf if window is None else window - 1
    contexts = [min(start, reach) + n for start, n in rows]
    queries = [*rows, *[(start + 1, n) for start, n in drafted]]
    return AttentionWork(
        context_tokens=int(keys + sum(contexts)),
        pairs=keys - num_drafts + _pairs(queries, window),
        decode_context_tokens=keys,
    )


def _pairs(rows: Items[tuple[int, int]], window: int | None) -> int:
    """(query, key), of n queries from the position `start` on."""
    pairs = sum(_sum_to(start + n) - _sum_to(start) for start, n in rows)
    if window is None:
        return pairs
    return pairs - sum(_sum_to(start + n - window) - _sum_to(start - window) for start, n in rows)


def _sum_to(n: int) -> int:
    """1 + 2 + ... + n; 0 for a negative n."""
    return n * (n + 1) // 2 if n > 0 else 0
