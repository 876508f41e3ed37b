"""LoRA adapters in an executor: one step holds several, and none changes what another gets."""

import logging
import random
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

from penstock.engine.config import AdapterSource, Dtype, LoraConfig, Quantization
from penstock.engine.errors import UnknownAdapter
from penstock.engine.executors.cpu import CpuExecutor
from penstock.engine.models.config import ModelConfig
from penstock.engine.models.lora.weights import max_adapter_bytes
from penstock.engine.native import compiler
from penstock.scheduler.config import SchedulerConfig
from penstock.scheduler.types import Request, RequestId, SamplingParams
from tests.support.adapters import save_adapter
from tests.support.compiler import needs_compiler
from tests.support.stepping import SteppedEngine
from tests.support.tiny_models import engine_config, make_model, save

Answer = list[tuple[int, float]]  # ids, with their logprobs to the last bit
RANKS = {"first": 4, "second": 16, "third": 3}


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of quantized weights; what is compiled stays where all tests have it."""
    compiled = compiler.cache_directory()
    monkeypatch.setattr(compiler, "cache_directory", lambda: compiled)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With adapters below it."""
    made = make_model("qwen3")
    path = save(made, tmp_path_factory.mktemp("qwen3"))
    for seed, (name, rank) in enumerate(RANKS.items()):
        save_adapter(made, path / name, rank=rank, seed=seed, alpha=2 * rank)
    return path


class AdaptedEngine(SteppedEngine):
    def __init__(
        self,
        model: Path,
        *,
        num_seqs: int = 8,
        budget: int = 256,
        threads: int = 1,
        dtype: Dtype = Dtype.FLOAT32,
        quantization: Quantization | None = None,
    ) -> None:
        """Its pool holds little more than two sequences, so a large batch preempts."""
        super().__init__(
            engine_config(
                model,
                dtype=dtype,
                quantization=quantization,
                lora=LoraConfig(),
                num_threads=threads,
                kv_cache_memory_bytes=40 * 2 * 3 * 2 * 24 * 4 * 4,
                max_model_len=100,
                scheduler=SchedulerConfig(max_num_seqs=num_seqs, max_num_batched_tokens=budget),
            )
        )
        assert isinstance(self.executor, CpuExecutor)
        self.ids = {
            name: self.executor.adapters.load(AdapterSource(name=name, path=str(model / name)))
            .result()
            .id
            for name in RANKS
        }

    def answers(self, requests: list[Request]) -> list[Answer]:
        """adapter: of each request, a name."""
        named = [
            replace(request, adapter=request.adapter and self.ids[request.adapter])
            for request in requests
        ]
        return [
            [
                (token_id, entry.logprob)
                for output in outputs
                for token_id, entry in zip(output.token_ids, output.logprobs or [], strict=True)
            ]
            for outputs in self.run(named)
        ]


def requests() -> list[Request]:
    """The same prompts with each adapter, and without one."""
    draw = random.Random(1)
    return [
        Request(
            id=RequestId(f"{seed}-{adapter}"),
            prompt_token_ids=tuple(draw.randrange(3, 96) for _ in range(length)),
            sampling=SamplingParams(max_tokens=20, temperature=1.0, seed=seed, num_logprobs=0),
            arrival_s=0.0,
            adapter=adapter,
        )
        for seed, length in enumerate((5, 21, 50))
        for adapter in (None, *RANKS)
    ]


@needs_compiler
@pytest.mark.parametrize(
    ("dtype", "quantization"),
    [
        (Dtype.FLOAT32, None),
        (Dtype.BFLOAT16, None),
        pytest.param(Dtype.BFLOAT16, Quantization.INT8, marks=pytest.mark.slow),
        pytest.param(Dtype.BFLOAT16, Quantization.FP8, marks=pytest.mark.slow),
        pytest.param(Dtype.BFLOAT16, Quantization.INT4, marks=pytest.mark.slow),
    ],
)
def test_answers_are_the_same_to_the_bit_alone_in_company_in_chunks_and_after_a_preemption(
    model: Path, dtype: Dtype, quantization: Quantization | None
) -> None:
    engine = partial(AdaptedEngine, model, dtype=dtype, quantization=quantization)
    alone = engine(num_seqs=1).answers(requests())
    assert len({str(answer) for answer in alone}) == len(alone)
    together = engine()
    assert together.answers(requests()) == alone
    if dtype is Dtype.FLOAT32:
        assert together.scheduler.stats().preemptions_total > 0
    assert engine(num_seqs=5, budget=7).answers(requests()) == alone
    assert engine(budget=64, threads=2).answers(requests()) == alone


def test_a_request_for_an_adapter_that_was_unloaded_is_refused_when_others_have_ended(
    model: Path,
) -> None:
    engine = AdaptedEngine(model)
    assert isinstance(engine.executor, CpuExecutor)
    store, adapter = engine.executor.adapters, engine.ids["first"]
    first, second, third = [
        replace(request, id=RequestId(name), adapter=adapter)
        for name, request in zip("abc", requests(), strict=False)
    ]
    engine.executor.prepare(first)
    store.unload(adapter)
    engine.executor.prepare(second)  # one that was on its way
    engine.executor.release(first.id)
    engine.executor.release(second.id)
    with pytest.raises(UnknownAdapter, match="no adapter 'first@"):
        engine.executor.prepare(third)


def test_a_step_counts_the_bytes_of_each_of_its_adapters_once(
    model: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    engine = AdaptedEngine(model)
    assert "(--max-loras of them, of --max-lora-rank)" in caplog.text
    sizes = max_adapter_bytes(ModelConfig.from_dir(model), 1, 4)
    for number, name in enumerate((None, "first", "third", "first")):
        request = replace(
            requests()[0], id=RequestId(str(number)), adapter=name and engine.ids[name]
        )
        engine.executor.prepare(request)
        engine.scheduler.add(request)
    batch = engine.scheduler.schedule(0.0)
    assert batch is not None and len(batch.slots) == 4
    found = engine.executor.execute(batch).wait()
    assert found.adapter_bytes == sizes * (RANKS["first"] + RANKS["third"])
