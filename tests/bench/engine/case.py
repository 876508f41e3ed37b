"""One kernel at one size: its calls, its reference, and the least that it must move and do."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor

from tests.bench.engine.timing import Call, compute_dtype, num_input_sets, the_device

Sizes = TypeVar("Sizes", bound=Sequence[Any])


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """calls: the same work on inputs of their own. error: runs the first of them on a poisoned
    output and compares; tolerances: of the type, below which it is. num_bytes: each input read
    once, each output written once. rivals: the same by other means, where there are any;
    rival_errors: these too are checked."""

    kernel: str
    at: dict[str, object]
    calls: Sequence[Call]
    error: Callable[[], float]
    num_bytes: int
    flops: int = 0
    rivals: dict[str, Sequence[Call]] = field(default_factory=dict)
    rival_errors: dict[str, Callable[[], float]] = field(default_factory=dict)
    tolerances: float = 1.0

    @property
    def name(self) -> str:
        return ", ".join([self.kernel, *(f"{key} {value}" for key, value in self.at.items())])


@dataclass(frozen=True, slots=True, kw_only=True)
class Bench:
    """What all cases of a run have in common. is_timed: their calls are, and not only checked."""

    tiny: bool
    flash_attn_3: Path | None = None
    device: torch.device = field(default_factory=the_device)
    is_timed: bool = True

    @property
    def dtype(self) -> torch.dtype:
        return compute_dtype(self.device)

    @property
    def num_sms(self) -> int:
        if self.device.type != "cuda":
            return 1
        return torch.cuda.get_device_properties(self.device).multi_processor_count

    def sets(self, num_bytes: int) -> int:
        """How many inputs of this size a case alternates."""
        return num_input_sets(num_bytes, self.device) if self.is_timed else 1

    def pick(self, timed: Sizes, checked: Sizes, tiny: Sizes) -> Sizes:
        """Of the sizes of cases."""
        return tiny if self.tiny else timed if self.is_timed else checked

    def random(self, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        """Fresh each time; a standard normal distribution."""
        return torch.randn(shape, device=self.device, dtype=dtype or self.dtype)

    def poisoned(self, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        """Memory in which every element that is not written shows."""
        return torch.full(shape, float("nan"), device=self.device, dtype=dtype or self.dtype)

    def ints(self, values: object) -> Tensor:
        return torch.tensor(values, dtype=torch.int32, device=self.device)


# A case is made when its turn comes, so that one which fails to be made does not end the others.
MakeCase = Callable[[], Case]
MakeCases = Callable[[Bench], Iterator[MakeCase]]


def size_of(*tensors: Tensor) -> int:
    """In bytes."""
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)
