"""Which kernels the kernels' tests launch on a GPU, found on a machine without one.

The tests run on `tests.support.pretend_gpu`, which computes nothing, so that many of them fail
after the launches that count. What a test would launch after an assertion that fails here is
missed, and compiled when it is launched. Run it without TRITON_INTERPRET.
"""

import os
from collections.abc import Iterator
from contextlib import redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import transformers  # noqa: F401  before torch is replaced
from torch import Tensor
from triton.runtime.jit import JITFunction

from penstock.engine.kernels.launch import overlap
from tests.bench.gpu.kernel_tests import OPTIONS
from tests.bench.gpu.pytest_rows import of_one_type
from tests.support.pretend_gpu import Pointer, PretendGpu


@dataclass(frozen=True, slots=True)
class Recorded:
    """A launch, as `tests.support.compile_kernels.Launch`."""

    name: str
    key: str
    kernel: JITFunction[Any]
    arguments: dict[str, Any]

    def warm_up(self) -> None:
        self.kernel.run(**self.arguments, grid=(1,), warmup=True)


class Recorder(PretendGpu):
    def __init__(self) -> None:
        super().__init__(answer=1)
        self.found: dict[str, Recorded] = {}

    def launch(self, kernel: JITFunction[Any], grid: Any, args: Any, kwargs: Any) -> None:
        super().launch(kernel, grid, args, kwargs)
        key = self.launches[-1].key
        if key not in self.found:
            names = [parameter.name for parameter in kernel.params]
            given = dict(zip(names, args, strict=False)) | kwargs
            kept = {name: _kept(value) for name, value in given.items()}
            self.found[key] = Recorded(kernel.__name__, key, kernel, kept)


def _kept(value: object) -> object:
    """Of a tensor what Triton specializes by: its type, and how its address is aligned."""
    if not isinstance(value, Tensor):
        return value
    return Pointer(value.dtype, int(value.storage_offset()) * value.itemsize)


class _OfOneType:
    """A plugin of pytest."""

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        items[:] = of_one_type(items)


def launches_of(file: str) -> Iterator[Recorded]:
    """Each kernel once, started early, as on a Hopper."""
    gpu = Recorder()
    # What pytest says would stand between the rows of a command that prints rows.
    with (
        Path(os.devnull).open("w") as nowhere,
        redirect_stdout(nowhere),
        overlap(True),
        gpu.installed(),
    ):
        pytest.main([*OPTIONS, "--timeout=120", file], plugins=[_OfOneType()])
    yield from gpu.found.values()
