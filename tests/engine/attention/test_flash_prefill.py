"""FlashAttention 3 computes prefill chunks where it is right, and our kernels where it is not; by a
stand-in of its operator."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", reason="Triton is not installed; pip install 'penstock[dev]'")

from penstock.engine.config import AttentionBackend, Dtype, GpuWay, KVCacheDtype
from penstock.engine.executors.cuda.device import Interpreter
from penstock.engine.executors.cuda.executor import CudaExecutor, DeviceModel
from penstock.engine.kernels.attention.flash_prefill import FlashPrefill, library
from penstock.engine.kernels.attention.paged.attention import PagedAttention
from penstock.engine.kernels.attention.protocol import LayerContext
from penstock.engine.kernels.attention.shape import AttentionShape
from penstock.engine.loading.gpu import GpuLoading
from penstock.engine.process.phases import Phases
from penstock.engine.step.device_step import DeviceStep
from penstock.engine.step.gpu_fault import GpuWayFailed
from penstock.engine.step.model_input import ModelInput
from penstock.scheduler.config import SchedulerConfig
from tests.support.flash_attn_3_module import Installed, install, right
from tests.support.kernels import DEVICE, ON_GPU, TOLERANCE, error, poisoned, random
from tests.support.reference_attention import reference_attention
from tests.support.scheduling import make_request
from tests.support.stepping import SteppedEngine, ids_of
from tests.support.tiny_models import engine_config, make_model, save

pytestmark = pytest.mark.skipif(ON_GPU, reason="the stand-in computes on a processor")

CPU = torch.device("cpu")
HALF = torch.float16
SHAPE = AttentionShape(num_heads=6, num_kv_heads=2, head_dim=16, block_size=64)


class Hopper(Interpreter):
    capability = 9


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Installed:
    return install(monkeypatch, tmp_path / "site")


def found() -> FlashPrefill:
    place = library()
    assert place is not None
    return FlashPrefill(*place)


@pytest.mark.parametrize("package", ["flash_attn_3", "vllm"])
@pytest.mark.parametrize("window", [None, 1, 100])
@pytest.mark.parametrize(
    "shape", [SHAPE, AttentionShape(num_heads=4, num_kv_heads=4, head_dim=24, block_size=128)]
)
def test_its_arguments_are_those_of_causal_attention_over_a_paged_pool(
    package: str,
    window: int | None,
    shape: AttentionShape,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    calls = install(monkeypatch, tmp_path, package)
    for dtype in (torch.float16, torch.bfloat16):
        assert found().error(shape, window, dtype, CPU) < TOLERANCE[dtype]
    assert calls.num_calls == 2


def _one_key_more(**given: Any) -> Tensor:
    left = given["window_size_left"]
    return right(**given | {"window_size_left": left + 1 if left >= 0 else left})


def _blocks_in_order(**given: Any) -> Tensor:
    table = given["page_table"]
    return right(**given | {"page_table": table.sort(-1).values})


def _without_gqa_groups(**given: Any) -> Tensor:
    heads = given["q"].shape[1]
    order = torch.arange(heads).view(-1, given["k"].shape[2]).T.flatten()
    return right(**given)[:, order]


def _unwritten(*, out: Tensor, **given: Any) -> Tensor:
    return out


@pytest.mark.parametrize(
    "wrong", [_one_key_more, _blocks_in_order, _without_gqa_groups, _unwritten]
)
def test_another_result_is_found(wrong: Callable[..., Tensor], installed: Installed) -> None:
    installed.attend = wrong
    assert not found().error(SHAPE, 4096, HALF, CPU) <= 0.01


WIDE = AttentionShape(num_heads=2, num_kv_heads=1, head_dim=264, block_size=64)


def _error_of_mixed(window: int | None, shape: AttentionShape = SHAPE) -> float:
    """Of a step of three decodes, a whole prompt, and chunks after prefixes of one token and of
    several blocks, one of which ends with its block."""
    lengths, counts, num_decodes = [1, 300, 65, 90, 403, 128, 2], [1, 1, 1, 90, 3, 28, 1], 3
    attention = PagedAttention(
        {shape: {window}}, 8, 600, num_sms=2, device=DEVICE, dtype=HALF, flash=found()
    )
    max_blocks, num_rows = 7, len(lengths)
    pool = (num_rows * max_blocks, 64, shape.num_kv_heads, shape.head_dim)
    keys, values = random(*pool, seed=1, dtype=HALF), random(*pool, seed=2, dtype=HALF)
    generator = torch.Generator().manual_seed(0)
    tables = torch.randperm(pool[0], generator=generator).to(torch.int32).view(-1, max_blocks)
    slots = torch.randperm(num_rows, generator=generator)
    offsets = [0, *torch.tensor(counts).cumsum(0).tolist()]
    positions = torch.cat([torch.arange(n - c, n) for n, c in zip(lengths, counts, strict=True)])
    query = random(offsets[-1], shape.num_heads, shape.head_dim, dtype=HALF)
    ints = torch.zeros(offsets[-1], dtype=torch.int32)
    step = DeviceStep(
        token_ids=ints,
        positions=positions.int(),
        kv_slots=ints.long(),
        slots=slots.int(),
        context_lens=torch.tensor(lengths, dtype=torch.int32),
        num_decodes=num_decodes,
        chunk_starts=torch.tensor(offsets[num_decodes:], dtype=torch.int32) - num_decodes,
        block_tables=tables,
    )
    host = ModelInput(
        token_ids=ints,
        positions=positions,
        kv_slots=ints,
        block_tables=tables[slots],
        query_starts=offsets,
        context_lens=lengths,
        num_decodes=num_decodes,
        sample_rows=ints,
    )
    out = poisoned(*query.shape, dtype=HALF)
    attention.plan(step)
    attention(query, LayerContext(keys, values, window), step, out)
    return error(out, reference_attention(query, keys, values, host, window))


@pytest.mark.parametrize("window", [None, 70])
def test_decodes_are_ours_and_chunks_beside_them_are_its(
    window: int | None, installed: Installed
) -> None:
    assert _error_of_mixed(window) < TOLERANCE[HALF] and installed.num_calls == 1


def test_layers_whose_heads_it_has_no_kernel_for_are_ours(installed: Installed) -> None:
    assert _error_of_mixed(None, WIDE) < TOLERANCE[HALF] and installed.num_calls == 0


def loading(path: Path, device: Interpreter | None = None, **changes: Any) -> GpuLoading:
    settings: dict[str, Any] = {
        "block_size": 16,
        "dtype": Dtype.HALF,
        "kv_cache_memory_bytes": 2**20,
        "scheduler": SchedulerConfig(max_num_seqs=4, max_num_batched_tokens=64),
    }
    config = engine_config(path, **(settings | changes))
    made = GpuLoading(config, path, None, device or Hopper(), Phases())
    with torch.inference_mode():
        made.plan()
        made.read(made.quantize())
        made.used = 0
        made.choose_prefill()
    return made


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(make_model("qwen3"), tmp_path_factory.mktemp("tiny"))


@pytest.mark.parametrize(
    ("family", "has_graphs"),
    [
        ("olmo3", True),
        pytest.param("olmo3", False, marks=pytest.mark.slow),
        pytest.param("qwen3", True, marks=pytest.mark.slow),
        pytest.param("qwen3", False, marks=pytest.mark.slow),
    ],
)
def test_a_model_answers_the_same_in_steps_with_and_without_it(
    family: str,
    has_graphs: bool,
    installed: Installed,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Steps of up to 16 tokens are as in graphs."""
    caplog.set_level("INFO")
    path = save(make_model(family), tmp_path / "model")
    ours = loading(path, attention_backend=AttentionBackend.TRITON)
    flash = loading(path)
    assert ours.flash is None and flash.flash is not None
    assert caplog.text.count("prefill attention: FlashAttention 3") == 1
    requests = [
        make_request("a", 50, max_tokens=3),
        make_request("b", 20, max_tokens=5),
        make_request("c", 3, max_tokens=4),
    ]
    answers = []
    for each in (ours, flash):
        with torch.inference_mode():
            size = each.size_pool()
            made = each.complete(size)
        assert isinstance(made, DeviceModel)
        made = replace(made, use_graphs=has_graphs, chunk_sizes=(8, 16) if has_graphs else ())
        before = installed.num_calls
        outputs = SteppedEngine(each.config, CudaExecutor(made)).run(requests)
        answers.append([ids_of(of_request) for of_request in outputs])
        assert (installed.num_calls > before) == (each is flash)
    assert answers[0] == answers[1]


