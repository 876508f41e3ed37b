"""LoRA adapters in the CUDA executor: its numbers are those of merged weights."""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed; pip install 'penstock[dev]'")

from penstock.engine.config import AdapterSource, LoraConfig
from penstock.engine.errors import AdapterRefused, UnknownAdapter
from penstock.engine.executors.cuda.device_tables import DeviceTables
from penstock.engine.executors.cuda.executor import CudaExecutor, DeviceModel
from penstock.engine.kernels.attention.paged.attention import PagedAttention
from penstock.engine.loading.description import describe
from penstock.engine.memory.pool.kv_layout import KVLayout
from penstock.engine.memory.pool.kv_pool import KVPools, PoolSize
from penstock.engine.models.config import ModelConfig
from penstock.engine.models.decoder.fused import FusedModel
from penstock.engine.models.decoder.model import LlamaModel
from penstock.engine.models.layers.linear import PlainLinear
from penstock.engine.models.lora.slots import AdapterSlots
from penstock.engine.models.lora.store import Adapters, no_adapters
from penstock.engine.models.lora.weights import max_adapter_bytes
from penstock.engine.models.weights import Checkpoint
from penstock.engine.sampling.grammar import GrammarCompiler, Grammars
from penstock.engine.sampling.grammar_table import GrammarTable
from penstock.scheduler.config import SchedulerConfig
from penstock.scheduler.types import Request, RequestId, RequestOutput, SamplingParams
from tests.support.adapters import ALL, merged, save_adapter
from tests.support.kernels import DEVICE
from tests.support.stepping import SteppedEngine, ids_of
from tests.support.tiny_models import engine_config, make_model, save

BLOCK_SIZE, NUM_BLOCKS, MAX_LEN, MAX_SEQS = 16, 24, 64, 4
MAX_RANK = 16
TOLERANCE = 1e-4
PROMPT = (5, 60, 61, 7, 90, 33, 8, 41, 12, 77, 3, 19, 20, 88, 34, 2, 71, 9, 50, 51, 18)
GREEDY = SamplingParams(max_tokens=2, temperature=0.0, num_prompt_logprobs=1, num_logprobs=0)
SETTINGS: dict[str, dict[str, Any]] = {
    "all": {},
    "rslora": {"use_rslora": True, "rank": MAX_RANK},
    "patterns": {
        "rank_pattern": {"q_proj": 2, "down_proj": 6},
        "alpha_pattern": {"k_proj": 3.0, "gate_proj": 1.0},
    },
    "some_layers": {"targets": ("v_proj", "up_proj"), "layers": (1,)},
    "odd_rank": {"rank": 3, "targets": ("k_proj", "o_proj", "down_proj")},
}


class Engine(SteppedEngine):
    """On the GPU where there is one, else on the CPU by Triton's interpreter."""

    executor: CudaExecutor

    def __init__(
        self, model: Path, chunk_sizes: Sequence[int] = (), budget: int = 64, max_loras: int = 2
    ) -> None:
        """max_loras: 0 for a server without adapters."""
        scheduler = SchedulerConfig(max_num_seqs=MAX_SEQS, max_num_batched_tokens=budget)
        lora = LoraConfig(max_loras=max_loras, max_rank=MAX_RANK) if max_loras else None
        executor = _executor(model, lora, chunk_sizes, budget)
        super().__init__(engine_config(model, lora=lora, scheduler=scheduler), executor)

    def load(self, path: Path) -> str:
        """Its id."""
        assert self.executor.adapters is not None
        source = AdapterSource(name=path.name, path=str(path))
        return self.executor.adapters.load(source).result().id

    def unload(self, adapter: str) -> None:
        assert self.executor.adapters is not None
        self.executor.adapters.unload(adapter)


