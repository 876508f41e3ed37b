"""From a config to a `CudaExecutor`, as far as it goes without a GPU: by Triton's interpreter."""

import logging
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed; pip install 'penstock[dev]'")

from gguf import GGMLQuantizationType
from triton.runtime.errors import OutOfResources

from penstock.engine.config import (
    AdapterSource,
    Dtype,
    EngineConfig,
    LoadFormat,
    LoraConfig,
    Quantization,
)
from penstock.engine.errors import UnknownAdapter
from penstock.engine.executors.cuda.chunk_steps import CHUNK_SIZES, chunk_sizes
from penstock.engine.executors.cuda.device import Interpreter, check_capability
from penstock.engine.executors.cuda.first_steps import largest_step
from penstock.engine.memory.gpu_budget import (
    GIB,
    MemoryBudget,
    check_adapters,
    check_weights,
    graph_bytes,
    out_of_memory,
    pool_advice,
    pool_bytes,
)
from penstock.engine.memory.ledger import Ledger
from penstock.engine.memory.pool.kv_layout import GroupPool
from penstock.engine.memory.pool.kv_pool import PoolSize, size_pool
from penstock.engine.models.at_load.quantize import quantization_plan
from penstock.engine.models.config import ModelConfig
from penstock.engine.models.formats.kept import AsStored, OnGpu
from penstock.engine.models.lora.weights import max_adapter_bytes
from penstock.scheduler.config import SchedulerConfig
from penstock.scheduler.errors import InvalidConfig
from penstock.scheduler.groups import KVGroup
from penstock.scheduler.stats import GraphSizes
from tests.support.adapters import save_adapter
from tests.support.executors import cuda_executor
from tests.support.gguf_files import quantized, write_gguf
from tests.support.kernels import ON_GPU
from tests.support.paths import DEMO_MODEL, MODEL_CONFIGS
from tests.support.quantized_checkpoints import FORMATS, QuantizedFormat, fp8, save_quantized
from tests.support.scheduling import make_request
from tests.support.stepping import SteppedEngine, ids_of
from tests.support.tiny_models import engine_config, make_model, save

SLOW = pytest.mark.slow
OTHER_FORMATS = [name for name in FORMATS if name not in ("awq", "fp8-block")]
ROOM = MemoryBudget(total=100 * GIB, used=30 * GIB, reserved=5 * GIB)
BLOCK = 2**20


def size(budget: int, max_len: int, *, may_shorten: bool = False, block_size: int = 64) -> PoolSize:
    return size_pool(
        [GroupPool(KVGroup(0), block_size, BLOCK)],
        SchedulerConfig(),
        budget=budget,
        max_blocks=1000,
        max_len=max_len,
        may_shorten=may_shorten,
        advice=lambda needed: f"give it {needed} bytes",
    )


def interpreted(model_dir: Path, **changes: object) -> EngineConfig:
    settings: dict[str, object] = {
        "block_size": 16,
        "kv_cache_memory_bytes": 2**20,
        "scheduler": SchedulerConfig(max_num_seqs=2, max_num_batched_tokens=8),
    }
    return engine_config(model_dir, **(settings | changes))


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(make_model("qwen3"), tmp_path_factory.mktemp("tiny"))


# By the interpreter.


@pytest.mark.slow
@pytest.mark.skipif(ON_GPU, reason="kernels are compiled here, not interpreted")
@pytest.mark.parametrize("dtype", [Dtype.FLOAT32, Dtype.HALF])
def test_what_is_set_up_answers_as_the_cpu_executor_and_refuses_an_adapter(
    tiny: Path, dtype: Dtype
) -> None:
    config = interpreted(tiny, dtype=dtype)
    requests = [make_request("a", 5, max_tokens=2), make_request("b", 14, max_tokens=2)]
    expected = SteppedEngine(config).run(requests)
    engine = SteppedEngine(config, cuda_executor(config, tiny, Interpreter()))
    found = engine.run(requests)
    assert [ids_of(outputs) for outputs in found] == [ids_of(outputs) for outputs in expected]
    with pytest.raises(UnknownAdapter, match="no adapter 'french'"):
        engine.executor.prepare(make_request("c", 5, adapter="french"))


