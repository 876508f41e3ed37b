"""`GgufWeights`: the tensors of a GGUF file under the names and in the order of Hugging Face's.

llama.cpp rotates pairs of neighbours in the heads of some architectures, so its conversion permutes
the rows of q and k; here they are put back. Rows are whole blocks, so that needs no other
arithmetic.
"""

import logging
import mmap
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from penstock.engine.files.gguf.file import GgufFile, open_gguf
from penstock.engine.files.gguf.header import TensorInfo
from penstock.engine.models.config import ModelConfig
from penstock.engine.models.division.stage import Stage
from penstock.engine.models.errors import InvalidModel
from penstock.engine.models.formats.gguf import blocks
from penstock.engine.models.formats.scheme import KeptBytes
from penstock.engine.models.gguf.names import (
    EMBEDDING,
    OUTPUT,
    PER_LAYER_TABLE,
    GgufNames,
    Place,
)
from penstock.engine.models.layers.grouped import GroupedLinear
from penstock.engine.models.layers.linear import StoredLinear, stacked
from penstock.engine.models.parts.reader import Empty, TableRows, WeightSource, rows_of

logger = logging.getLogger(__name__)

# Numbers that are widened at a time: what they take in float32 stays in a core's cache.
_NUMBERS_AT_ONCE = 2**18


