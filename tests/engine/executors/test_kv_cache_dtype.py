"""A KV cache in 8 bits changes the answers little, and always in the same way."""

import logging
from typing import Any

import pytest
import torch

from penstock.engine.config import Dtype, KVCacheDtype, SpeculativeConfig
from penstock.engine.executors.cpu import CpuExecutor
from penstock.engine.memory.pool.kv_codes import LIMITS
from penstock.scheduler.config import SchedulerConfig
from penstock.scheduler.types import Request, RequestId, SamplingParams
from tests.support.compiler import needs_compiler
from tests.support.executors import cpu_executor
from tests.support.paths import DEMO_MODEL
from tests.support.quality import divergence, logits_of, text_ids
from tests.support.stepping import SteppedEngine
from tests.support.tiny_models import engine_config

# Nearer than this, two tokens may change places with the order in which products are summed.
MARGIN = 0.05
CODED = [KVCacheDtype.INT8, KVCacheDtype.FP8]


@pytest.fixture(scope="module")
def plain() -> torch.Tensor:
    return logits_of(DEMO_MODEL, torch.float32, text_ids(DEMO_MODEL))


# docs/serving.md has what was measured: a fifth of these bounds and less.
@pytest.mark.parametrize(("dtype", "bound"), [(torch.int8, 5e-3), (torch.float8_e4m3fn, 5e-2)])
def test_the_logits_diverge_little_from_those_of_a_plain_cache(
    dtype: torch.dtype, bound: float, plain: torch.Tensor
) -> None:
    coded = logits_of(DEMO_MODEL, dtype, text_ids(DEMO_MODEL))
    found = divergence(plain, coded)
    assert 0 < found.mean < bound
    assert found.same_top > 0.9


def _engine(kv: KVCacheDtype, *, num_seqs: int, budget: int, **changes: Any) -> SteppedEngine:
    scheduler = SchedulerConfig(max_num_seqs=num_seqs, max_num_batched_tokens=budget)
    return SteppedEngine(
        engine_config(
            DEMO_MODEL,
            kv_cache_dtype=kv,
            block_size=16,
            max_model_len=96,
            scheduler=scheduler,
            **changes,
        )
    )


def _requests() -> list[Request]:
    """Parts of a text; two begin alike, and the short ones grow."""
    ids = text_ids(DEMO_MODEL)
    sampling = SamplingParams(max_tokens=24, temperature=0.0, num_logprobs=2)
    parts = [ids[:40], ids[:32] + ids[100:110], ids[60:75], ids[90:150], ids[30:60]]
    parts += [ids[start : start + 14] for start in range(200, 280, 14)]
    return [
        Request(
            id=RequestId(str(index)), prompt_token_ids=tuple(part), sampling=sampling, arrival_s=0.0
        )
        for index, part in enumerate(parts)
    ]


Answer = list[tuple[int, float]]


def _answers(
    engine: SteppedEngine, requests: list[Request], num_cached: list[int] | None = None
) -> list[Answer]:
    """Ids, each with how much likelier it was than the second. num_cached: gets the tokens of each
    prompt that were in the prefix cache."""
    found = []
    for outputs in engine.run(requests):
        if num_cached is not None:
            num_cached.append(outputs[-1].num_cached_tokens)
        answer: Answer = []
        for output in outputs:
            for token_id, entry in zip(output.token_ids, output.logprobs or [], strict=True):
                assert entry is not None
                (_, first), (_, second) = entry.top[:2]
                answer.append((token_id, first - second))
        found.append(answer)
    return found


def _assert_same(answers: list[Answer], expected: list[Answer]) -> None:
    """Up to the first token of each that rounding may decide."""
    num_compared = 0
    for answer, right in zip(answers, expected, strict=True):
        sure = next((i for i, (_, margin) in enumerate(right) if margin < MARGIN), len(right))
        assert [token for token, _ in answer[:sure]] == [token for token, _ in right[:sure]]
        num_compared += sure
    assert num_compared >= sum(map(len, expected)) // 2


@pytest.mark.parametrize(
    "kv", [KVCacheDtype.INT8, pytest.param(KVCacheDtype.FP8, marks=pytest.mark.slow)]
)
def test_ids_are_the_same_alone_together_in_chunks_from_the_prefix_cache_and_after_a_preemption(
    kv: KVCacheDtype,
) -> None:
    requests = _requests()
    alone = _engine(kv, num_seqs=1, budget=256)
    expected = [_answers(alone, [request])[0] for request in requests]
    together = _engine(kv, num_seqs=8, budget=256)
    _assert_same(_answers(together, requests), expected)
    num_cached: list[int] = []
    _assert_same(_answers(together, requests, num_cached), expected)
    assert num_cached[:5] == [32, 32, 0, 48, 16]
    _assert_same(_answers(_engine(kv, num_seqs=7, budget=7), requests), expected)
    token_bytes = together.executor.info.kv_bytes_per_token
    small = _engine(kv, num_seqs=8, budget=64, kv_cache_memory_bytes=160 * token_bytes)
    _assert_same(_answers(small, requests), expected)
    assert small.scheduler.stats().preemptions_total > 0


def _executor(kv: KVCacheDtype) -> CpuExecutor:
    config = engine_config(
        DEMO_MODEL,
        dtype=Dtype.BFLOAT16,
        kv_cache_dtype=kv,
        max_model_len=512,
        kv_cache_memory_bytes=2**20,
        # A draft model's blocks would be beside these.
        speculative=SpeculativeConfig(num_speculative_tokens=0),
    )
    return cpu_executor(config, DEMO_MODEL)


@pytest.mark.slow
def test_the_cache_holds_twice_as_many_tokens_and_its_bytes_are_counted() -> None:
    plain, coded = (_executor(kv).info for kv in (KVCacheDtype.AUTO, KVCacheDtype.INT8))
    head_dim = plain.kv_bytes_per_token / coded.kv_bytes_per_token
    assert 1.6 < head_dim < 2
    assert coded.num_blocks / plain.num_blocks == pytest.approx(head_dim, rel=0.05)
    assert (plain.kv_cache_dtype, coded.kv_cache_dtype) == ("bfloat16", "int8")


@needs_compiler
def test_the_log_says_which_type_the_compiled_step_lacks(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        assert not (_executor(KVCacheDtype.INT8).info.computed_by or "").startswith("torch")
        assert "KV cache" not in caplog.text
        assert (_executor(KVCacheDtype.FP8).info.computed_by or "").startswith("torch")
    assert "the compiled step has no KV cache in fp8; use --kv-cache-dtype int8" in caplog.text


def test_all_types_in_8_bits_are_tested() -> None:
    assert len(LIMITS) == len(CODED) == len(list(KVCacheDtype)) - 1
