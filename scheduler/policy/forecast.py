"""`forecast_ttft_s`: when a request that arrives now would have its first token.

It walks what is before the request: the step that runs, the prompts that are computed first, at the
rate that the step model and the targets allow, and the wait for a slot and for blocks, which hangs
on how long the answers will be that run now. For that their `max_tokens` is the bound, and the
share of it that the last answers used is the estimate.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from math import ceil

from penstock.scheduler.cache.sequence import Sequence as Running
from penstock.scheduler.config import SchedulerConfig
from penstock.scheduler.inserts import SLICE_S
from penstock.scheduler.stats import StepClass, StepWork, expected_work
from penstock.scheduler.step_model.chunk_budget import ChunkBudget, chunk_budget
from penstock.scheduler.step_model.live import LiveStepModel

# Each answer that ends is this share of the mean share of max_tokens that answers use.
_NEW_SHARE = 0.05


class AnswerLengths:
    """How long answers become. share: of their max_tokens, on average."""

    def __init__(self) -> None:
        self.share = 1.0
        self._num = 0

    def on_end(self, sequence: Running) -> None:
        self._num += 1
        max_tokens = sequence.request.sampling.max_tokens
        length = len(sequence.token_ids) - sequence.num_prompt_tokens
        new = max(_NEW_SHARE, 1 / self._num)
        self.share += new * (length / max(1, max_tokens) - self.share)

    def left(self, sequence: Running) -> float:
        """Tokens that an answer is expected to have yet. One that is longer than most already is
        expected to use half as much of the rest."""
        num_left = sequence.max_length - len(sequence.token_ids)
        expected = self.share * sequence.request.sampling.max_tokens
        generated = len(sequence.token_ids) - sequence.num_prompt_tokens
        return max(expected - generated, self.share * num_left / 2, 1.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Ahead:
    """A request finds this. decoding: the sequences that decode. prompt_tokens: of others, to be
    computed before its own; prompt_positions: the sum of their positions. num_waiting: sequences
    that get a slot before it. num_blocks: that these and it need of each group of layers.
    num_slots, num_free_blocks: free now, the blocks of each group. has_prefills: the step that runs
    computes prompts. encoding_s: what it takes to encode the inserts of all these and its own."""

    decoding: Collection[Running]
    prompt_tokens: int
    prompt_positions: int
    num_waiting: int
    num_blocks: Sequence[int]
    num_slots: int
    num_free_blocks: Sequence[int]
    has_prefills: bool
    encoding_s: float = 0.0


def forecast_ttft_s(
    live: LiveStepModel,
    ahead: Ahead,
    lengths: AnswerLengths,
    config: SchedulerConfig,
    *,
    target_s: float | None,
    num_cohorts: int,
    num_new: int,
    num_cached: int,
) -> float | None:
    """target_s: how long a step with decodes may take. num_cohorts: see `Scheduler`; a step passes
    as many stages, and takes the model's time in each. num_new, num_cached: of its prompt's tokens,
    those to be computed and the others. None where the step model knows too little yet."""
    max_tokens = config.max_step_tokens
    num_running = min(config.max_num_seqs, len(ahead.decoding) + ceil(ahead.num_waiting / 2))
    num_decodes = ceil(num_running / num_cohorts)
    reads = [sequence.num_computed + 1 for sequence in ahead.decoding] or [num_new + num_cached]
    keys = int(num_decodes * (sum(reads) / len(reads)))
    decodes = _work(live, keys=keys, num_decodes=num_decodes)
    kind = StepClass.MIXED if num_decodes else StepClass.PREFILL
    # While nobody has served a mixed step, it is not known what one takes.
    if not live.is_trusted(kind) or (num_decodes and not live.is_trusted(StepClass.DECODE)):
        return None
    most = max(1, max_tokens - num_decodes)
    budget = chunk_budget(live, target_s, max_tokens=most, decodes=decodes)
    total = ahead.prompt_tokens + num_new
    positions = ahead.prompt_positions + num_new * (num_cached + num_new // 2)
    start, chunk = _middle_chunk(budget, total, positions // total, max_tokens)
    work = _work(live, keys=keys, num_decodes=num_decodes, chunk=chunk, start=start)
    step_s = _predicted(live, work, kind)
    decode_s = _predicted(live, decodes, StepClass.DECODE) if num_decodes else 0.0
    running_s = step_s if ahead.has_prefills else decode_s
    # Half of the step that runs, on average, and all of one that was launched after it.
    rest_s = running_s * (1.5 if live.served.runs_ahead else 0.5)
    own_s = max(num_new / chunk, 1.0) * step_s if total > chunk else step_s
    num_until_room = _steps_until_room(ahead, lengths) * num_cohorts
    room_s = num_until_room * (step_s if total > chunk else decode_s)
    before_s = max(ahead.prompt_tokens / chunk * step_s, room_s)
    # Beside decodes, encoding has a slice of each step, and the decodes are in between.
    slice_s = SLICE_S if target_s is None else max(target_s - decode_s, SLICE_S / 10)
    encoding_s = ahead.encoding_s * (1 + decode_s / slice_s)
    return rest_s + before_s + own_s + encoding_s + (num_cohorts - 1) * step_s


def _middle_chunk(budget: ChunkBudget, total: int, middle: int, max_tokens: int) -> tuple[int, int]:
    """Where a chunk begins that stands for all, as it is in the middle of what is to be computed,
    and its tokens."""
    chunk = max(1, min(total, budget.most(max(0, middle - min(total, max_tokens) // 2))))
    return max(0, middle - chunk // 2), chunk


def prefill_s(live: LiveStepModel, start: int, end: int, max_tokens: int) -> float | None:
    """How long prompt tokens from position `start` to `end` take to compute, in steps of their own
    of at most max_tokens; None where nothing is known yet of such steps."""
    total_s = 0.0
    for first in range(start, end, max_tokens):
        work = _work(live, chunk=min(max_tokens, end - first), start=first)
        chunk_s = live.predict(live.served.amounts(work), StepClass.PREFILL)
        if chunk_s is None:
            return None
        total_s += chunk_s
    return total_s


def _steps_until_room(ahead: Ahead, lengths: AnswerLengths) -> float:
    """Until as many answers have ended as hold the slots and blocks that are missing."""
    num_slots = ahead.num_waiting + 1 - ahead.num_slots
    missing = [
        needed - free for needed, free in zip(ahead.num_blocks, ahead.num_free_blocks, strict=True)
    ]
    if num_slots <= 0 and max(missing) <= 0:
        return 0.0
    by_end = sorted((lengths.left(s), [t.num_held for t in s.tables]) for s in ahead.decoding)
    if not by_end:
        return 0.0
    num_rounds, last = 0.0, by_end[-1][0]
    while True:
        for left, blocks in by_end:
            num_slots -= 1
            missing = [num - held for num, held in zip(missing, blocks, strict=True)]
            if num_slots <= 0 and max(missing) <= 0:
                return num_rounds * last + left
        # Those that take their places have to end too.
        num_rounds += 1


def _work(live: LiveStepModel, **work: int) -> StepWork:
    return expected_work([group.window for group in live.served.attention], **work)


def _predicted(live: LiveStepModel, work: StepWork, kind: StepClass) -> float:
    return live.predict(live.served.amounts(work), kind) or 0.0
