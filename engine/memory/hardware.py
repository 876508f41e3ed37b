"""How fast a device can be: the datasheet's peaks, and measurements of this machine."""

import statistics
import time
import tomllib
from collections.abc import Callable
from importlib import resources
from itertools import pairwise
from typing import Any

import torch

from penstock.engine.memory.host import zeros_on_touch
from penstock.scheduler.step_model.analytic import Link


def computes_bfloat16(device: torch.device) -> bool:
    """Whether the hardware computes bfloat16; emulating it is slow."""
    if device.type == "cuda":
        return bool(torch.cuda.is_bf16_supported(including_emulation=False))
    # Private, but the only way to find out. If torch renames them, float32 is always correct.
    names = ("_is_avx512_bf16_supported", "_is_amx_tile_supported")
    return any(getattr(torch.cpu, name, lambda: False)() for name in names)


def widens_products(dtype: torch.dtype) -> bool:
    """Whether this processor multiplies matrices of this type in float32: float16, and bfloat16
    where oneDNN has no products of it, which it has with AVX-512, AMX, or on ARM."""
    if dtype is not torch.bfloat16:
        return dtype is torch.float16
    return not (torch._C._has_mkldnn and torch.ops.mkldnn._is_mkldnn_bf16_supported())


def peak_bandwidth(device_name: str) -> float | None:
    """Bytes per second by the datasheet, or None for a device that configs/ does not list."""
    return _peak(device_name, "bandwidth_bytes_per_s")


def peak_flops(device_name: str, dtype: torch.dtype) -> float | None:
    """Operations per second by the datasheet, without sparsity. None if it is not listed.

    Only for bfloat16 and float16, whose peaks are the same on every GPU with both: how float32 is
    multiplied depends on torch's settings.
    """
    is_short = dtype in (torch.bfloat16, torch.float16)
    return _peak(device_name, "bf16_flops") if is_short else None


def link_of(device_name: str) -> Link | None:
    """By which devices of this name reach each other. None if it is not listed."""
    listed = _listed()
    name = _device(listed, device_name).get("link")
    for entry in listed.get("link", ()):
        if entry["name"] == name:
            return Link(
                name=name,
                latency_s=float(entry["latency_s"]),
                bus_bytes_per_s=float(entry["bus_bytes_per_s"]),
            )
    return None


def _peak(device_name: str, key: str) -> float | None:
    value = _device(_listed(), device_name).get(key)
    return None if value is None else float(value)


def _device(listed: dict[str, Any], device_name: str) -> dict[str, Any]:
    """Empty for a device that is not listed."""
    entries: list[dict[str, Any]] = listed.get("device", [])
    return next((entry for entry in entries if entry["name"] in device_name), {})


def _listed() -> dict[str, Any]:
    """The tables of configs/hardware.toml; none where there is no such file."""
    try:
        file = resources.files("penstock.configs").joinpath("hardware.toml")
        return tomllib.loads(file.read_text(encoding="utf-8"))
    except (ModuleNotFoundError, FileNotFoundError):
        return {}


def read_bandwidth(num_bytes: int = 2**28, repeats: int = 3) -> float:
    """Bytes per second that this process's torch threads read from memory: the best of a few runs.

    num_bytes: more than any last-level cache we know; it takes 30 ms. It sums integers, which is
    cheap enough to be bound by memory.
    """
    buffer = zeros_on_touch((num_bytes // 8,), torch.int64).fill_(1)
    return num_bytes / _least_s(buffer.sum, repeats)


def matmul_flops(dtype: torch.dtype, size: int = 768, repeats: int = 3) -> float:
    """Operations per second of this process's torch threads in a large matrix product: the best.

    size: of the square matrices, large enough to be bound by arithmetic, and a few ms long.
    What is multiplied in float32 (`WidenedLinear`, step.cpp) is measured so: torch's own product in
    bfloat16 is some 80 times as slow on AVX2.
    """
    dtype = torch.float32 if widens_products(dtype) else dtype
    left, right = (torch.rand(size, size).to(dtype) for _ in range(2))
    torch.mm(left, right)  # the first call also initialises
    return 2 * size**3 / _least_s(lambda: torch.mm(left, right), repeats)


def _least_s(run: Callable[[], object], repeats: int) -> float:
    times_s = []
    for _ in range(repeats):
        start = time.perf_counter()
        run()
        times_s.append(time.perf_counter() - start)
    return min(times_s)


def gpu_matmul_flops(
    device: torch.device, dtype: torch.dtype, size: int = 8192, repeats: int = 9
) -> float:
    """Operations per second of a GPU in a large matrix product: the median of some. size: of the
    square matrices. At 8,192 one takes 1.4 ms of an H200 in bfloat16."""
    # Random, of both signs: a GPU multiplies zeros faster, because they draw less power.
    left, right = (torch.randn(size, size, dtype=dtype, device=device) for _ in range(2))
    out = torch.mm(left, right)
    times_s = _gpu_times_s(lambda: torch.mm(left, right, out=out), repeats)
    return 2 * size**3 / statistics.median(times_s)


def copy_bandwidth(device: torch.device, num_bytes: int = 2**31, repeats: int = 9) -> float:
    """Bytes per second that a GPU reads and writes when it copies: the median of some copies.
    num_bytes: of each of the two buffers, far more than its caches hold; both are freed."""
    # Random, because zeros are copied faster than data is.
    source = torch.empty(num_bytes // 4, dtype=torch.int32, device=device).random_()
    target = torch.empty_like(source)
    target.copy_(source)  # the first access to memory costs more
    times_s = _gpu_times_s(lambda: target.copy_(source), repeats)
    return 2 * source.nbytes / statistics.median(times_s)


def _gpu_times_s(run: Callable[[], object], repeats: int) -> list[float]:
    """The device's time of each of `repeats` runs in a row."""
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(repeats + 1)]  # type: ignore[no-untyped-call]
    marks[0].record()
    for mark in marks[1:]:
        run()
        mark.record()
    marks[-1].synchronize()
    return [float(a.elapsed_time(b)) / 1e3 for a, b in pairwise(marks)]