@pytest.mark.skipif(ON_GPU, reason="kernels are compiled here, not interpreted")
@pytest.mark.parametrize(
    "name", ["awq", *(pytest.param(name, marks=SLOW) for name in OTHER_FORMATS)]
)
def test_quantized_weights_stay_in_codes_and_are_counted_so(
    name: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """But for codes in an order of their own, which no kernel reads: these become plain."""
    is_plain = "act-order" in name
    path = tmp_path / "codes"
    model = make_model("qwen3", intermediate_size=128)  # whole groups
    save(save_quantized(model, path, FORMATS[name]), tmp_path / "plain")
    requests = [make_request("a", 5, max_tokens=2)]
    plain, config = interpreted(tmp_path / "plain"), interpreted(path)
    (expected,) = SteppedEngine(plain).run(requests)
    executor = cuda_executor(config, path, Interpreter())
    assert ("stored as" in caplog.text) == is_plain
    (found,) = SteppedEngine(config, executor).run(requests)
    assert ids_of(found) == ids_of(expected)
    served = ModelConfig.from_dir(path)
    kept = OnGpu(torch.device("cpu")).num_bytes
    assert executor.info.weight_bytes == served.step_weight_bytes(4, kept)
    stored_bytes = served.step_weight_bytes(4, AsStored().num_bytes)
    assert is_plain or executor.info.weight_bytes < stored_bytes


@pytest.mark.slow
@pytest.mark.skipif(ON_GPU, reason="kernels are compiled here, not interpreted")
@pytest.mark.parametrize("name", [None, "awq"])
def test_adapters_of_a_model_that_is_set_up_give_what_the_cpu_executor_gives(
    name: str | None, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """name: the format of the base's weights."""
    caplog.set_level(logging.INFO)
    model = make_model("qwen3", intermediate_size=128)
    path, plain = tmp_path / "base", tmp_path / "plain"
    save(model if name is None else save_quantized(model, path, FORMATS[name]), plain)
    if name is None:
        path = plain
    adapter = save_adapter(model, tmp_path / "adapter")
    found: list[Any] = []
    for base in (plain, path):
        config = interpreted(base, lora=LoraConfig(max_loras=2, max_rank=8))
        executor = cuda_executor(config, base, Interpreter()) if found else None
        engine = SteppedEngine(config, executor)
        assert engine.executor.adapters is not None
        source = AdapterSource(name="adapter", path=str(adapter))
        loaded = engine.executor.adapters.load(source).result().id
        requests = [
            make_request("a", 5, max_tokens=2, adapter=loaded),
            make_request("b", 14, max_tokens=2),
        ]
        found.append([ids_of(outputs) for outputs in engine.run(requests)])
    assert found[0] == found[1]
    slots = f"adapters {2 * max_adapter_bytes(ModelConfig.from_dir(path), 8, 4) / 2**30:9.3f}"
    assert slots in caplog.text


@pytest.mark.slow
@pytest.mark.skipif(ON_GPU, reason="kernels are compiled here, not interpreted")
def test_groups_that_no_kernel_has_become_plain_and_the_log_says_what_that_costs(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    settings = FORMATS["fp8-block"].settings | {"weight_block_size": [32, 8]}
    narrow = QuantizedFormat("FP8", settings, fp8((32, 8), "weight_scale_inv"), "fp8")
    save_quantized(make_model("qwen3"), tmp_path, narrow)
    executor = cuda_executor(interpreted(tmp_path), tmp_path, Interpreter())
    assert "the weights are stored as FP8" in caplog.text
    plain = ModelConfig.from_dir(tmp_path).step_weight_bytes(4, AsStored().num_bytes)
    assert executor.info.weight_bytes == plain


@pytest.mark.skipif(ON_GPU, reason="kernels are compiled here, not interpreted")
@pytest.mark.slow
@pytest.mark.parametrize("method", [Quantization.FP8, Quantization.INT4])
def test_weights_are_rounded_at_load_compared_and_cached(
    method: Quantization,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    caplog.set_level(logging.INFO)
    path = save(make_model("qwen3", vocab_size=2048), tmp_path / "model")
    shutil.copy(DEMO_MODEL / "tokenizer.json", path)
    config = interpreted(path, quantization=method)
    executor = cuda_executor(config, path, Interpreter())
    assert f"{method} against the unquantized model: mean KL divergence" in caplog.text
    plan = quantization_plan(
        method, ModelConfig.from_dir(path), torch.float32, OnGpu(torch.device("meta"))
    )
    assert plan is not None and executor.info.weight_bytes == plan.step_weight_bytes
    found = executor.info.quantization
    assert found is not None and found.method == method and found.kl_divergence is not None
    assert "quantize" in executor.info.load_seconds
    requests = [make_request("a", 5, max_tokens=2)]
    (first,) = SteppedEngine(config, executor).run(requests)
    again = cuda_executor(config, path, Interpreter())
    assert "made at an earlier start" in caplog.text
    assert again.info.quantization == found
    (second,) = SteppedEngine(config, again).run(requests)
    assert ids_of(first) == ids_of(second)


@pytest.mark.slow
@pytest.mark.skipif(ON_GPU, reason="kernels are compiled here, not interpreted")
def test_quantized_weights_of_gguf_stay_in_codes(tmp_path: Path) -> None:
    model = make_model("qwen2")
    path = write_gguf(tmp_path / "model.gguf", model, quantized(GGMLQuantizationType.Q8_0))
    config = interpreted(path)
    requests = [make_request("a", 5, max_tokens=2), make_request("b", 14, max_tokens=2)]
    expected = SteppedEngine(config).run(requests)
    executor = cuda_executor(config, path, Interpreter())
    found = SteppedEngine(config, executor).run(requests)
    assert [ids_of(outputs) for outputs in found] == [ids_of(outputs) for outputs in expected]
    assert executor.info.weight_bytes < 2 * executor.info.num_parameters


@pytest.mark.skipif(ON_GPU, reason="kernels are compiled here, not interpreted")
def test_the_log_says_where_the_memory_went(tiny: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    executor = cuda_executor(interpreted(tiny), tiny, Interpreter())
    num_blocks = 2**20 // (16 * executor.info.kv_bytes_per_token) - 1  # one is for padding rows
    assert executor.info.num_blocks == num_blocks
    assert f"({num_blocks} blocks, {16 * num_blocks} tokens)" in caplog.text
    for name in ("weights", "kv_pool", "activations", "graphs", "others", "free", "total"):
        assert f" {name} " in caplog.text
    assert list(executor.info.load_seconds) == [
        "bandwidth",
        "flops",
        "weights",
        "activations",
        "kv_pool",
        "graphs",
    ]


@pytest.mark.skipif(ON_GPU, reason="kernels are compiled here, not interpreted")
def test_a_context_that_does_not_fit_the_gpus_pool_is_refused_with_what_would(tiny: Path) -> None:
    block_bytes = 24 * 2 * 3 * 2 * 24 * 4  # of 24 tokens: 5 for 120 of them, and one to spare
    settings = {"max_model_len": 120, "block_size": 24}
    config = interpreted(tiny, kv_cache_memory_bytes=6 * block_bytes - 1, **settings)
    needed = f"--kv-cache-memory-bytes to at least {6 * block_bytes} or --max-model-len to at most "
    with pytest.raises(InvalidConfig, match=f"{needed}96$"):
        cuda_executor(config, tiny, Interpreter())


class _Full(Interpreter):
    """Its memory runs out when the largest step has been run."""

    def release(self) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")


class _Small(Interpreter):
    def release(self) -> None:
        raise OutOfResources(295424, 232448, "shared memory")


class _Broken(Interpreter):
    def bandwidth(self) -> float | None:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")


class _Taken(Interpreter):
    def used_bytes(self) -> int:
        return self.total_bytes - 1000


@pytest.mark.skipif(ON_GPU, reason="kernels are compiled here, not interpreted")
def test_memory_that_runs_out_during_the_setup_is_a_sentence(tiny: Path) -> None:
    with pytest.raises(
        InvalidConfig, match=r"largest step.*lower --max-num-batched-tokens \(now 8"
    ):
        cuda_executor(interpreted(tiny), tiny, _Full())


@pytest.mark.skipif(ON_GPU, reason="kernels are compiled here, not interpreted")
def test_a_gpu_too_small_for_a_kernel_is_a_sentence(tiny: Path) -> None:
    with pytest.raises(InvalidConfig, match=r"232448 bytes of shared .* needs 295424; use --dtype"):
        cuda_executor(interpreted(tiny), tiny, _Small())


def test_what_else_goes_wrong_on_the_gpu_is_not_taken_for_that(tiny: Path) -> None:
    with pytest.raises(RuntimeError, match="illegal memory access"):
        cuda_executor(interpreted(tiny), tiny, _Broken())


def test_a_gpu_without_free_memory_is_reported_before_anything_is_read(tiny: Path) -> None:
    with pytest.raises(InvalidConfig, match=r"weights take 0.00 GiB.*only 0.00 are free"):
        cuda_executor(interpreted(tiny), tiny, _Taken())


# The arithmetic.


@pytest.mark.parametrize(
    ("max_num_seqs", "max_tokens", "max_len", "counts"),
    [(4, 10, 100, (7, 1, 1, 1)), (3, 10, 4, (4, 4, 2)), (2, 100, 8, (8, 8)), (2, 2, 1, (1, 1))],
)
def test_the_largest_step_has_every_row_and_token_that_fits(
    max_num_seqs: int, max_tokens: int, max_len: int, counts: tuple[int, ...]
) -> None:
    scheduler = SchedulerConfig(max_num_seqs=max_num_seqs, max_num_batched_tokens=max_tokens)
    batch = largest_step(scheduler, max_len, block_size=3)
    assert batch.num_tokens == counts
    assert [len(a.tables[0]) for a in batch.assignments] == [-(-count // 3) for count in counts]
    assert not any(block for a in batch.assignments for block in a.tables[0])


@pytest.mark.parametrize(
    ("model", "num_ranks", "device", "max_tokens", "largest"),
    [
        # Its 28 layers are launched in 3.6 ms; those of 2,048 tokens are computed in 1.8.
        ("Qwen3-0.6B", 1, "NVIDIA H200", 8192, 2048),
        ("Qwen3-0.6B", 1, "NVIDIA H200", 1100, 1024),
        ("Qwen3-0.6B", 1, "NVIDIA A100-SXM4-80GB", 8192, 1280),
        ("Qwen3-0.6B", 1, "NVIDIA Unknown", 8192, 512),
        ("Llama-3.1-8B", 1, "NVIDIA H200", 8192, 512),
        ("Llama-3.1-8B", 4, "NVIDIA H200", 8192, 1024),
        # Its 48 layers are launched in 6.2 ms, and its experts read in 12.
        ("Qwen3-30B-A3B", 1, "NVIDIA H200", 8192, 512),
    ],
)
def test_graphs_end_where_the_device_takes_longer_than_the_launches(
    model: str, num_ranks: int, device: str, max_tokens: int, largest: int
) -> None:
    config = ModelConfig.from_dir(MODEL_CONFIGS / model)
    sizes = chunk_sizes(config, num_ranks, device, torch.bfloat16, max_tokens)
    assert sizes[: len(CHUNK_SIZES)] == CHUNK_SIZES and sizes[-1] == largest
    assert list(sizes) == sorted(set(sizes))


def test_padding_to_a_large_graph_is_a_fifth_of_it_at_most_and_a_twelfth_on_average() -> None:
    config = ModelConfig.from_dir(MODEL_CONFIGS / "Qwen3-0.6B")
    sizes = GraphSizes((), chunk_sizes(config, 1, "NVIDIA H200", torch.bfloat16, 8192))
    shares = []
    for num_tokens in range(513, 2049):
        padding = sizes.padding(num_tokens, has_chunks=True)
        shares.append(padding / (num_tokens + padding))
    assert max(shares) < 1 / 5 and sum(shares) / len(shares) < 1 / 12


def test_the_pool_gets_what_the_share_leaves() -> None:
    config = EngineConfig(model="m", gpu_memory_utilization=0.8)
    assert pool_bytes(config, ROOM) == 45 * GIB
    assert pool_bytes(EngineConfig(model="m", kv_cache_memory_bytes=7), ROOM) == 7


def test_a_pool_larger_than_what_is_free_is_refused() -> None:
    fits = EngineConfig(model="m", kv_cache_memory_bytes=65 * GIB)
    assert pool_bytes(fits, ROOM) == 65 * GIB
    config = EngineConfig(model="m", kv_cache_memory_bytes=65 * GIB + 1)
    with pytest.raises(InvalidConfig, match=f"has {65 * GIB} bytes free; set it to at most that"):
        pool_bytes(config, ROOM)


def test_advice_names_the_flag_that_was_used_and_a_value_that_fits() -> None:
    by_share = EngineConfig(model="m", gpu_memory_utilization=0.4)
    assert pool_advice(by_share, ROOM)(15 * GIB) == "set --gpu-memory-utilization to at least 0.5"
    assert pool_advice(by_share, ROOM)(15 * GIB + 1).endswith("at least 0.501")
    by_bytes = EngineConfig(model="m", kv_cache_memory_bytes=GIB)
    assert (
        pool_advice(by_bytes, ROOM)(2 * GIB) == f"set --kv-cache-memory-bytes to at least {2**31}"
    )
    assert "has 10.00 GiB too little" in pool_advice(by_share, ROOM)(75 * GIB)
    assert "has 10.00 GiB too little" in pool_advice(by_bytes, ROOM)(75 * GIB)


def test_only_a_default_context_may_be_cut_to_the_pool() -> None:
    assert size(10 * BLOCK, 640) == PoolSize(10, 640)
    assert size(10 * BLOCK, 700, may_shorten=True) == PoolSize(10, 640)
    message = (
        f"holds 640 tokens.*=700; give it {11 * BLOCK} bytes or --max-model-len to at most 640"
    )
    with pytest.raises(InvalidConfig, match=message):
        size(10 * BLOCK, 700)
    with pytest.raises(InvalidConfig, match=r"holds 0 tokens.* bytes$"):
        size(-5, 700, may_shorten=True)


def test_a_last_block_that_is_not_full_counts_as_one() -> None:
    assert size(3 * BLOCK, 50, block_size=24) == PoolSize(3, 50)
    with pytest.raises(InvalidConfig, match=f"give it {3 * BLOCK} bytes or .* at most 48"):
        size(2 * BLOCK, 50, block_size=24)


def test_weights_larger_than_the_free_memory_are_refused_with_the_numbers() -> None:
    check_weights("H200", 140 * GIB, 16 * GIB, 16 * GIB, "bfloat16")
    with pytest.raises(InvalidConfig, match=r"take 16.00 GiB in bfloat16.*only 15.00 are free"):
        check_weights("H200", 140 * GIB, 15 * GIB, 16 * GIB, "bfloat16")
    with pytest.raises(InvalidConfig, match="halve them with --dtype bfloat16"):
        check_weights("H200", 140 * GIB, 15 * GIB, 16 * GIB, "float32")


def test_a_gpu_before_ampere_is_refused() -> None:
    check_capability("A100", (8, 0))
    with pytest.raises(InvalidConfig, match=r"T4 has compute capability 7.5.*--device cpu"):
        check_capability("T4", (7, 5))


def test_slots_of_adapters_that_do_not_fit_are_refused_by_both_flags() -> None:
    lora = LoraConfig(max_loras=100, max_rank=64)
    check_adapters(lora, "H100", num_bytes=30 * GIB, free=30 * GIB)
    with pytest.raises(
        InvalidConfig, match=r"--max-loras 100 of --max-lora-rank 64 take 31.00 GiB"
    ):
        check_adapters(lora, "H100", num_bytes=31 * GIB, free=30 * GIB)


def test_without_graphs_nothing_is_kept_for_them() -> None:
    assert graph_bytes(0, GIB) == 0
    assert graph_bytes(40, GIB) > 40 * 2**20 + 2 * GIB


@pytest.mark.parametrize(
    ("phase", "flag"),
    [
        ("bandwidth", "stop other processes"),
        ("flops", "stop other processes"),
        ("weights", "a smaller model"),
        ("activations", "lower --max-num-batched-tokens"),
        ("kv_pool", "lower --gpu-memory-utilization"),
        ("graphs", "--enforce-eager"),
    ],
)
def test_memory_that_runs_out_names_the_flag_to_change(phase: str, flag: str) -> None:
    assert flag in out_of_memory(EngineConfig(model="m"), phase)


@pytest.mark.parametrize("share", [0.0, -0.1, 1.01])
def test_a_share_that_is_none_is_refused(share: float) -> None:
    with pytest.raises(InvalidConfig, match="more than 0 and at most 1"):
        EngineConfig(model="m", gpu_memory_utilization=share)
    EngineConfig(model="m", gpu_memory_utilization=1.0)


@pytest.mark.parametrize("flag", ["block_size", "max_model_len", "kv_cache_memory_bytes"])
def test_sizes_below_one_are_refused(flag: str) -> None:
    name = flag.replace("_", "-")
    with pytest.raises(InvalidConfig, match=f"--{name} must be at least 1"):
        EngineConfig(model="m", **{flag: 0})  # type: ignore[arg-type]


def test_what_the_ledger_calls_free_is_what_nothing_uses() -> None:
    ledger = Ledger(total=100, others=10, weights=20, kv_pool=30, activations=5, graphs=1)
    assert ledger.free == 34
    assert Ledger(total=100, others=10, weights=20, kv_pool=30).free == 40


@pytest.mark.gpu
@pytest.mark.skipif(not ON_GPU, reason="there is no GPU")
def test_on_the_gpu_dummy_weights_are_served_from_a_bare_config_json(tmp_path: Path) -> None:
    make_model("qwen3").config.save_pretrained(tmp_path)
    config = EngineConfig(
        model=str(tmp_path),
        dtype=Dtype.BFLOAT16,
        load_format=LoadFormat.DUMMY,
        kv_cache_memory_bytes=2**24,
        scheduler=SchedulerConfig(max_num_seqs=4, max_num_batched_tokens=64),
    )
    engine = SteppedEngine(config, cuda_executor(config, tmp_path))
    outputs = engine.run([make_request("a", 5, max_tokens=4)])
    assert len(ids_of(outputs[0])) == 4
    assert engine.executor.info.measured_bandwidth_bytes_per_s
