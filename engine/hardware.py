"""What the device can do at most: the datasheet's peak, and the bandwidth measured here."""

import time
import tomllib
from importlib import resources

import torch

from engine.memory import zeros_on_touch


def computes_bfloat16(device: torch.device) -> bool:
    """Whether bfloat16 is computed by the hardware, and not emulated at the price of speed."""
    if device.type == "cuda":
        return bool(torch.cuda.is_bf16_supported(including_emulation=False))
    # Private, but the only way to ask; where torch has renamed them, float32 is always right.
    names = ("_is_avx512_bf16_supported", "_is_amx_tile_supported")
    return any(getattr(torch.cpu, name, lambda: False)() for name in names)


def peak_bandwidth(device_name: str) -> float | None:
    """Bytes per second by the datasheet, or None for a device that configs/ does not list."""
    try:
        text = resources.files("configs").joinpath("hardware.toml").read_text(encoding="utf-8")
    except (ModuleNotFoundError, FileNotFoundError):
        return None
    for entry in tomllib.loads(text)["device"]:
        if entry["name"] in device_name:
            return float(entry["bandwidth_bytes_per_s"])
    return None


def read_bandwidth(num_bytes: int, repeats: int = 3) -> float:
    """Bytes per second that this process's torch threads read from memory: the best of a few.

    num_bytes should be far more than the last cache holds. Integers are summed, whose additions
    cost so little that the memory is what is measured.
    """
    buffer = zeros_on_touch((num_bytes // 8,), torch.int64).fill_(1)
    best = float("inf")
    for _ in range(repeats):
        start = time.perf_counter()
        buffer.sum()
        best = min(best, time.perf_counter() - start)
    return num_bytes / best
