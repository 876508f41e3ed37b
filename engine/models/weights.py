"""Where weights come from: a checkpoint's safetensors, or random numbers of the same shape.

A source returns one tensor of the model at a time, stacked from the tensors of the checkpoint that
the caller names. So q, k and v are read straight into one matrix, and nothing is in memory twice.
Several threads may read from a source at the same time.
"""

import logging
import zlib
from pathlib import Path

import torch
from torch import Tensor

from penstock.engine.files.tensor_files import PLAIN_DTYPES, TensorFiles, is_finite
from penstock.engine.models.division.shard import Shard
from penstock.engine.models.errors import InvalidModel
from penstock.engine.models.formats.config import QuantizationConfig
from penstock.engine.models.formats.cut import Cut
from penstock.engine.models.formats.tensors import LayerTensors
from penstock.engine.models.layers.linear import (
    JoinableLinear,
    PlainLinear,
    StoredLinear,
    stacked,
)
from penstock.engine.models.parts.reader import Empty, TableRows, WeightSource, rows_of

logger = logging.getLogger(__name__)

# The standard deviation of random weights.
_STD = 0.02
# The tensors of which any shows that a layer is in the checkpoint.
_WEIGHTS = ("weight", "weight_packed", "qweight", "blocks")
# In a message: a layer has as many as its experts, and more.
_SHOWN_NAMES = 4
# Ends of the names of what scales a quantized KV cache.
_KV_SCALES = (".k_scale", ".v_scale", ".kv_scale", "k_proj.output_scale", "v_proj.output_scale")


class Checkpoint:
    """The safetensors beside config.json: weights of a type in `PLAIN_DTYPES`, or quantized."""

    def __init__(
        self,
        model_dir: Path,
        empty: Empty,
        quantization: QuantizationConfig | None = None,
        shard: Shard | None = None,
    ) -> None:
        """shard: the part that is read, where that is not all."""
        self._empty = empty
        self._files = TensorFiles(model_dir)
        self._quantization = quantization
        self._shard = shard
        has_kv_scales = quantization is not None and quantization.has_kv_scales
        if has_kv_scales or any(name.endswith(_KV_SCALES) for name in self._files.names):
            logger.info(
                "the checkpoint has settings or scales for a quantized KV cache, which have no "
                "effect: keys and values are stored in --dtype"
            )

    def read(self, shape: tuple[int, ...], *names: str, dtype: torch.dtype | None = None) -> Tensor:
        parts = [self._tensor(name) for name in names]  # mapped; `copy_` is what reads them
        are_bounds = not any(part.dim() for part in parts)  # scalars, which may be infinite
        parts = [part.view(1) for part in parts] if are_bounds else parts
        num_rows = sum(part.shape[0] if part.dim() else 0 for part in parts)
        # Before memory is allocated: config.json may imply any amount of it.
        if num_rows != shape[0] or any(part.shape[1:] != shape[1:] for part in parts):
            raise self._unexpected(names, parts, shape)
        fused = self._empty(shape)
        fused = fused if dtype is None else fused.to(dtype)
        start = 0
        for name, part in zip(names, parts, strict=True):
            if not are_bounds:
                self._check_finite(name, part)
            stored = fused[start : start + len(part)].copy_(part)
            if stored.dtype is torch.float16 and part.dtype is not torch.float16:
                self._check_overflow(name, part, stored)
            start += len(part)
        return fused

    def _unexpected(
        self, names: tuple[str, ...], parts: list[Tensor], shape: tuple[int, ...]
    ) -> InvalidModel:
        """Names those that differ: which of them is wrong, only a person can tell."""
        differing = {tuple(part.shape): name for name, part in zip(names, parts, strict=True)}
        if len(differing) == 1:
            return self._files.wrong_shape(names[-1], parts[-1], shape)
        shown = ", ".join(f"{name!r} {found}" for found, name in differing.items())
        return InvalidModel(
            f"tensors in {self._files.directory} have shapes ({shown}) that together do not fit "
            f"the {shape} that config.json implies"
        )

    def table(self, shape: tuple[int, int], name: str) -> TableRows:
        """See `WeightSource`."""
        tensor = self._tensor(name)
        if tensor.shape != shape:
            raise self._files.wrong_shape(name, tensor, shape)
        return rows_of(tensor)

    def quantized(
        self, shape: tuple[int, int], bias: Tensor | None, *names: str
    ) -> StoredLinear | None:
        """See `WeightSource`."""
        if self._quantization is None:
            return None
        # The tensors decide whether a layer is plain: checkpoints do not name all of those.
        are_plain = [self._is_plain(name) for name in names]
        if all(are_plain) or not any(f"{names[0]}.{weight}" in self._files for weight in _WEIGHTS):
            return None
        layers: list[JoinableLinear] = [
            self._plain(name, shape[1]) if is_plain else self._coded(name, shape[1])
            for name, is_plain in zip(names, are_plain, strict=True)
        ]
        if (rows := sum(layer.out_features for layer in layers)) != shape[0]:
            shown = ", ".join(map(repr, names[:_SHOWN_NAMES])) + ", ..." * (
                len(names) > _SHOWN_NAMES
            )
            raise InvalidModel(
                f"{shown} in {self._files.directory} have {rows} rows in all, not the {shape[0]} "
                "that config.json implies"
            )
        return stacked(layers, bias)

    def _is_plain(self, name: str) -> bool:
        weight = f"{name}.weight"
        return weight in self._files and self._files.get(weight).dtype in PLAIN_DTYPES

    def _plain(self, name: str, columns: int) -> PlainLinear:
        """Reads a layer that is plain beside others that are quantized."""
        weight = f"{name}.weight"
        rows = self._files.get(weight).shape[:1].numel()  # a scalar is refused when read
        return PlainLinear(self.read((self._cut(name).num_rows(rows), columns), weight), None)

    def _coded(self, name: str, columns: int) -> JoinableLinear:
        """Reads one layer of the checkpoint, without its bias. columns: of the part."""
        assert self._quantization is not None
        scheme = self._quantization.scheme_if_quantized(name)
        if scheme is None:
            raise InvalidModel(
                f"the layer {name!r} in {self._files.directory} is quantized, but config.json does "
                "not say how: none of its groups has it"
            )
        cut = self._cut(name)
        whole = columns if cut.columns is None else cut.columns.whole
        return scheme.read(LayerTensors(self._files, name, whole, cut))

    def _cut(self, name: str) -> Cut:
        return Cut() if self._shard is None else self._shard.cut(name)

    def _check_finite(self, name: str, part: Tensor) -> None:
        """Checks all of a vector, and the first row of a matrix: all twice costs too much."""
        sample = part if part.dim() == 1 else part[:1]
        if not bool(sample.isfinite().all()):
            raise self._files.not_finite(
                name,
                "download the model again, or convert it again in bfloat16 if float16 was too "
                "narrow",
            )

    def _tensor(self, name: str) -> Tensor:
        tensor = self._files.get(name)
        if tensor.dtype not in PLAIN_DTYPES:
            raise self._files.wrong_dtype(
                name, tensor, "only float32, float16 and bfloat16 weights are supported"
            )
        return tensor if self._shard is None else self._shard.of(name, tensor)

    def _check_overflow(self, name: str, part: Tensor, stored: Tensor) -> None:
        """Raises InvalidModel where float16 cannot hold a weight. One that is not finite in the
        checkpoint either is not refused here: it shows in the logits, whatever the type."""
        if not is_finite(stored) and is_finite(part):
            raise InvalidModel(
                f"the tensor {name!r} in {self._files.directory} has the value "
                f"{float(part.abs().max()):g}, and float16 holds none above 65504; use --dtype "
                "bfloat16 or --dtype float32"
            )


