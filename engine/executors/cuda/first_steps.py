"""The steps that a start runs: small ones, so that every kernel is compiled, and the largest."""

from collections.abc import Iterator, Sequence

from penstock.engine.kernels.codes.tiles import TILE_ROWS
from penstock.engine.kernels.linear import MAX_ROWS
from penstock.engine.kernels.sizes import ceil_div
from penstock.engine.models.layers.fused_linear import MAX_TILED_ROWS
from penstock.engine.models.lora.store import Adapters
from penstock.engine.step.device_step import DraftSizes
from penstock.engine.step.model_input import AdapterRun
from penstock.scheduler.config import SchedulerConfig
from penstock.scheduler.types import (
    BlockCopy,
    PromptOutputRequest,
    SamplingParams,
    ScheduledBatch,
    SlotAssignment,
    TableUpdate,
)

_LARGE_SIZES = (1024, 2048, 4096, 8192)

# All sampling options at once, for the largest step; filters alone; and greedy.
_COSTLY = SamplingParams(
    max_tokens=1,
    temperature=1.0,
    top_k=100,
    top_p=0.9,
    min_p=0.01,
    repetition_penalty=1.1,
    num_logprobs=20,
)
_FILTERED = SamplingParams(max_tokens=1, top_p=0.9)
_GREEDY = SamplingParams(max_tokens=1, temperature=0.0)


class OneForAll(Adapters):
    """Every token has the adapter of the first slot, which changes nothing yet."""

    def runs(self, batch: ScheduledBatch, query_starts: Sequence[int]) -> tuple[AdapterRun, ...]:
        return (AdapterRun(0, query_starts[-1], 0),)


def small_steps(
    scheduler: SchedulerConfig,
    max_model_len: int,
    block_size: int,
    num_groups: int = 1,
    drafted: DraftSizes | None = None,
) -> Iterator[ScheduledBatch]:
    """One of prompts and one of decodes for each sampling mode, one of both, and numbers of rows
    and of tokens that take each path through a layer, but for that of `largest_step`; and those of
    decodes with drafts, where they may have any."""
    max_num_seqs = scheduler.max_num_seqs
    # Tiles of a mixture's rows grow with the number of tokens.
    for size in (*TILE_ROWS, MAX_TILED_ROWS + 1, *_LARGE_SIZES):
        if size < scheduler.max_step_tokens:
            counts = _spread(size, max_num_seqs, max_model_len)
            yield _prompts(counts, block_size, num_groups, _GREEDY)
    for num_rows in sorted({1, min(MAX_ROWS, max_num_seqs), max_num_seqs}):
        for sampling in (_COSTLY, _FILTERED, _GREEDY):
            yield _prompts([1] * num_rows, block_size, num_groups, sampling)
            yield _batch([1] * num_rows, (), num_decodes=num_rows)
    if max_num_seqs > 1 and scheduler.max_step_tokens > 1:
        # A decode beside a prompt, which graphs have, but without them another kernel computes.
        prompt = _assignment(1, 1, ((0,),) * num_groups, _GREEDY)
        yield _batch([1, 1], (prompt,), num_decodes=1)
    if drafted is not None and max_model_len > drafted.queries:
        for sampling in (_COSTLY, _FILTERED, _GREEDY):
            for size in drafted.tokens:
                num_rows = ceil_div(size, drafted.queries)
                yield _prompts([1] * num_rows, block_size, num_groups, sampling)
                counts = _spread(size, num_rows, drafted.queries + 1)
                drafts = tuple((0,) * (count - 1) for count in counts)
                yield _batch(counts, (), num_decodes=num_rows)._replace(drafts=drafts)


def largest_step(
    scheduler: SchedulerConfig, max_model_len: int, block_size: int, num_groups: int = 1
) -> ScheduledBatch:
    """The most tokens and sampling rows that a step may have, all in block 0, with all options."""
    counts = _spread(scheduler.max_step_tokens, scheduler.max_num_seqs, max_model_len)
    return _prompts(counts, block_size, num_groups, _COSTLY)


def _spread(num_tokens: int, max_num_seqs: int, max_model_len: int) -> list[int]:
    """So many tokens, or as many as there can be, over as many rows as there can be."""
    counts = [1] * min(num_tokens, max_num_seqs)
    left = num_tokens - len(counts)
    for row in range(len(counts)):
        more = min(left, max_model_len - 1)
        counts[row] += more
        left -= more
    return counts


def _prompts(
    counts: list[int], block_size: int, num_groups: int, sampling: SamplingParams
) -> ScheduledBatch:
    """Makes a batch of prompts of so many tokens each, all in block 0."""
    assignments = tuple(
        _assignment(slot, count, ((0,) * -(-count // block_size),) * num_groups, sampling)
        for slot, count in enumerate(counts)
    )
    return _batch(counts, assignments, num_decodes=0)


def _assignment(
    slot: int, num_tokens: int, tables: tuple[tuple[int, ...], ...], sampling: SamplingParams
) -> SlotAssignment:
    return SlotAssignment(
        slot=slot,
        token_ids=(0,) * num_tokens,
        num_prompt_tokens=num_tokens,
        tables=tables,
        sampling=sampling,
        seed=0,
        prompt_request=PromptOutputRequest(1, None) if slot == 0 else None,
    )


def _batch(
    counts: list[int], assignments: tuple[SlotAssignment, ...], *, num_decodes: int
) -> ScheduledBatch:
    num_rows = len(counts)
    return ScheduledBatch(
        step=0,
        assignments=assignments,
        table_updates=(TableUpdate(0, 0, 0),),
        copies=(BlockCopy(0, 0),),
        slots=tuple(range(num_rows)),
        # The device has the starts of decodes: in `small_steps` they come after one token.
        starts=(1,) * num_decodes + (0,) * (num_rows - num_decodes),
        num_tokens=tuple(counts),
        samples=(True,) * num_rows,
        num_decodes=num_decodes,
    )
