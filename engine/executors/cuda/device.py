"""A device's name, memory, bandwidth and arithmetic rate. Knows nothing of models."""

from typing import Protocol

import torch

from penstock.engine.memory.hardware import (
    copy_bandwidth,
    gpu_matmul_flops,
    matmul_flops,
    read_bandwidth,
)
from penstock.engine.memory.machine import available_memory_bytes, total_memory_bytes
from penstock.scheduler.errors import InvalidConfig

# Ampere, the first whose matrix units compute bfloat16.
_MIN_CAPABILITY = (8, 0)
_LARGEST_PROBE_BYTES = 2**31


class Device(Protocol):
    """has_kernels: whether it computes by those of a GPU. compiles_kernels: whether these must be
    compiled, and checked, at the start. moves_memory: what `bandwidth` measures, as a participle.
    capability: its major number, or None."""

    device: torch.device
    name: str
    has_kernels: bool
    compiles_kernels: bool
    moves_memory: str
    capability: int | None

    @property
    def total_bytes(self) -> int: ...

    def used_bytes(self) -> int:
        """By all processes, including what torch caches."""
        ...

    def release(self) -> None:
        """Frees what torch caches."""
        ...

    def bandwidth(self) -> float | None:
        """Bytes per second, or None where it is not measured."""
        ...

    def matmul_flops(self, dtype: torch.dtype) -> float | None:
        """Operations per second in a large product, or None where it is not measured."""
        ...


class CudaGpu:
    """See `Device`."""

    has_kernels, compiles_kernels, moves_memory = True, True, "copied"

    def __init__(self, device: torch.device) -> None:
        """Raises InvalidConfig for a GPU that is too old."""
        self.device = device
        self.name = torch.cuda.get_device_name(device)
        check_capability(self.name, capability := torch.cuda.get_device_capability(device))
        self.capability: int | None = capability[0]

    @property
    def total_bytes(self) -> int:
        return torch.cuda.mem_get_info(self.device)[1]

    def used_bytes(self) -> int:
        torch.cuda.synchronize(self.device)
        free, total = torch.cuda.mem_get_info(self.device)
        return total - free

    def release(self) -> None:
        torch.cuda.synchronize(self.device)
        torch.cuda.empty_cache()

    def bandwidth(self) -> float | None:
        """Counts the bytes that are read and written."""
        free = self.total_bytes - self.used_bytes()
        bandwidth = copy_bandwidth(self.device, min(_LARGEST_PROBE_BYTES, free // 4))
        self.release()
        return bandwidth

    def matmul_flops(self, dtype: torch.dtype) -> float | None:
        flops = gpu_matmul_flops(self.device, dtype)
        self.release()
        return flops


class Processor:
    """See `Device`."""

    device = torch.device("cpu")
    name = "cpu"
    has_kernels, compiles_kernels, moves_memory = False, False, "read"
    capability: int | None = None

    @property
    def total_bytes(self) -> int:
        return total_memory_bytes()

    def used_bytes(self) -> int:
        return total_memory_bytes() - available_memory_bytes()

    def release(self) -> None:
        """Nothing is cached."""

    def bandwidth(self) -> float | None:
        return read_bandwidth()

    def matmul_flops(self, dtype: torch.dtype) -> float | None:
        return matmul_flops(dtype)


class Interpreter(Processor):
    """This machine's processor, where Triton's interpreter runs the kernels.

    It computes what a GPU would, thousands of times slower: for tests.
    """

    name = "cpu, by Triton's interpreter"
    has_kernels, moves_memory = True, "copied"

    def bandwidth(self) -> float | None:
        return None

    def matmul_flops(self, dtype: torch.dtype) -> float | None:
        return None


def check_capability(name: str, capability: tuple[int, int]) -> None:
    """Raises InvalidConfig."""
    if capability < _MIN_CAPABILITY:
        raise InvalidConfig(
            f"{name} has compute capability {capability[0]}.{capability[1]}, and penstock's "
            "kernels need 8.0 (Ampere) or later; use another GPU, or --device cpu"
        )
