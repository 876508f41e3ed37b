"""float16 in the compiled step, on each kind of processor: conversions, and whole steps."""

import ctypes
import platform
import shutil
import subprocess
from pathlib import Path

import pytest
import torch
from torch import Tensor

from penstock.engine.native import model as native
from tests.support.tiny_models import Harness, make_model, save

if not shutil.which("g++"):
    pytest.skip("there is no g++", allow_module_level=True)

# Integer arithmetic, F16C, AVX-512, and this processor's own; elsewhere only the last.
TARGETS = {
    "x86-64": "",
    "x86-64-v3": "f16c",
    "x86-64-v4": "avx512vl",
    "native": "",
}
if platform.machine() != "x86_64":
    TARGETS = {"native": ""}


@pytest.fixture(scope="module", params=TARGETS)
def library(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> ctypes.CDLL:
    """step.cpp, compiled for one kind of processor, with the functions of conversions.cpp."""
    needed = TARGETS[request.param]
    if needed and needed not in Path("/proc/cpuinfo").read_text():
        pytest.skip(f"this processor lacks {needed}")
    path = tmp_path_factory.mktemp("native") / "native.so"
    source, step = Path(__file__).with_name("conversions.cpp"), Path(native.__file__).parent
    flags = ("-std=c++20", "-O1", f"-march={request.param}", "-Wno-psabi", "-fopenmp", "-fPIC")
    subprocess.run(
        ["g++", *flags, f"-I{step}", "-shared", str(source), "-o", str(path)], check=True
    )
    return ctypes.CDLL(str(path))


def test_every_float16_is_widened_as_by_torch(library: ctypes.CDLL) -> None:
    halves = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16)
    vectors, values = torch.empty(2, 2**16).unbind()
    library.widened(
        *map(_pointer, (halves,)), ctypes.c_int64(2**16), *map(_pointer, (vectors, values))
    )
    expected = halves.view(torch.float16).float()
    for widened in (vectors, values):
        torch.testing.assert_close(widened, expected, rtol=0, atol=0, equal_nan=True)


def test_floats_are_rounded_as_by_torch_and_what_float16_cannot_hold_is_nan(
    library: ctypes.CDLL,
) -> None:
    floats = _floats()
    vectors, values = torch.empty(2, len(floats), dtype=torch.int16).unbind()
    library.rounded(
        _pointer(floats), ctypes.c_int64(len(floats)), *map(_pointer, (vectors, values))
    )
    expected = floats.half().float()
    expected[expected.isinf()] = float("nan")
    assert expected.isnan().sum() > 1000 < expected.isfinite().sum()
    for rounded in (vectors, values):
        widened = rounded.view(torch.float16).float()
        torch.testing.assert_close(widened, expected, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_the_step_agrees_with_torchs_on_every_kind_of_processor(
    library: ctypes.CDLL, dtype: torch.dtype, tmp_path: Path
) -> None:
    path = save(make_model("qwen3"), tmp_path)
    tolerance = {torch.float16: 0.04, torch.bfloat16: 0.4}[dtype]
    made = [Harness(path, dtype=dtype, native=True, library=library), Harness(path, dtype=dtype)]
    for harness in made:
        harness.token_table[0, :20] = torch.arange(20)
    for row in ((0, 0, 19), (0, 19, 1)):
        ours, torchs = (harness.run([row])[0] for harness in made)
        torch.testing.assert_close(ours, torchs, atol=tolerance, rtol=0)


def _floats() -> Tensor:
    """All float16 and their neighbours, the middle between each two, and random bits."""
    halves = (
        torch.arange(2**15 - 2**10, dtype=torch.int32).to(torch.int16).view(torch.float16).float()
    )
    middles = (halves[:-1] + halves[1:]) / 2
    exact = torch.cat((halves, middles, torch.tensor([65519.0, 65520.0, 1e9, float("inf")])))
    bits = exact.view(torch.int32)
    near = torch.cat((bits, bits[1:] - 1, bits[:-1] + 1)).view(torch.float32)
    noise = torch.randint(-(2**31), 2**31, (2**16,), generator=torch.Generator().manual_seed(0))
    floats = torch.cat((near, -near, noise.to(torch.int32).view(torch.float32)))
    return floats[: len(floats) // 16 * 16].contiguous()


def _pointer(tensor: Tensor) -> ctypes.c_void_p:
    return ctypes.c_void_p(tensor.data_ptr())
