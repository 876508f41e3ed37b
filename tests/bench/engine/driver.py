"""Drives an executor by batches made by hand, so that any batch is at any context at once."""

import random
import statistics
import time
from dataclasses import dataclass
from itertools import pairwise

from penstock.engine.step.executor import Executor, PendingTokens
from penstock.engine.step.model_info import ModelInfo
from penstock.scheduler.types import (
    BlockCopy,
    SampledTokens,
    SamplingParams,
    ScheduledBatch,
    SlotAssignment,
)
from tests.bench.engine.timing import Mark

_GREEDY = SamplingParams(max_tokens=1, temperature=0.0)
# Blocks filled in one step: their copy needs a temporary buffer.
_COPIES = 128


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeTimes:
    """Of one step, in seconds; medians.

    step_s: from the end of one to the end of the next, on the device. host_s: of `execute`, on the
    host. waited_s: the host's wait for the step before, after it has launched this one.
    late_ratio: the share of steps that were launched when the one before had ended already, so
    that the device had stood idle. Without a device that runs ahead, all of them.
    """

    step_s: float
    host_s: float
    waited_s: float
    late_ratio: float


class Driver:
    """Sequences of random ids in the first slots, which decode without an end."""

    def __init__(self, executor: Executor) -> None:
        self._executor = executor
        self._random = random.Random(0)
        self._step = 0
        self._slots: tuple[int, ...] = ()
        self._length = 0

    @property
    def info(self) -> ModelInfo:
        return self._executor.info

    def fill(self, length: int) -> None:
        """Runs a prompt of `length` tokens, then copies its blocks to all others."""
        info = self.info
        length = min(length, info.max_model_len - 1, info.num_blocks * info.block_size)
        num_filled = max(1, length // info.block_size)
        self._run((0,), 0, length, (self._assignment(0, length, length),)).wait()
        for first in range(num_filled, info.num_blocks, _COPIES):
            targets = range(first, min(first + _COPIES, info.num_blocks))
            copies = tuple(BlockCopy(target % num_filled, target) for target in targets)
            self._run((0,), length - 1, 1, copies=copies).wait()

    def seconds_to_first_token(self, num_tokens: int, repeats: int) -> float:
        """Median, of a prompt that is alone: from the call of `execute` to the id on the host."""
        times = []
        for _ in range(repeats + 1):
            assignment = self._assignment(0, num_tokens, num_tokens + 1)
            start = time.perf_counter()
            self._run((0,), 0, num_tokens, (assignment,)).wait()
            times.append(time.perf_counter() - start)
        return statistics.median(times[1:])

    def begin(self, batch: int, context: int, room: int) -> None:
        """Starts `batch` sequences of `context` tokens, which may grow by `room`."""
        self._slots = tuple(range(batch))
        assignments = tuple(self._assignment(slot, context, context + room) for slot in self._slots)
        self._run(self._slots, context - 1, 1, assignments).wait()
        self._length = context

    def accepted(self, batch: int, context: int, num_drafts: int) -> tuple[float, float, float]:
        """The shares of first ids that are those without drafts, of right drafts that are accepted,
        and of wrong ones. Where they cannot be the same to the bit, a greedy id may be another."""
        state, room = self._random.getstate(), 2 * num_drafts + 4
        drafts: list[tuple[int, ...]] | None = None
        found: list[SampledTokens] = []
        for wrong in (0, 0, 1):
            self._random.setstate(state)
            self.begin(batch, context, room)
            if drafts is None:
                steps = [self._decode().wait().token_ids for _ in range(num_drafts + 1)]
                drafts, first = list(zip(*steps[:-1], strict=True)), steps[0]
                continue
            vocab_size = self.info.vocab_size
            of_rows = [tuple((each + wrong) % vocab_size for each in row) for row in drafts]
            found.append(self._decode(tuple(of_rows)).wait())
        same = sum(a == b for one in found for a, b in zip(one.token_ids, first, strict=True))
        nums = [sum(len(more.token_ids) for more in one.further.values()) for one in found]
        num = batch * num_drafts
        return same / (2 * batch), nums[0] / num, nums[1] / num

    def decode(self, num_steps: int, num_drafts: int = 0) -> DecodeTimes:
        """num_steps: at least two. Each is launched before the previous one is awaited, as in the
        engine's loop. num_drafts: of each sequence, all wrong but by chance."""
        drafts = (tuple(range(num_drafts)),) * len(self._slots) if num_drafts else ()
        ends = [Mark() for _ in range(num_steps)]
        host, waited, late = [], [], []
        before: tuple[PendingTokens, Mark] | None = None
        for end in ends:
            started_s = time.perf_counter()
            launched = self._decode(drafts)
            end.set()
            launched_s = time.perf_counter()
            host.append(launched_s - started_s)
            if before:
                pending, before_end = before
                late.append(before_end.has_come())
                pending.wait()
                waited.append(time.perf_counter() - launched_s)
            before = launched, end
        launched.wait()
        steps = [first.seconds_to(second) for first, second in pairwise(ends)]
        return DecodeTimes(
            step_s=statistics.median(steps),
            host_s=statistics.median(host),
            waited_s=statistics.median(waited),
            late_ratio=sum(late) / len(late),
        )

    def _decode(self, drafts: tuple[tuple[int, ...], ...] = ()) -> PendingTokens:
        num_tokens = 1 + len(drafts[0]) if drafts else 1
        batch = len(self._slots)
        launched = self._run(
            self._slots, self._length, num_tokens, num_decodes=batch, drafts=drafts
        )
        self._length += 1
        return launched

    def _assignment(self, slot: int, num_tokens: int, room: int) -> SlotAssignment:
        """A sequence of random ids, whose blocks follow those of the previous slot."""
        info = self.info
        num_blocks = -(-room // info.block_size)
        ids = tuple(self._random.choices(range(info.vocab_size), k=num_tokens))
        blocks = tuple(range(slot * num_blocks, (slot + 1) * num_blocks))
        return SlotAssignment(slot, ids, num_tokens, (blocks,), _GREEDY, seed=slot)

    def _run(
        self,
        slots: tuple[int, ...],
        start: int,
        num_tokens: int,
        assignments: tuple[SlotAssignment, ...] = (),
        copies: tuple[BlockCopy, ...] = (),
        num_decodes: int = 0,
        drafts: tuple[tuple[int, ...], ...] = (),
    ) -> PendingTokens:
        self._step += 1
        return self._executor.execute(
            ScheduledBatch(
                step=self._step,
                assignments=assignments,
                table_updates=(),
                copies=copies,
                slots=slots,
                starts=(start,) * len(slots),
                num_tokens=(num_tokens,) * len(slots),
                samples=(True,) * len(slots),
                num_decodes=num_decodes,
                drafts=drafts,
            )
        )