class RandomWeights(WeightSource):
    """Small random weights for performance work; those of one name are the same in every run."""

    def __init__(
        self,
        empty: Empty,
        quantization: QuantizationConfig | None = None,
        shard: Shard | None = None,
    ) -> None:
        """shard: the part that is made. Its numbers are not those that the whole would have."""
        self._empty = empty
        self._quantization = quantization
        self._shard = shard

    def read(self, shape: tuple[int, ...], *names: str, dtype: torch.dtype | None = None) -> Tensor:
        if len(shape) == 1:  # norms and biases: ones keep the activations' scale
            return self._empty(shape).fill_(1.0)
        weight = self._empty(shape)
        return weight.normal_(std=_STD, generator=self._generator(names[0], weight.device))

    def quantized(
        self, shape: tuple[int, int], bias: Tensor | None, *names: str
    ) -> StoredLinear | None:
        """Plain where the layers have different formats, too."""
        if self._quantization is None:
            return None
        scheme, *others = {self._quantization.scheme_of(name) for name in names}
        if scheme is None or others:
            return None
        if self._shard is not None and self._shard.cut(names[0]).columns is not None:
            scheme = scheme.divided(0, shape[1])
        generator = self._generator(f"{names[0]}.weight", torch.device("cpu"))
        return scheme.made_up(shape, bias, _STD, generator)

    def _generator(self, name: str, device: torch.device) -> torch.Generator:
        """name: of a tensor."""
        if self._shard is not None and self._shard.splits(name):
            name = f"{name} of rank {self._shard.rank}"
        return torch.Generator(device).manual_seed(zlib.crc32(name.encode()))
