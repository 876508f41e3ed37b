"""`GgufWeights`: the tensors of a GGUF file under the names and in the order of Hugging Face's.

llama.cpp rotates pairs of neighbours in the heads of some architectures, so its conversion permutes
the rows of q and k; here they are put back. Rows are whole blocks, so that needs no other
arithmetic.
"""

import logging
import mmap
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from penstock.engine.files.gguf.file import GgufFile, open_gguf
from penstock.engine.files.gguf.header import TensorInfo
from penstock.engine.models.config import ModelConfig
from penstock.engine.models.division.shard import Shard
from penstock.engine.models.division.stage import Stage
from penstock.engine.models.errors import InvalidModel
from penstock.engine.models.formats.cut import Cut
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
from penstock.engine.models.layers.weight_formats import Spans
from penstock.engine.models.parts.reader import Empty, TableRows, WeightSource, rows_of

logger = logging.getLogger(__name__)

# Numbers that are widened at a time: what they take in float32 stays in a core's cache.
_NUMBERS_AT_ONCE = 2**18


class GgufWeights(WeightSource):
    """See `WeightSource`."""

    def __init__(
        self, path: Path, empty: Empty, kept: KeptBytes, shard: Shard | None = None
    ) -> None:
        """kept: of which types linear layers may have codes; others are plain. shard: the part that
        is read, where that is not all."""
        self._gguf = open_gguf(path)
        config = ModelConfig.from_dir(path)
        self._names, self._shard = GgufNames(config, self._gguf), shard or Shard(config)
        self._empty = empty
        self._kept = kept
        self._bytes = {part: _mapped(part) for part in self._gguf.parts}
        shares = _shares(self._gguf, self._names, self._shard)
        for line in grown(shares, self._names, empty((0,)).dtype, kept):
            logger.info("%s", line)

    def read(self, shape: tuple[int, ...], *names: str, dtype: torch.dtype | None = None) -> Tensor:
        tensors = [self._stored(name) for name in names]  # before memory is allocated
        fused = self._empty(shape)
        fused = fused if dtype is None else fused.to(dtype)
        rows = torch.split(fused, [tensor.num_rows for tensor in tensors])
        for name, tensor, into in zip(names, tensors, rows, strict=True):
            if self._shard.adds(name):
                self._widen(name, tensor, into)
            else:
                into.zero_()
        return fused

    def table(self, shape: tuple[int, int], name: str) -> TableRows:
        """See `WeightSource`. Rows of codes are widened when they are used."""
        stored = self._stored(name)
        raw, kind = self._rows(stored), stored.info.type
        if kind.block_size == 1:
            return rows_of(blocks.numbers(raw, kind))
        return lambda ids: blocks.numbers(raw[ids.cpu().long()], kind)

    def quantized(
        self, shape: tuple[int, int], bias: Tensor | None, *names: str
    ) -> StoredLinear | None:
        tensors = [self._stored(f"{name}.weight") for name in names]
        if any(_kept_bytes(tensor.share, self._kept) is None for tensor in tensors):
            return None
        if sum(tensor.num_rows for tensor in tensors) != shape[0]:
            return None  # a stage's part of a layer's rows is read as numbers
        return stacked(
            [part for each in zip(names, tensors, strict=True) for part in self._coded(*each)], bias
        )

    def _coded(self, name: str, tensor: "_Stored") -> Iterator[GroupedLinear]:
        """Yields the layers of some rows at a time."""
        step = max(1, _NUMBERS_AT_ONCE // tensor.info.shape[-1])
        for raw in torch.split(self._rows(tensor), step):
            part = blocks.coded(raw, tensor.info.type)
            for scales in (part.scales, part.minima, part.factors, part.minimum_factors):
                if scales is not None and scales.is_floating_point():
                    self._check_finite(f"{name}.weight", scales)
            part = part if tensor.columns is None else part.columns(tensor.columns)
            scale = self._scale(tensor)
            yield part if scale is None else replace(part, scales=part.scales.float() * scale)

    def _widen(self, name: str, tensor: "_Stored", into: Tensor) -> None:
        """Some rows at a time."""
        start, is_narrow = 0, into.dtype is torch.float16
        for numbers in self._numbers(tensor):
            part = into.view(len(into), -1)[start : start + len(numbers)].copy_(numbers)
            # All of a vector, and the first rows of a matrix, but in float16, which overflows.
            if (start == 0 or is_narrow) and not bool(part.isfinite().all()):
                self._check_finite(name, numbers)
                raise InvalidModel(
                    f"the tensor {name!r} in {self._gguf.path} has the value "
                    f"{float(numbers.abs().max()):g}, and float16 holds none above 65504; use "
                    "--dtype bfloat16 or --dtype float32"
                )
            start += len(numbers)

    def _numbers(self, tensor: "_Stored") -> Iterator[Tensor]:
        """Yields those of some rows at a time."""
        info, place = tensor.info, tensor.place
        if place.values is not None:
            yield tensor.cut.rows_of(self._joined(place.tensor, place.values))
            return
        raw = self._rows(tensor)
        is_plain = info.type.block_size == 1
        step = len(raw) if is_plain else max(1, _NUMBERS_AT_ONCE // info.shape[-1])
        for start in range(0, len(raw), step):
            numbers = blocks.numbers(raw[start : start + step], info.type)
            if place.offset:
                numbers = numbers.float() - place.offset
            if place.is_decay:
                numbers = (-numbers.float()).log()
            if (scale := self._scale(tensor)) is not None:
                numbers = numbers.float() * scale
            if tensor.columns is not None:
                numbers = torch.cat([numbers[:, slice(*span)] for span in tensor.columns], dim=1)
            yield numbers

    def _joined(self, *names: str) -> Tensor:
        """Returns tensors of (heads, latent_dim, nope_dim) and (heads, value_dim, latent_dim), as
        `Place.values` says, in one matrix of (rows, latent_dim)."""
        kinds = (self._gguf.tensors[name].type for name in names)
        raw = (self._raw(name).view(self._names.shapes[name][0], -1) for name in names)
        keys, values = (blocks.numbers(*each).float() for each in zip(raw, kinds, strict=True))
        latent_dim = values.shape[1]
        keys = keys.view(-1, latent_dim, keys.shape[1]).transpose(1, 2)
        return torch.cat((keys, values.view(len(keys), -1, latent_dim)), dim=1).flatten(0, 1)

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
        return _Stored(place, info, self._shard.cut(name))

    def _scale(self, tensor: "_Stored") -> Tensor | None:
        """What multiplies all numbers of a tensor, if anything does."""
        if tensor.place.scale is None:
            return None
        name, index = tensor.place.scale
        kind = self._gguf.tensors[name].type
        return blocks.numbers(self._raw(name).view(1, -1), kind)[0, index].float()

    def _raw(self, name: str) -> Tensor:
        """The bytes of a tensor of the file."""
        info = self._gguf.tensors[name]
        return self._bytes[self._gguf.part_of[name]][info.offset : info.offset + info.num_bytes]

    def _rows(self, tensor: "_Stored") -> Tensor:
        """(rows, bytes of a row) uint8, in the order of the checkpoint; of a vector a row each
        number. What a rank has beyond the tensor is zeros."""
        place, info = tensor.place, tensor.info
        num_all = info.num_elements // (info.shape[-1] if place.shape[1:] else 1)
        raw = self._raw(place.tensor).view(num_all, -1)[place.first : place.first + place.shape[0]]
        if (head_dim := place.head_dim) is not None:
            pairs = raw.view(-1, head_dim // 2, 2, raw.shape[1])
            raw = pairs.transpose(1, 2).reshape(raw.shape)
        if place.rows is not None:
            raw = torch.cat([raw[slice(*span)] for span in place.rows])
        return tensor.cut.rows_of(raw)


class _Share(NamedTuple):
    """What a rank has of a tensor. scheme: of codes of it; None where it is plain."""

    info: TensorInfo
    rows: int
    columns: int
    scheme: blocks.Blocks | None


@dataclass(frozen=True, slots=True)
class _Stored:
    """One tensor of the checkpoint. cut: the part that is read."""

    place: Place
    info: TensorInfo
    cut: Cut

    @property
    def num_rows(self) -> int:
        return self.cut.num_rows(self.place.shape[0])

    @property
    def columns(self) -> Spans | None:
        """Those that are read, in the file's order of columns; None for all in that order."""
        spans, own = self.place.columns, self.cut.columns
        if own is None:
            return spans
        found, begin = [], 0
        for first, end in spans or ((0, own.whole),):
            low, high = max(own.begin - begin, 0), min(own.end - begin, end - first)
            if low < high:
                found.append((first + low, first + high))
            begin += end - first
        return tuple(found)

    @property
    def share(self) -> _Share:
        scheme, columns = blocks.scheme(self.info.type), self.columns
        if self.place.values is not None:
            scheme = None
        if scheme is not None and columns is not None:
            scheme = scheme.of_columns(columns)
        if scheme is not None and self.place.scale is not None:
            scheme = scheme.scaled()
        own = self.cut.columns
        num_columns = prod(self.place.shape[1:]) if own is None else own.size
        return _Share(self.info, self.num_rows, num_columns, scheme)


def loaded_bytes(
    path: Path, dtype: torch.dtype, kept: KeptBytes, stage: Stage, shard: Shard | None = None
) -> int:
    """Returns the bytes of a stage's weights when they are read. shard: of which it is a stage."""
    gguf, config = open_gguf(path), ModelConfig.from_dir(path)
    names = GgufNames(config, gguf)
    shares = _shares(gguf, names, shard or Shard(config))
    sizes = _loaded_bytes(shares, names, dtype, kept)
    if stage.num_stages == 1:
        return sum(sizes.values())
    embedding = 0
    if stage.is_last and OUTPUT not in gguf.tensors:
        embedding = sizes[EMBEDDING]
    elif stage.is_first:
        embedding = _plain_bytes(shares[EMBEDDING], dtype)
    own = (size for name, size in sizes.items() if name != EMBEDDING and _is_in(stage, name))
    return embedding + sum(own)


def _is_in(stage: Stage, name: str) -> bool:
    """Returns whether a stage has this tensor, which is not the embedding."""
    if not name.startswith("blk."):
        # Of the projection to per-layer inputs a stage has the rows of its own layers alone.
        return stage.is_last or name.startswith("per_layer_")
    return int(name.split(".")[1]) in stage.layers


def _shares(gguf: GgufFile, names: GgufNames, shard: Shard) -> dict[str, _Share]:
    """Returns those of each tensor of the file, but of a table that stays in it."""
    found: dict[str, _Share] = {}
    for name, place in names.places():
        if place.tensor == PER_LAYER_TABLE:
            continue
        share = _Stored(place, gguf.tensors[place.tensor], shard.cut(name)).share
        before = found.get(place.tensor)
        found[place.tensor] = share._replace(rows=share.rows + (before.rows if before else 0))
    return found


def _loaded_bytes(
    shares: Mapping[str, _Share], names: GgufNames, dtype: torch.dtype, kept: KeptBytes
) -> dict[str, int]:
    """Returns the bytes of each tensor."""
    sizes = {name: _plain_bytes(share, dtype) for name, share in shares.items()}
    for stack in _coded_stacks(shares, names, kept):
        for name, num_bytes in stack.items():
            # Of a tied embedding, rows are taken from a plain matrix.
            sizes[name] = num_bytes + (sizes[name] if name == EMBEDDING else 0)
    return sizes


def _plain_bytes(share: _Share, dtype: torch.dtype) -> int:
    return share.rows * share.columns * dtype.itemsize


def _coded_stacks(
    shares: Mapping[str, _Share], names: GgufNames, kept: KeptBytes
) -> Iterator[dict[str, int]]:
    """Yields the bytes of each tensor of the linear layers that have codes."""
    for stack in names.stacks:
        coded = {name: _kept_bytes(shares[name], kept) for name in stack}
        if None not in coded.values():
            yield {name: num_bytes or 0 for name, num_bytes in coded.items()}


def _kept_bytes(share: _Share, kept: KeptBytes) -> int | None:
    return None if share.scheme is None else kept(share.scheme, share.rows, share.columns)


def weight_formats(path: Path) -> frozenset[str]:
    """Returns those of the linear layers that are read with their codes."""
    gguf = open_gguf(path)
    names = GgufNames(ModelConfig.from_dir(path), gguf)
    linears = (gguf.tensors[name] for stack in names.stacks for name in stack)
    schemes = (blocks.scheme(info.type) for info in linears)
    return frozenset(scheme.weight_format for scheme in schemes if scheme is not None)


def grown(
    shares: Mapping[str, _Share], names: GgufNames, dtype: torch.dtype, kept: KeptBytes
) -> Iterator[str]:
    """Yields a line about the quantized matrices that are dequantized, and one about those with
    more bits in memory than in the file, where there are such."""
    sizes = _loaded_bytes(shares, names, dtype, kept)
    coded = {name for stack in _coded_stacks(shares, names, kept) for name in stack} - {EMBEDDING}
    what = f"dequantized to {str(dtype).removeprefix('torch.')}"
    for are_coded, becomes in ((False, what), (True, "kept in codes of 4 bits")):
        kinds: Counter[str] = Counter()
        stored = loaded = 0
        for name, (info, rows, columns, _) in shares.items():
            own = rows * columns // info.type.block_size * info.type.block_bytes
            # A tenth more is what scales take that are codes of 6 bits in the file, and more.
            if (
                info.type.block_size > 1
                and sizes[name] > 1.1 * own
                and (name in coded) is are_coded
            ):
                kinds[info.type.name] += 1
                stored, loaded = stored + own, loaded + sizes[name]
        if not kinds:
            continue
        one = kinds.total() == 1
        yield (
            f"{kinds.total()} {'matrix' if one else 'matrices'} "
            f"({', '.join(f'{n} of {kind}' for kind, n in kinds.items())}) "
            f"{'is' if one else 'are'} {becomes}: {'it takes' if one else 'they take'} "
            f"{loaded / 2**30:.3f} GiB of memory, and {stored / 2**30:.3f} GiB in the file"
        )


def _mapped(path: Path) -> Tensor:
    """A file's bytes, which are read when they are used."""
    with path.open("rb") as file:
        # Copied on write, because torch warns of memory that may not be written; nothing is.
        content = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
    return torch.frombuffer(content, dtype=torch.uint8)
