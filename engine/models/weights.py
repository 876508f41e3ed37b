"""Where weights come from: a checkpoint's safetensors, or random numbers of the same shape.

A source returns one tensor of the model at a time, stacked from the tensors of the checkpoint that
the caller names. So q, k and v are read straight into one matrix, and nothing is in memory twice.
Several threads may read from a source at the same time.
"""

import zlib
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import torch
from safetensors import SafetensorError
from torch import Tensor

from penstock.engine.models.check import INDEX, SINGLE, open_safetensors, read_weight_map
from penstock.engine.models.errors import InvalidModel

if TYPE_CHECKING:
    from penstock.engine.models.layers.linear import Linear

# Not float8, which needs scales that are stored beside it.
_DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.float64)


# Allocates the memory that a weight is read into, on the device and in the type of its choice.
Empty = Callable[[tuple[int, ...]], Tensor]


class WeightSource(Protocol):
    def read(self, shape: tuple[int, ...], *names: str) -> Tensor:
        """The tensors `names` of the checkpoint, stacked along their first dimension to `shape`."""
        ...

    def quantized(
        self, shape: tuple[int, int], bias: Tensor | None, *names: str
    ) -> "Linear | None":
        """The linear layer of these, in a format of its own; None where the weights are plain.

        shape: (out_features, in_features). names: of layers, such as "model.layers.0.mlp.up_proj".
        """
        ...


class Checkpoint:
    """The safetensors beside config.json, one file or several, of a type in `_DTYPES`."""

    def __init__(self, model_dir: Path, empty: Empty) -> None:
        self._empty = empty
        self._model_dir = model_dir
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

    def read(self, shape: tuple[int, ...], *names: str) -> Tensor:
        parts = [self._tensor(name) for name in names]  # mapped; `copy_` is what reads them
        num_rows = 0
        for name, part in zip(names, parts, strict=True):
            num_rows += part.shape[0] if part.dim() else 0
            # Before memory is allocated: config.json may imply any amount of it.
            if part.shape[1:] != shape[1:] or num_rows > shape[0]:
                raise self._unexpected(name, part, shape)
        if num_rows != shape[0]:
            raise self._unexpected(names[-1], parts[-1], shape)
        fused = self._empty(shape)
        start = 0
        for name, part in zip(names, parts, strict=True):
            self._check_finite(name, part)
            stored = fused[start : start + len(part)].copy_(part)
            if stored.dtype is torch.float16 and part.dtype is not torch.float16:
                self._check_overflow(name, part, stored)
            start += len(part)
        return fused

    def quantized(self, shape: tuple[int, int], bias: Tensor | None, *names: str) -> None:
        return None

    def _check_finite(self, name: str, part: Tensor) -> None:
        """Of a vector all, of a matrix the first row: reading all twice would cost too much."""
        sample = part if part.dim() == 1 else part[:1]
        if not bool(sample.isfinite().all()):
            raise InvalidModel(
                f"the tensor {name!r} in {self._model_dir} has numbers that are not finite (NaN or "
                "infinity), so no answer could be right; download the model again, or convert it "
                "again in bfloat16 if float16 was too narrow"
            )

    def _tensor(self, name: str) -> Tensor:
        # Embedding models, saved without an output layer, omit the prefix "model.".
        stored = name if name in self._file_of else name.removeprefix("model.")
        file = self._file_of.get(stored)
        if file is None:
            raise InvalidModel(
                f"the safetensors in {self._model_dir} lack the tensor {name!r}, "
                "which config.json implies"
            )
        try:
            tensor: Tensor = self._files[file].get_tensor(stored)
        except SafetensorError as error:
            raise InvalidModel(f"{self._model_dir / file}: {name!r}: {error}") from None
        if tensor.dtype not in _DTYPES:
            raise InvalidModel(
                f"the tensor {name!r} in {self._model_dir / file} is {tensor.dtype}; "
                "only float32, float16 and bfloat16 weights are supported"
            )
        return tensor

    def _check_overflow(self, name: str, part: Tensor, stored: Tensor) -> None:
        """Raises InvalidModel where float16 cannot hold a weight. One that is not finite in the
        checkpoint either is not refused here: it shows in the logits, whatever the type."""
        if not _is_finite(stored) and _is_finite(part):
            raise InvalidModel(
                f"the tensor {name!r} in {self._model_dir} has the value "
                f"{float(part.abs().max()):g}, and float16 holds none above 65504; use --dtype "
                "bfloat16 or --dtype float32"
            )

    def _open(self, name: str) -> None:
        path = self._model_dir / name
        if not path.exists():
            wanted_by = f"which {INDEX} names" if name != SINGLE else f"and neither does {INDEX}"
            raise InvalidModel(
                f"{path} does not exist, {wanted_by}; download the model again, "
                "or use --load-format dummy for random weights"
            )
        self._files[name] = open_safetensors(path, framework="pt")

    def _unexpected(self, name: str, part: Tensor, shape: tuple[int, ...]) -> InvalidModel:
        return InvalidModel(
            f"the tensor {name!r} in {self._model_dir} has the shape {tuple(part.shape)}, "
            f"which does not fit the {shape} that config.json implies"
        )


def _is_finite(tensor: Tensor) -> bool:
    # NaN wins both. 30 times as fast on a processor as isfinite of every element.
    return bool(torch.stack(tensor.aminmax()).isfinite().all())


class RandomWeights:
    """Small random weights for performance work; those of one name are the same in every run."""

    def __init__(self, empty: Empty) -> None:
        self._empty = empty

    def read(self, shape: tuple[int, ...], *names: str) -> Tensor:
        if len(shape) == 1:  # norms and biases: ones keep the activations' scale
            return self._empty(shape).fill_(1.0)
        weight = self._empty(shape)
        generator = torch.Generator(weight.device).manual_seed(zlib.crc32(names[0].encode()))
        return weight.normal_(std=0.02, generator=generator)

    def quantized(self, shape: tuple[int, int], bias: Tensor | None, *names: str) -> None:
        return None