def _executor(
    path: Path, lora: LoraConfig | None, chunk_sizes: Sequence[int], budget: int
) -> CudaExecutor:
    config, dtype = ModelConfig.from_dir(path), torch.float32
    layout = KVLayout.of(config.windows, MAX_LEN)
    num_blocks, *more_blocks = [NUM_BLOCKS] * len(layout.windows)
    size = PoolSize(num_blocks, MAX_LEN, tuple(more_blocks))
    with torch.inference_mode():
        llama = LlamaModel(
            config,
            Checkpoint(path, partial(torch.empty, dtype=dtype, device=DEVICE)),
            PlainLinear,
            max_model_len=MAX_LEN,
            device=DEVICE,
            maps_tables=False,
        )
    padded = [num + 1 for num in size.by_group]
    pool = KVPools(config.kv_shape, layout, padded, BLOCK_SIZE, dtype, DEVICE)
    windows = config.attention_windows(BLOCK_SIZE)
    attention = PagedAttention(windows, MAX_SEQS, budget, num_sms=1, device=DEVICE, dtype=dtype)
    info = describe(
        config,
        dtype,
        "here",
        size,
        BLOCK_SIZE,
        load_seconds={},
        weight_bytes=llama.step_weight_bytes,
        expert_bytes=0,
        kv_dtype=dtype,
    )
    slots = adapters = None
    if lora is not None:
        slots = AdapterSlots(config, lora.max_loras, lora.max_rank, dtype, DEVICE)
        cpu = torch.device("cpu")
        adapters = Adapters(lora, config, dtype, cpu, MAX_SEQS, make=slots.put, drop=slots.free)
    grammars = Grammars(GrammarCompiler(path, config.vocab_size, config.eos_token_ids))
    return CudaExecutor(
        DeviceModel(
            model=FusedModel(llama, pool, attention, MAX_SEQS, slots),
            pool=pool,
            tables=DeviceTables(MAX_SEQS, MAX_LEN, BLOCK_SIZE, size.by_group, DEVICE),
            grammars=GrammarTable(grammars, MAX_SEQS, config.vocab_size),
            info=info,
            max_num_seqs=MAX_SEQS,
            adapters=adapters or no_adapters(MAX_SEQS),
            chunk_sizes=chunk_sizes,
        )
    )


def request(adapter: str | None, prompt: tuple[int, ...] = PROMPT) -> Request:
    return Request(
        id=RequestId("request"),
        prompt_token_ids=prompt,
        sampling=GREEDY,
        arrival_s=0.0,
        adapter=adapter,
    )


def logprobs(outputs: list[RequestOutput]) -> list[float]:
    """Of the prompt from its second token on, then of the answer."""
    prompt = [each.prompt for each in outputs if each.prompt]
    (of_prompt,) = [each.logprobs for each in prompt if each.logprobs]
    answer = [entry.logprob for output in outputs for entry in output.logprobs or ()]
    return [*(entry.logprob for entry in of_prompt), *answer]


def check(
    outputs: list[RequestOutput], model: Any, adapter: Path | None, prompt: tuple[int, ...] = PROMPT
) -> None:
    """model: transformers' base model."""
    ids = torch.tensor([*prompt, *ids_of(outputs)])
    with torch.no_grad():
        of_ids = (merged(model, adapter) if adapter else model)(ids[None, :-1]).logits[0]
    wanted = of_ids.log_softmax(-1).gather(1, ids[1:, None])[:, 0]
    assert logprobs(outputs) == pytest.approx(wanted.tolist(), abs=TOLERANCE)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Path]:
    """Of one layer: the interpreter takes a second for each of a step."""
    model = make_model("qwen3", num_hidden_layers=1)
    return model, save(model, tmp_path_factory.mktemp("qwen3"))


@pytest.mark.slow
@pytest.mark.parametrize("settings", SETTINGS)
def test_logprobs_are_those_of_merged_weights(settings: str, tmp_path: Path) -> None:
    model = make_model("llama2", num_hidden_layers=2)
    path = save(model, tmp_path / "base")
    adapter = save_adapter(model, tmp_path / "adapter", **SETTINGS[settings])
    engine = Engine(path)
    (outputs,) = engine.run([request(engine.load(adapter))])
    check(outputs, model, adapter)


@pytest.mark.slow
@pytest.mark.parametrize(
    "family", ["llama_biases", "phi4", "gemma3", "olmo2", "qwen3_moe", "youtu"]
)
def test_an_adapter_changes_other_families_too(family: str, tmp_path: Path) -> None:
    """Of biases, of stacked names, of norms elsewhere, of another activation; of the attention
    beside experts; of attention to latents."""
    model = make_model(family, **({} if family == "gemma3" else {"num_hidden_layers": 1}))
    path = save(model, tmp_path / "base")
    targets: tuple[str, ...] = ("q_proj", "v_proj", "o_proj")
    if family != "qwen3_moe":
        targets = (*ALL, "qkv_proj", "gate_up_proj", "q_a_proj", "kv_a_proj_with_mqa")
    adapter = save_adapter(model, tmp_path / "adapter", targets=targets)
    engine = Engine(path)
    (outputs,) = engine.run([request(engine.load(adapter))])
    check(outputs, model, adapter)


