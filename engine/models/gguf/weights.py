"""`GgufWeights`: the tensors of a GGUF file under the names and in the order of Hugging Face's.

llama.cpp rotates pairs of neighbours in Llama's heads, so its conversion permutes the rows of q and
k; here they are put back. Rows are whole blocks, so that needs no other arithmetic.
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
from penstock.engine.models.formats import gguf as blocks
from penstock.engine.models.formats.scheme import KeptBytes
from penstock.engine.models.gguf.names import EMBEDDING, OUTPUT, STACKED, GgufNames
from penstock.engine.models.layers.grouped import GroupedLinear
from penstock.engine.models.layers.linear import StoredLinear, stacked
from penstock.engine.models.parts.reader import Empty, WeightSource

logger = logging.getLogger(__name__)

# Numbers that are widened at a time: what they take in float32 stays in a core's cache.
_NUMBERS_AT_ONCE = 2**18
_PERMUTED = ("attn_q", "attn_k")


class GgufWeights(WeightSource):
    """See `WeightSource`."""

    def __init__(self, path: Path, empty: Empty, kept: KeptBytes) -> None:
        """kept: of which types linear layers may have codes; others are plain."""
        self._gguf = open_gguf(path)
        config = ModelConfig.from_dir(path)
        self._names, self._head_dim = GgufNames(config), config.head_dim
        self._empty = empty
        self._kept = kept
        self._is_permuted = self._gguf.metadata.get("general.architecture") == "llama"
        self._bytes = {part: _mapped(part) for part in self._gguf.parts}
        if line := widened(self._gguf, empty((0,)).dtype, kept):
            logger.info("%s", line)

    def read(self, shape: tuple[int, ...], *names: str) -> Tensor:
        tensors = [self._stored(name) for name in names]
        num_rows = 0
        for name, tensor in zip(names, tensors, strict=True):
            found = tensor.info.shape
            num_rows += found[0]
            # Before memory is allocated.
            if found[1:] != shape[1:] or num_rows > shape[0]:
                raise self._unexpected(name, tensor, shape)
        if num_rows != shape[0]:
            raise self._unexpected(names[-1], tensors[-1], shape)
        fused = self._empty(shape)
        start = 0
        for name, tensor in zip(names, tensors, strict=True):
            end = start + tensor.info.shape[0]
            self._widen(name, tensor, fused[start:end])
            start = end
        return fused

    def quantized(
        self, shape: tuple[int, int], bias: Tensor | None, *names: str
    ) -> StoredLinear | None:
        tensors = [self._stored(f"{name}.weight") for name in names]
        if any(_kept_bytes(tensor.info, self._kept) is None for tensor in tensors):
            return None
        rows = [tensor.info.shape[0] for tensor in tensors]
        for name, tensor in zip(names, tensors, strict=True):
            if tensor.info.shape[1:] != shape[1:] or sum(rows) != shape[0]:
                raise self._unexpected(name, tensor, shape)
        return stacked(
            [part for each in zip(names, tensors, strict=True) for part in self._coded(*each)], bias
        )

    def _coded(self, name: str, tensor: "_Stored") -> Iterator[GroupedLinear]:
        """Yields the layers of some rows at a time."""
        step = max(1, _NUMBERS_AT_ONCE // tensor.info.shape[1])
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
        stored = self._names.of(name)
        if stored == OUTPUT and OUTPUT not in self._gguf.tensors:
            stored = EMBEDDING  # tied
        info = self._gguf.tensors.get(stored)
        if info is None:
            raise InvalidModel(
                f"{self._gguf.path} lacks the tensor {stored!r}, which its metadata implies; "
                "download or convert the model again"
            )
        part = self._bytes[self._gguf.part_of[stored]]
        is_permuted = self._is_permuted and stored.split(".")[-2] in _PERMUTED
        return _Stored(stored, info, part, self._head_dim if is_permuted else None)

    def _unexpected(self, name: str, tensor: "_Stored", shape: tuple[int, ...]) -> InvalidModel:
        return InvalidModel(
            f"the tensor {tensor.name!r} in {self._gguf.path} has the shape {tensor.info.shape}, "
            f"which does not fit the {shape} that the metadata implies for {name!r}"
        )


@dataclass(frozen=True, slots=True)
class _Stored:
    """content: of the file. head_dim: where the rows of each head are permuted."""

    name: str
    info: TensorInfo
    content: Tensor
    head_dim: int | None

    def rows(self) -> Tensor:
        """(rows, bytes of a row) uint8; a vector is one row, but one whose numbers are permuted."""
        info = self.info
        raw = self.content[info.offset : info.offset + info.num_bytes]
        if len(info.shape) == 1 and self.head_dim is None:
            return raw.view(1, -1)
        raw = raw.view(info.shape[0], -1)
        if self.head_dim is None or len(raw) % self.head_dim:
            return raw
        pairs = raw.view(-1, self.head_dim // 2, 2, raw.shape[1])
        return pairs.transpose(1, 2).reshape(raw.shape)


def loaded_bytes(path: Path, dtype: torch.dtype, kept: KeptBytes, stage: Stage) -> int:
    """Returns the bytes that a stage's weights take when they are read."""
    gguf = open_gguf(path)
    sizes = _loaded_bytes(gguf, dtype, kept)
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
        return stage.is_last
    return int(name.split(".")[1]) in stage.layers


def _loaded_bytes(gguf: GgufFile, dtype: torch.dtype, kept: KeptBytes) -> dict[str, int]:
    """Returns the bytes of each tensor."""
    sizes = {}
    for name, info in gguf.tensors.items():
        sizes[name] = info.num_elements * dtype.itemsize
        coded = _coded_bytes(gguf, name, kept)
        if coded is not None:
            if name != EMBEDDING:
                sizes[name] = coded
            elif OUTPUT not in gguf.tensors:  # tied: rows are taken from a plain matrix
                sizes[name] += coded
    return sizes


def _kept_bytes(info: TensorInfo, kept: KeptBytes) -> int | None:
    scheme = blocks.scheme(info.type)
    if scheme is None or len(info.shape) != 2:
        return None
    return kept(scheme, info.shape[0], info.shape[1])


def _coded_bytes(gguf: GgufFile, name: str, kept: KeptBytes) -> int | None:
    """Returns the bytes of this matrix, where it and those stacked with it have codes."""
    prefix, _, kind = name.removesuffix(".weight").rpartition(".")
    stack = next((stack for stack in STACKED if kind in stack), ())
    others = [gguf.tensors[f"{prefix}.{each}.weight"] for each in stack]
    if any(_kept_bytes(info, kept) is None for info in others):
        return None
    return _kept_bytes(gguf.tensors[name], kept)


def weight_formats(path: Path) -> frozenset[str]:
    """Returns those of the linear layers that are read with their codes."""
    gguf = open_gguf(path)
    linears = {
        name: info
        for name, info in gguf.tensors.items()
        if len(info.shape) == 2 and (name != EMBEDDING or OUTPUT not in gguf.tensors)
    }
    schemes = (blocks.scheme(info.type) for info in linears.values())
    return frozenset(scheme.weight_format for scheme in schemes if scheme is not None)


def widened(gguf: GgufFile, dtype: torch.dtype, kept: KeptBytes) -> str | None:
    """A line about the quantized matrices that take more memory than in the file, if any do."""
    sizes = _loaded_bytes(gguf, dtype, kept)
    grown = {
        name: info
        for name, info in gguf.tensors.items()
        # A tenth more is what scales take that are codes of 6 bits in the file, and more.
        if info.type.block_size > 1 and sizes[name] > 1.1 * info.num_bytes
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