def _in_graphs(made: Callable[..., DeviceModel]) -> Callable[..., DeviceModel]:
    """Steps as small as the check's are as a GPU's graphs have them."""

    def with_sizes(*args: Any, **kwargs: Any) -> DeviceModel:
        return replace(made(*args, **kwargs), chunk_sizes=(64,) if kwargs["use_graphs"] else ())

    return with_sizes


def test_the_check_of_the_start_has_steps_without_a_graph(
    installed: Installed, tiny: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(GpuLoading, "_model_with", _in_graphs(GpuLoading._model_with))
    made = loading(tiny)
    installed.attend = lambda **given: 3 * right(**given)
    with pytest.raises(GpuWayFailed, match="give other logits"):
        made.check()
    made.flash, before = None, installed.num_calls
    made.check()
    assert installed.num_calls == before


def _is_off(**given: Any) -> Tensor:
    return right(**given) * 1.05


def _raises(**given: Any) -> Tensor:
    raise RuntimeError("This flash attention build does not support paged KV.")


@pytest.mark.parametrize(
    ("attend", "why"),
    [
        (_is_off, "its results are off torch's by 0.05 of their norm"),
        (_unwritten, "its results are off torch's by nan"),
        (_raises, "RuntimeError: This flash attention build does not support paged KV."),
    ],
)
def test_a_library_that_is_wrong_or_fails_is_not_used(
    attend: Callable[..., Tensor],
    why: str,
    installed: Installed,
    tiny: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    installed.attend = attend
    assert loading(tiny).flash is None
    assert "prefill attention: our kernels, not FlashAttention 3:" in caplog.text
    assert why in caplog.text


def test_a_broken_installation_is_not_used(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "flash_attn_3").mkdir()
    (tmp_path / "flash_attn_3" / "_C.abi3.so").write_text("of another machine")
    monkeypatch.syspath_prepend(tmp_path)
    assert loading(tiny).flash is None
    assert "not FlashAttention 3: OSError" in caplog.text
    assert "flash_attn_3/_C.abi3.so" in caplog.text


def test_a_fault_of_the_device_ends_this_way(installed: Installed, tiny: Path) -> None:
    def fault(**given: Any) -> Tensor:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    installed.attend = fault
    with pytest.raises(RuntimeError, match="illegal memory access"):
        loading(tiny)


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"gpu_way": GpuWay.GRAPHS}, "--gpu-way is graphs"),
        ({"kv_cache_dtype": KVCacheDtype.INT8}, "it needs bfloat16 or float16"),
        ({"dtype": Dtype.FLOAT32}, "it needs bfloat16 or float16"),
    ],
)
def test_what_it_does_not_take_is_ours_with_the_reason(
    changes: dict[str, Any],
    why: str,
    installed: Installed,
    tiny: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    assert loading(tiny, **changes).flash is None
    assert why in caplog.text and not installed.num_calls


@pytest.mark.slow
def test_a_model_with_sinks_is_ours(
    installed: Installed, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    assert loading(save(make_model("gpt_oss"), tmp_path / "model")).flash is None
    assert "the model's attention has sinks" in caplog.text and not installed.num_calls


@pytest.mark.parametrize("backend", [AttentionBackend.TRITON, AttentionBackend.TORCH])
def test_another_backend_is_not_overruled(
    backend: AttentionBackend, installed: Installed, tiny: Path
) -> None:
    assert loading(tiny, attention_backend=backend).flash is None and not installed.num_calls


def test_another_gpu_does_not_load_it(installed: Installed, tiny: Path) -> None:
    class Blackwell(Interpreter):
        capability = 10

    assert loading(tiny, Blackwell()).flash is None and not installed.num_calls


def test_without_it_the_log_says_whose_kernels_compute(
    tiny: Path, caplog: pytest.LogCaptureFixture
) -> None:
    if library() is not None:
        pytest.skip("FlashAttention 3 is installed")
    caplog.set_level("INFO")
    assert loading(tiny).flash is None
    assert "our kernels, not FlashAttention 3: it is not installed" in caplog.text
