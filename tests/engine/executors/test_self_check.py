"""A GPU's check of itself at the start, with kernels that are right, wrong, or fail: by Triton's
interpreter."""

import asyncio
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", reason="Triton is not installed; pip install 'penstock[dev]'")

from triton.compiler.errors import CompilationError
from triton.runtime.errors import OutOfResources

from penstock.engine.config import Dtype, GpuWay, KVCacheDtype
from penstock.engine.executors.cuda.device import Interpreter
from penstock.engine.ipc.client import EngineClient
from penstock.engine.kernels.attention.paged.attention import PagedAttention
from penstock.engine.kernels.sample.sampler import DeviceSampler
from penstock.engine.loading.gpu import GpuLoading
from penstock.engine.loading.self_check import failures
from penstock.engine.models.decoder import fused
from penstock.engine.models.layers import fused_linear
from penstock.engine.models.parts.attention import gpu as attention
from penstock.engine.process.phases import Phases
from penstock.engine.step.gpu_fault import GpuWayFailed
from penstock.scheduler.config import SchedulerConfig
from penstock.scheduler.errors import InvalidConfig
from tests.support.faulty_gpu_engine import FAULTS
from tests.support.kernels import ON_GPU
from tests.support.paths import ROOT
from tests.support.quantized_checkpoints import FORMATS, save_quantized
from tests.support.scheduling import make_request
from tests.support.stepping import SteppedEngine, ids_of
from tests.support.tiny_models import engine_config, make_model, save

pytestmark = pytest.mark.skipif(ON_GPU, reason="kernels are compiled here, not interpreted")
SLOW = pytest.mark.slow


def loaded(path: Path, **changes: Any) -> GpuLoading:
    """Up to the weights."""
    settings: dict[str, Any] = {
        "block_size": 16,
        "kv_cache_memory_bytes": 2**20,
        "scheduler": SchedulerConfig(max_num_seqs=3, max_num_batched_tokens=64),
    }
    config = engine_config(path, **(settings | changes))
    loading = GpuLoading(config, path, None, Interpreter(), Phases())
    with torch.inference_mode():
        loading.plan()
        loading.read(loading.quantize())
    loading.used = 0
    return loading


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(make_model("qwen3"), tmp_path_factory.mktemp("tiny"))


@pytest.mark.parametrize(
    ("family", "changes"),
    [
        ("qwen3", {}),
        pytest.param("gemma3", {}, marks=SLOW),
        pytest.param("gemma4", {}, marks=SLOW),
        pytest.param("qwen3_5", {}, marks=SLOW),
        pytest.param("qwen3_moe", {}, marks=SLOW),
        pytest.param("qwen3", {"dtype": Dtype.HALF}, marks=SLOW),
        pytest.param("qwen3", {"kv_cache_dtype": KVCacheDtype.FP8}, marks=SLOW),
        pytest.param("qwen3", {"max_model_len": 3}, marks=SLOW),
    ],
)
def test_kernels_that_compute_what_torch_does_pass(
    family: str, changes: dict[str, Any], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    loaded(save(make_model(family), tmp_path), **changes).check()
    assert ("layers, by 0.0" in caplog.text) == ("max_model_len" not in changes)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["awq", "ct-fp8-channel"])
def test_weights_in_codes_pass(name: str, tmp_path: Path) -> None:
    path = tmp_path / "codes"
    save_quantized(make_model("qwen3", intermediate_size=128), path, FORMATS[name])
    loaded(path).check()


def _more(factor: float) -> Callable[[Tensor], Tensor]:
    return lambda out: out + factor * out


def _off(
    run: Callable[..., Any], argument: str | int, change: Callable[[Tensor], Tensor]
) -> Callable[..., Any]:
    """The same kernel, but what it wrote to this argument is off."""

    def wrong(*args: Any, **kwargs: Any) -> Any:
        returned = run(*args, **kwargs)
        out = kwargs[argument] if isinstance(argument, str) else args[argument]
        out.copy_(change(out))
        return returned

    return wrong


@pytest.mark.parametrize(
    ("place", "name", "argument", "change"),
    [
        (fused_linear, "skinny_linear", "out", _more(0.3)),
        (fused, "embed", 2, _more(1.0)),
        (fused, "silu_mul", 1, _more(1.0)),
        (fused, "add_rms_norm", 4, _more(1.0)),
        (attention, "rotate_and_store", 6, _more(2.0)),
        (PagedAttention, "__call__", 4, _more(3.0)),
        (PagedAttention, "rotated", 5, _more(3.0)),
        (DeviceSampler, "sample", 4, lambda ids: (ids + 1) % 90),
    ],
)
def test_a_kernel_that_computes_something_else_fails_with_its_way_and_how_far_it_is_off(
    place: Any,
    name: str,
    argument: str | int,
    change: Callable[[Tensor], Tensor],
    tiny: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(place, name, _off(getattr(place, name), argument, change))
    with pytest.raises(
        GpuWayFailed, match="give other logits than torch's operators: they differ"
    ) as failed:
        loaded(tiny, enforce_eager=True).check()
    assert failed.value.failed_way is GpuWay.EAGER


def test_a_kernel_that_does_not_compile_fails_with_its_way(
    tiny: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def compile_it(*args: Any, **kwargs: Any) -> None:
        raise CompilationError("def kernel():", None, "gdc_wait is unknown")

    monkeypatch.setattr(fused, "embed", compile_it)
    loading = loaded(tiny)
    with pytest.raises(GpuWayFailed, match="CompilationError") as failed, torch.inference_mode():
        loading.measure_step()
    assert failed.value.failed_way is GpuWay.GRAPHS
    assert "gdc_wait is unknown" in caplog.text


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"),
        RuntimeError("Triton Error [CUDA]: out of memory"),
        OutOfResources(295424, 232448, "shared memory"),
        InvalidConfig("lower --max-num-seqs"),
    ],
)
def test_what_a_setting_is_to_blame_for_is_no_failure_of_a_way(error: Exception) -> None:
    with pytest.raises(type(error)), failures(GpuWay.PDL):
        raise error


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fault", "why"),
    [
        ("wrong", "give other logits than torch's operators"),
        ("compile", "CompilationError"),
        ("hang", "did not finish a small step"),
    ],
)
async def test_the_server_goes_on_one_way_slower_after_each_fault_to_torchs_operators(
    fault: str,
    why: str,
    tiny: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setenv(FAULTS, json.dumps({"graphs": fault, "eager": fault}))
    config = engine_config(
        tiny,
        block_size=16,
        kv_cache_memory_bytes=2**20,
        scheduler=SchedulerConfig(max_num_seqs=2, max_num_batched_tokens=8),
    )
    engine = EngineClient(config, module="tests.support.faulty_kernels_engine")
    info = await asyncio.wait_for(engine.start(), 250)
    assert info.gpu_way is GpuWay.TORCH and info.computed_by == "torch"
    # A hang leaves no word of which way it was that the device had.
    names = ["pdl", "graphs", "eager"] if fault == "hang" else ["graphs", "eager"]
    assert [*engine.failed_ways] == names
    assert all(why in each for each in engine.failed_ways.values())
    if fault == "hang":
        assert "in _never_ends" in capfd.readouterr().err
    request = make_request("a", 5, max_tokens=3)
    outputs = [output async for each in engine.submit(request) for output in each]
    await engine.close()
    (expected,) = SteppedEngine(config).run([request])
    assert ids_of(outputs) == ids_of(expected)
