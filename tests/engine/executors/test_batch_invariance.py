"""On a CPU with a compiler, a token's result is bit for bit the same in whatever step it runs."""

import random
from pathlib import Path

import pytest

from penstock.engine.config import Dtype
from penstock.scheduler.config import SchedulerConfig
from penstock.scheduler.types import Request, RequestId, SamplingParams
from tests.support.compiler import needs_compiler
from tests.support.paths import DEMO_MODEL
from tests.support.stepping import SteppedEngine
from tests.support.tiny_models import engine_config, make_model, save

MAX_MODEL_LEN = 128
pytestmark = needs_compiler

Answer = list[tuple[int, float]]  # ids, with their logprobs to the last bit


@pytest.fixture(
    scope="module", params=["demo", "mistral_window", "qwen3", "llama_biases", "qwen3_moe"]
)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Sizes that fill whole vectors and sizes that do not, windows, norms and biases."""
    if request.param == "demo":
        return DEMO_MODEL
    return save(make_model(request.param), tmp_path_factory.mktemp(request.param))


def _requests(vocab_size: int) -> list[Request]:
    draw = random.Random(1)
    lengths = [draw.randrange(3, 80) for _ in range(16)]
    return [
        Request(
            id=RequestId(str(seed)),
            prompt_token_ids=tuple(draw.randrange(3, vocab_size) for _ in range(length)),
            sampling=SamplingParams(max_tokens=20, temperature=1.0, seed=seed, num_logprobs=0),
            arrival_s=0.0,
        )
        for seed, length in enumerate(lengths)
    ]


def _engine(model: Path, dtype: Dtype, num_seqs: int, budget: int, threads: int) -> SteppedEngine:
    """Its pool holds little more than two sequences, so a large batch preempts."""
    scheduler = SchedulerConfig(max_num_seqs=num_seqs, max_num_batched_tokens=budget)
    return SteppedEngine(
        engine_config(
            model,
            dtype=dtype,
            block_size=16,
            max_model_len=MAX_MODEL_LEN,
            kv_cache_memory_bytes=300 * 2 * 4 * 2 * 64 * _dtype_bytes(dtype)
            if model == DEMO_MODEL
            else None,
            num_threads=threads,
            scheduler=scheduler,
        )
    )


def _dtype_bytes(dtype: Dtype) -> int:
    return 4 if dtype is Dtype.FLOAT32 else 2


def _answers(engine: SteppedEngine) -> list[Answer]:
    return [
        [
            (token_id, entry.logprob)
            for output in outputs
            for token_id, entry in zip(output.token_ids, output.logprobs or [], strict=True)
            if entry
        ]
        for outputs in engine.run(_requests(engine.executor.info.vocab_size))
    ]


@pytest.mark.parametrize(
    "dtype",
    [
        Dtype.BFLOAT16,
        *(pytest.param(each, marks=pytest.mark.slow) for each in (Dtype.FLOAT32, Dtype.FLOAT16)),
    ],
)
def test_ids_and_logprobs_are_the_same_alone_together_in_chunks_and_after_a_preemption(
    model: Path, dtype: Dtype
) -> None:
    alone = _answers(_engine(model, dtype, 1, 256, threads=1))
    together = _engine(model, dtype, 16, 256, threads=1)
    assert _answers(together) == alone
    assert _answers(_engine(model, dtype, 7, 7, threads=1)) == alone
    assert _answers(_engine(model, dtype, 16, 64, threads=2)) == alone
    if model == DEMO_MODEL:
        assert together.scheduler.stats().preemptions_total > 0
