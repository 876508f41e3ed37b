"""The same requests on one rank and on several, and what must be equal."""

from dataclasses import replace
from pathlib import Path

import torch

from penstock.engine.config import EngineConfig
from penstock.engine.executors.cpu import CpuExecutor
from penstock.engine.models.config import ModelConfig
from penstock.engine.models.division.shard import Shard
from penstock.engine.models.division.stage import Stage
from penstock.scheduler.config import SchedulerConfig
from penstock.scheduler.prompt_logprobs import PromptLogprobs
from penstock.scheduler.types import (
    Request,
    RequestId,
    RequestOutput,
    SamplingParams,
    TokenLogprobs,
)
from tests.support.executors import cpu_executor
from tests.support.rank_threads import Digested, RankThreads, memberships
from tests.support.stepping import SteppedEngine, ids_of
from tests.support.tiny_models import engine_config

# Of logits, and so of logprobs, in float32; and how close two may be that change places.
TOLERANCE = 1e-4
# Blocks of 16: fewer than the sequences need, so that some are preempted.
_NUM_BLOCKS = 40
# Of recurrent states, in their place: one for each sequence, and snapshots.
_NUM_STATES = 24


def parallel_config(path: Path, **changes: object) -> EngineConfig:
    """Chunks, preemptions and cached prefixes."""
    model = ModelConfig.from_dir(path)
    block_bytes = 16 * model.kv_shape.bytes_per_token(4)
    state = model.kv_layout(320).state
    state_bytes = 0 if state is None else state.num_bytes
    settings: dict[str, object] = {
        "block_size": 16,
        "max_model_len": 320,
        "kv_cache_memory_bytes": _NUM_BLOCKS * block_bytes + _NUM_STATES * state_bytes,
        "scheduler": SchedulerConfig(max_num_seqs=8, max_num_batched_tokens=24),
    }
    return engine_config(path, **(settings | changes))


def requests(num_tokens: int, vocab_size: int = 96) -> list[Request]:
    """Greedy ones, some of whose prompts begin alike; the last with logprobs of its prompt."""
    generator = torch.Generator().manual_seed(5)
    prompts = [
        tuple(torch.randint(3, vocab_size, (n,), generator=generator).tolist())
        for n in (30, 47, 61)
    ]
    sampling = SamplingParams(max_tokens=num_tokens, temperature=0.0, num_logprobs=3)
    made = [
        Request(id=RequestId(str(i)), prompt_token_ids=ids, sampling=sampling, arrival_s=0.0)
        for i, ids in enumerate([*prompts, prompts[0], (*prompts[2][:40], 7, 8, 9)])
    ]
    scored = replace(sampling, max_tokens=4, num_prompt_logprobs=2)
    return [*made, replace(made[1], id=RequestId("scored"), sampling=scored)]


def assert_ranks_answer_alike(
    config: EngineConfig,
    tensor_size: int = 1,
    num_stages: int = 1,
    *,
    num_tokens: int = 200,
    tolerance: float = TOLERANCE,
    of_one: EngineConfig | None = None,
) -> RankThreads:
    """Returns the ranks, closed. of_one: what one rank computes, if not the same."""
    asked = requests(num_tokens, ModelConfig.from_dir(Path(config.model)).vocab_size)
    of_one = of_one or config
    alone = SteppedEngine(of_one, cpu_executor(of_one, Path(of_one.model)), _NUM_BLOCKS)
    expected = alone.run(asked)
    digested: list[Digested] = []

    def digest(rank: CpuExecutor) -> None:
        model = Digested(rank._model)
        rank._model = model
        digested.append(model)

    config = replace(config, tensor_parallel_size=tensor_size, pipeline_parallel_size=num_stages)
    ranks = RankThreads(
        replace(config, kv_cache_memory_bytes=rank_bytes(config)), memberships(config), digest
    )
    if len(ranks.info.kv_groups) == 1:
        assert ranks.info.num_blocks == alone.executor.info.num_blocks
    try:
        answers = SteppedEngine(config, ranks, _NUM_BLOCKS).run(asked)
    finally:
        ranks.close()
    for one, other in zip(expected, answers, strict=True):
        assert len(ids_of(one)) == len(ids_of(other))
        assert_close(one, other, tolerance)
    # Those of the last stage, which has the first ranks.
    first, *others = (each.digests for each in digested[:tensor_size])
    assert len(first) > num_tokens and all(each == first for each in others)
    return ranks


def rank_bytes(config: EngineConfig) -> int:
    """What it needs for as many blocks as are on one rank that has the whole model."""
    whole = ModelConfig.from_dir(Path(config.model))
    assert config.kv_cache_memory_bytes and config.block_size and config.max_model_len
    part = Shard(whole, 0, config.tensor_parallel_size).config
    stage = Stage(part, 0, config.pipeline_parallel_size)
    sizes = config.block_size, 4
    of_rank = stage.pools(part.kv_layout(config.max_model_len), *sizes)
    of_whole = whole.kv_layout(config.max_model_len).pools(whole.kv_shape, *sizes)
    num_bytes, all_bytes = (sum(pool.block_bytes for pool in each) for each in (of_rank, of_whole))
    return config.kv_cache_memory_bytes * num_bytes // all_bytes


def assert_close(
    expected: list[RequestOutput], given: list[RequestOutput], tolerance: float = TOLERANCE
) -> None:
    """Up to where two ids are equally likely, which may change places."""
    for one, other in zip(_logprobs(expected), _logprobs(given), strict=True):
        assert abs(one.logprob - other.logprob) < tolerance
        for (_, x), (_, y) in zip(one.top, other.top, strict=True):
            assert abs(x - y) < tolerance
        if one.top[0][0] != other.top[0][0]:
            assert one.top[0][1] - one.top[1][1] < tolerance
            return
    assert ids_of(given) == ids_of(expected)


def _logprobs(outputs: list[RequestOutput]) -> list[TokenLogprobs | PromptLogprobs]:
    found: list[TokenLogprobs | PromptLogprobs] = []
    for output in outputs:
        if output.prompt is not None:
            found += output.prompt.logprobs or ()
        found += output.logprobs or ()
    return found