class GgufWeights(WeightSource):
    """See `WeightSource`."""

    def __init__(self, path: Path, empty: Empty, kept: KeptBytes) -> None:
        """kept: of which types linear layers may have codes; others are plain."""
        self._gguf = open_gguf(path)
        self._names = GgufNames(ModelConfig.from_dir(path), self._gguf)
        self._empty = empty
        self._kept = kept
        self._bytes = {part: _mapped(part) for part in self._gguf.parts}
        if line := widened(self._gguf, self._names, empty((0,)).dtype, kept):
            logger.info("%s", line)

    def read(self, shape: tuple[int, ...], *names: str, dtype: torch.dtype | None = None) -> Tensor:
        tensors = [self._stored(name) for name in names]  # before memory is allocated
        fused = self._empty(shape)
        fused = fused if dtype is None else fused.to(dtype)
        rows = torch.split(fused, [tensor.place.shape[0] for tensor in tensors])
        for name, tensor, into in zip(names, tensors, rows, strict=True):
            self._widen(name, tensor, into)
        return fused

    def table(self, shape: tuple[int, int], name: str) -> TableRows:
        """See `WeightSource`. Rows of codes are widened when they are used."""
        stored = self._stored(name)
        raw, kind = stored.rows(), stored.info.type
        if kind.block_size == 1:
            return rows_of(blocks.numbers(raw, kind))
        return lambda ids: blocks.numbers(raw[ids.cpu().long()], kind)

    def quantized(
        self, shape: tuple[int, int], bias: Tensor | None, *names: str
    ) -> StoredLinear | None:
        tensors = [self._stored(f"{name}.weight") for name in names]
        if any(_kept_bytes(tensor.info, self._kept) is None for tensor in tensors):
            return None
        if sum(tensor.place.shape[0] for tensor in tensors) != shape[0]:
            return None  # a stage's part of a layer's rows is read as numbers
        return stacked(
            [part for each in zip(names, tensors, strict=True) for part in self._coded(*each)], bias
        )

    def _coded(self, name: str, tensor: "_Stored") -> Iterator[GroupedLinear]:
        """Yields the layers of some rows at a time."""
        step = max(1, _NUMBERS_AT_ONCE // tensor.info.shape[-1])
        for raw in torch.split(tensor.rows(), step):
            part = blocks.coded(raw, tensor.info.type)
            for scales in (part.scales, part.minima, part.factors, part.minimum_factors):
                if scales is not None and scales.is_floating_point():
                    self._check_finite(f"{name}.weight", scales)
            yield part

    def _widen(self, name: str, tensor: "_Stored", into: Tensor) -> None:
        """Some rows at a time."""
        info = tensor.info
        raw = tensor.rows()
        is_narrow = into.dtype is torch.float16
        is_plain = info.type.block_size == 1
        step = len(raw) if is_plain else max(1, _NUMBERS_AT_ONCE // info.shape[-1])
        for start in range(0, len(raw), step):
            numbers = blocks.numbers(raw[start : start + step], info.type)
            if tensor.place.offset:
                numbers = numbers.float() - tensor.place.offset
            part = into.view(len(raw), -1)[start : start + step].copy_(numbers)
            # All of a vector, and the first rows of a matrix, but in float16, which overflows.
            if (start == 0 or is_narrow) and not bool(part.isfinite().all()):
                self._check_finite(name, numbers)
                raise InvalidModel(
                    f"the tensor {name!r} in {self._gguf.path} has the value "
                    f"{float(numbers.abs().max()):g}, and float16 holds none above 65504; use "
                    "--dtype bfloat16 or --dtype float32"
                )

    def _check_finite(self, name: str, numbers: Tensor) -> None:
        if not bool(numbers.isfinite().all()):
            raise InvalidModel(
                f"the tensor {name!r} in {self._gguf.path} has numbers that are not finite (NaN or "
                "infinity), so no answer could be right; download or convert the model again"
            )

    def _stored(self, name: str) -> "_Stored":
        place = self._names.place_of(name)
        info = self._gguf.tensors.get(place.tensor)
        if info is None:
            raise InvalidModel(
                f"{self._gguf.path} lacks the tensor {place.tensor!r}, which its metadata implies; "
                "download or convert the model again"
            )
        if len(place.shape) == 1 and info.type.block_size > 1:
            raise InvalidModel(
                f"the tensor {place.tensor!r} in {self._gguf.path} is a vector in the type "
                f"{info.type.name}, which llama.cpp does not write; convert the model again"
            )
        if not self._names.fits(place.tensor, info.shape):
            raise InvalidModel(
                f"the tensor {place.tensor!r} in {self._gguf.path} has the shape {info.shape}, "
                f"which does not fit the {self._names.shapes[place.tensor]} that the metadata "
                "implies"
            )
        return _Stored(place, info, self._bytes[self._gguf.part_of[place.tensor]])


@dataclass(frozen=True, slots=True)
class _Stored:
    """content: of the file."""

    place: Place
    info: TensorInfo
    content: Tensor

    def rows(self) -> Tensor:
        """(rows, bytes of a row) uint8; a vector is one row, but one whose numbers are permuted."""
        info, (num_rows, *others) = self.info, self.place.shape
        raw = self.content[info.offset : info.offset + info.num_bytes]
        num_all = info.num_elements // (info.shape[-1] if others else 1)
        raw = raw.view(num_all, -1)[self.place.first : self.place.first + num_rows]
        if (head_dim := self.place.head_dim) is not None:
            pairs = raw.view(-1, head_dim // 2, 2, raw.shape[1])
            return pairs.transpose(1, 2).reshape(raw.shape)
        return raw if others else raw.reshape(1, -1)


def loaded_bytes(path: Path, dtype: torch.dtype, kept: KeptBytes, stage: Stage) -> int:
    """Returns the bytes that a stage's weights take when they are read."""
    gguf = open_gguf(path)
    sizes = _loaded_bytes(gguf, GgufNames(ModelConfig.from_dir(path), gguf), dtype, kept)
    if stage.num_stages == 1:
        return sum(sizes.values())
    embedding = 0
    if stage.is_last and OUTPUT not in gguf.tensors:
        embedding = sizes[EMBEDDING]
    elif stage.is_first:
        embedding = gguf.tensors[EMBEDDING].num_elements * dtype.itemsize
    own = (size for name, size in sizes.items() if name != EMBEDDING and _is_in(stage, name))
    return embedding + sum(own)


def _is_in(stage: Stage, name: str) -> bool:
    """Returns whether a stage has this tensor, which is not the embedding."""
    if not name.startswith("blk."):
        # Of the projection to per-layer inputs a stage has the rows of its own layers alone.
        return stage.is_last or name.startswith("per_layer_")
    return int(name.split(".")[1]) in stage.layers


def _loaded_bytes(
    gguf: GgufFile, names: GgufNames, dtype: torch.dtype, kept: KeptBytes
) -> dict[str, int]:
    """Returns the bytes of each tensor, but of a table that stays in its file."""
    sizes = {
        name: gguf.tensors[name].num_elements * dtype.itemsize
        for name in names.shapes
        if name != PER_LAYER_TABLE
    }
    for stack in names.stacks:
        coded = {name: _kept_bytes(gguf.tensors[name], kept) for name in stack}
        for name, num_bytes in coded.items():
            if num_bytes is None or None in coded.values():
                continue
            # Of a tied embedding, rows are taken from a plain matrix.
            sizes[name] = num_bytes + (sizes[name] if name == EMBEDDING else 0)
    return sizes


def _kept_bytes(info: TensorInfo, kept: KeptBytes) -> int | None:
    scheme = blocks.scheme(info.type)
    if scheme is None:
        return None
    return kept(scheme, info.num_elements // info.shape[-1], info.shape[-1])


def weight_formats(path: Path) -> frozenset[str]:
    """Returns those of the linear layers that are read with their codes."""
    gguf = open_gguf(path)
    names = GgufNames(ModelConfig.from_dir(path), gguf)
    linears = (gguf.tensors[name] for stack in names.stacks for name in stack)
    schemes = (blocks.scheme(info.type) for info in linears)
    return frozenset(scheme.weight_format for scheme in schemes if scheme is not None)


def widened(gguf: GgufFile, names: GgufNames, dtype: torch.dtype, kept: KeptBytes) -> str | None:
    """A line about the quantized matrices that take more memory than in the file, if any do."""
    sizes = _loaded_bytes(gguf, names, dtype, kept)
    grown = {
        name: info
        for name, info in gguf.tensors.items()
        # A tenth more is what scales take that are codes of 6 bits in the file, and more.
        if info.type.block_size > 1 and sizes.get(name, 0) > 1.1 * info.num_bytes
    }
    if not grown:
        return None
    kinds = Counter(info.type.name for info in grown.values())
    stored = sum(info.num_bytes for info in grown.values())
    loaded = sum(sizes[name] for name in grown)
    one = len(grown) == 1
    return (
        f"{len(grown)} {'matrix' if one else 'matrices'} "
        f"({', '.join(f'{n} of {kind}' for kind, n in kinds.items())}) {'is' if one else 'are'} "
        f"dequantized to {str(dtype).removeprefix('torch.')}: {'it takes' if one else 'they take'} "
        f"{loaded / 2**30:.3f} GiB of memory, and {stored / 2**30:.3f} GiB in the file"
    )


def _mapped(path: Path) -> Tensor:
    """A file's bytes, which are read when they are used."""
    with path.open("rb") as file:
        # Copied on write, because torch warns of memory that may not be written; nothing is.
        content = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
    return torch.frombuffer(content, dtype=torch.uint8)
