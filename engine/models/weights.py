"""Where weights come from: a checkpoint's safetensors, or random numbers of the same shape.

A source returns one tensor of the model at a time, stacked from the tensors of the checkpoint that
the caller names. So q, k and v are read straight into one matrix, and nothing is in memory twice.
Several threads may read from a source at the same time.
"""

import json
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from penstock.engine.models.errors import InvalidModel

_INDEX = "model.safetensors.index.json"
_SINGLE = "model.safetensors"
# Not float8, which needs scales that are stored beside it.
_DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.float64)


# Allocates the memory that a weight is read into, on the device and in the type of its choice.
Empty = Callable[[tuple[int, ...]], Tensor]


class WeightSource(Protocol):
    def read(self, shape: tuple[int, ...], *names: str) -> Tensor:
        """The tensors `names` of the checkpoint, stacked along their first dimension to `shape`."""
        ...


class Checkpoint:
    """The safetensors beside config.json, one file or several, of a type in `_DTYPES`."""

    def __init__(self, model_dir: Path, empty: Empty) -> None:
        self._empty = empty
        self._model_dir = model_dir
        self._files: dict[str, Any] = {}
        self._file_of: dict[str, str] = {}
        index = model_dir / _INDEX
        if index.exists():
            self._file_of = _weight_map(index)
            for name in sorted(set(self._file_of.values())):
                self._open(name)
        else:
            self._open(_SINGLE)
            self._file_of = dict.fromkeys(self._files[_SINGLE].keys(), _SINGLE)

    def read(self, shape: tuple[int, ...], *names: str) -> Tensor:
        fused = self._empty(shape)
        start = 0
        for name in names:
            part = self._tensor(name)
            rows = part.shape[0] if part.dim() else 0
            if part.shape[1:] != fused.shape[1:] or start + rows > shape[0]:
                raise self._unexpected(name, part, shape)
            stored = fused[start : start + rows].copy_(part)
            if stored.dtype is torch.float16 and part.dtype is not torch.float16:
                self._check_overflow(name, part, stored)
            start += rows
        if start != shape[0]:
            raise self._unexpected(names[-1], part, shape)
        return fused

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
        try:
            self._files[name] = safe_open(path, framework="pt")
        except FileNotFoundError:
            wanted_by = f"which {_INDEX} names" if name != _SINGLE else f"and neither does {_INDEX}"
            raise InvalidModel(
                f"{path} does not exist, {wanted_by}; download the model again, "
                "or use --load-format dummy for random weights"
            ) from None
        except (SafetensorError, OSError) as error:
            raise InvalidModel(f"{path} is not a readable safetensors file: {error}") from None

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


def _weight_map(index: Path) -> dict[str, str]:
    try:
        weight_map = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
    except (json.JSONDecodeError, UnicodeDecodeError, KeyError, TypeError) as error:
        raise InvalidModel(f"{index} is not a valid index of shards: {error!r}") from None
    return dict(weight_map)
