"""The tensors of a checkpoint by name, mapped from its safetensors: one file, or several."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import Tensor

from penstock.engine.errors import InvalidModel
from penstock.engine.files.expert_tensors import Stack, stack_of
from penstock.engine.files.safetensors import INDEX, SINGLE, open_safetensors, read_weight_map
from penstock.engine.files.tensor_names import stored_name

# Plain weights have these. Others are codes, which mean nothing without the scales beside them.
PLAIN_DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.float64)


class TensorFiles:
    """Several threads may take tensors at the same time."""

    def __init__(self, model_dir: Path) -> None:
        """Raises InvalidModel."""
        self.directory = model_dir
        self._files: dict[str, Any] = {}
        self._file_of: dict[str, str] = {}
        index = model_dir / INDEX
        if index.exists():
            self._file_of = read_weight_map(index)
            for name in sorted(set(self._file_of.values())):
                self._open(name)
        else:
            self._open(SINGLE)
            self._file_of = dict.fromkeys(self._files[SINGLE].keys(), SINGLE)

    @property
    def names(self) -> Iterable[str]:
        return self._file_of

    def __contains__(self, name: object) -> bool:
        if not isinstance(name, str):
            return False
        return self._stored(name) in self._file_of or self._stack(name) is not None

    def get(self, name: str) -> Tensor:
        """Mapped, of any type. Raises InvalidModel."""
        stored = self._stored(name)
        file = self._file_of.get(stored)
        if file is None and (stack := self._stack(name)) is not None:
            return self._part(name, stack)
        if file is None:
            raise InvalidModel(
                f"the safetensors in {self.directory} lack the tensor {name!r}, "
                "which config.json implies"
            )
        try:
            tensor: Tensor = self._files[file].get_tensor(stored)
        except SafetensorError as error:
            raise InvalidModel(f"{self.directory / file}: {name!r}: {error}") from None
        return tensor

    def wrong_dtype(self, name: str, tensor: Tensor, allowed: str) -> InvalidModel:
        """allowed: the types that it may have, in words."""
        stack = self._stack(name)
        file = self._file_of[self._stored(name if stack is None else stack.name)]
        return InvalidModel(
            f"the tensor {name!r} in {self.directory / file} is {tensor.dtype}; {allowed}"
        )

    def wrong_shape(self, name: str, tensor: Tensor, shape: tuple[int, ...]) -> InvalidModel:
        return InvalidModel(
            f"the tensor {name!r} in {self.directory} has the shape {tuple(tensor.shape)}, "
            f"which does not fit the {shape} that config.json implies"
        )

    def not_finite(self, name: str, advice: str) -> InvalidModel:
        return InvalidModel(
            f"the tensor {name!r} in {self.directory} has numbers that are not finite (NaN or "
            f"infinity), so no answer could be right; {advice}"
        )

    def _stack(self, name: str) -> Stack | None:
        """The stack of an expert's tensor that is stored with those of the others."""
        return None if self._stored(name) in self._file_of else stack_of(name, self)

    def _part(self, name: str, stack: Stack) -> Tensor:
        whole = self.get(stack.name)
        try:
            return stack.take(whole)
        except (IndexError, RuntimeError):  # a tensor of fewer dimensions, too
            raise InvalidModel(
                f"the tensor {stack.name!r} in {self.directory} has the shape "
                f"{tuple(whole.shape)}, in which there is no {name!r}, which config.json implies"
            ) from None

    def _stored(self, name: str) -> str:
        return stored_name(name, self._file_of)

    def _open(self, name: str) -> None:
        path = self.directory / name
        if not path.exists():
            wanted_by = f"which {INDEX} names" if name != SINGLE else f"and neither does {INDEX}"
            raise InvalidModel(
                f"{path} does not exist, {wanted_by}; download the model again, "
                "or use --load-format dummy for random weights"
            )
        self._files[name] = open_safetensors(path, framework="pt")


def is_finite(tensor: Tensor) -> bool:
    # NaN wins both. 30 times as fast on a processor as isfinite of every element.
    return bool(torch.stack(tensor.aminmax()).isfinite().all())