@pytest.mark.parametrize(
    "chunk_sizes",
    [(24,), pytest.param((), marks=pytest.mark.slow)],
    ids=["graphs", "launched"],
)
def test_each_sequence_of_a_step_has_its_own_adapter_or_none(
    chunk_sizes: tuple[int, ...], tiny: tuple[Any, Path], tmp_path: Path
) -> None:
    model, path = tiny
    paths = [
        save_adapter(model, tmp_path / name, rank=rank, seed=rank, targets=targets)
        for name, rank, targets in (("first", 4, ALL), ("second", 7, ("q_proj", "down_proj")))
    ]
    # So small that chunks of two prompts and decodes are in one step.
    engine = Engine(path, chunk_sizes, budget=24)
    ids = [engine.load(each) for each in paths]
    of_rows = [(ids[0], paths[0]), (None, None), (ids[1], paths[1]), (ids[0], paths[0])]
    prompts = [PROMPT[:9], PROMPT[:4], PROMPT[:12], PROMPT[5:14]]
    outputs = engine.run(
        [request(id_, prompt) for (id_, _), prompt in zip(of_rows, prompts, strict=True)]
    )
    for found, (_, adapter), prompt in zip(outputs, of_rows, prompts, strict=True):
        check(found, model, adapter, prompt)


def test_a_step_without_adapters_has_the_bits_of_a_server_without_them(
    tiny: tuple[Any, Path], tmp_path: Path
) -> None:
    model, path = tiny
    engine = Engine(path)
    engine.load(save_adapter(model, tmp_path / "adapter"))
    (found,) = engine.run([request(None, PROMPT[:4])])
    (expected,) = Engine(path, max_loras=0).run([request(None, PROMPT[:4])])
    assert logprobs(found) == logprobs(expected)


def test_a_slot_that_another_adapter_had_holds_nothing_of_it(
    tiny: tuple[Any, Path], tmp_path: Path
) -> None:
    model, path = tiny
    engine = Engine(path, max_loras=1)
    first = engine.load(save_adapter(model, tmp_path / "first", rank=MAX_RANK, size=10.0))
    engine.unload(first)
    second = save_adapter(model, tmp_path / "second", rank=2, targets=("k_proj",))
    (outputs,) = engine.run([request(engine.load(second))])
    check(outputs, model, second)


def test_an_adapter_keeps_its_slot_until_its_requests_have_ended(
    tiny: tuple[Any, Path], tmp_path: Path
) -> None:
    model, path = tiny
    engine = Engine(path, max_loras=1)
    first = engine.load(save_adapter(model, tmp_path / "first"))
    running = request(first)
    engine.executor.prepare(running)
    engine.unload(first)
    second = save_adapter(model, tmp_path / "second", seed=1)
    with pytest.raises(AdapterRefused, match="all 1 slots for adapters are taken"):
        engine.load(second)
    engine.executor.release(running.id)
    with pytest.raises(UnknownAdapter):
        engine.executor.prepare(running)
    engine.load(second)


@pytest.mark.slow
def test_a_step_counts_the_bytes_of_each_of_its_adapters_once(
    tiny: tuple[Any, Path], tmp_path: Path
) -> None:
    model, path = tiny
    engine = Engine(path)
    config = ModelConfig.from_dir(path)
    ids = [
        engine.load(save_adapter(model, tmp_path / str(rank), rank=rank)) for rank in (4, MAX_RANK)
    ]
    for number, adapter in enumerate((ids[0], None, ids[1], ids[0])):
        one = replace(request(adapter, PROMPT[:3]), id=RequestId(str(number)))
        engine.executor.prepare(one)
        engine.scheduler.add(one)
    batch = engine.scheduler.schedule(0.0)
    assert batch is not None and len(batch.slots) == 4
    found = engine.executor.execute(batch).wait()
    assert found.adapter_bytes == max_adapter_bytes(config, 4 + MAX_RANK, 4)
