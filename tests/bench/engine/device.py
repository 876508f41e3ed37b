"""What this device is and can do at most, measured: the ceilings of everything else."""

import platform
import subprocess
from importlib import metadata

import torch
from torch import Tensor

from penstock.engine.memory.hardware import peak_bandwidth
from tests.bench.engine.timing import compute_dtype, report, seconds_per_call, the_device

_COPY_BYTES, _TINY_COPY_BYTES = 2**31, 2**20
_MATRIX_SIZE, _TINY_MATRIX_SIZE = 8192, 64


def measure_device(tiny: bool) -> None:
    device = the_device()
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
    found: dict[str, object] = {"name": name, "datasheet_bytes_per_s": peak_bandwidth(name)}
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        found |= {
            "memory_bytes": properties.total_memory,
            "multiprocessors": properties.multi_processor_count,
            "l2_bytes": properties.L2_cache_size,
            "driver": _driver(),
        }
    found |= {
        "copy_bytes_per_s": _copy_bytes_per_s(device, tiny),
        "matrix_flops_per_s": _matrix_flops_per_s(device, tiny),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "triton": metadata.version("triton"),
    }
    report(part="device", **found)


def _copy_bytes_per_s(device: torch.device, tiny: bool) -> float:
    """Bytes read plus bytes written, of one large buffer into another."""
    num_bytes = _TINY_COPY_BYTES if tiny else _COPY_BYTES
    source = torch.randint(0, 127, (num_bytes // 4,), dtype=torch.int32, device=device)
    target = torch.empty_like(source)
    # By a kernel: a graph's copies are those of the copy engines, at two thirds of the rate.
    return 2 * num_bytes / seconds_per_call([lambda: torch.neg(source, out=target)])


def _matrix_flops_per_s(device: torch.device, tiny: bool) -> float:
    """Of one large product of random matrices."""
    size = _TINY_MATRIX_SIZE if tiny else _MATRIX_SIZE
    dtype = compute_dtype(device)

    def random() -> Tensor:
        return torch.randn(size, size, device=device, dtype=dtype)

    left, right, out = random(), random(), random()
    return 2 * size**3 / seconds_per_call([lambda: torch.mm(left, right, out=out)])


def _driver() -> str | None:
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        found = subprocess.run(command, capture_output=True, text=True, check=True, timeout=20)
    except (OSError, subprocess.SubprocessError):
        return None
    return found.stdout.splitlines()[0].strip()
