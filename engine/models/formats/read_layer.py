"""Reads a linear layer of a quantized checkpoint, stacked from one or several of its layers."""

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from penstock.engine.files.tensor_files import PLAIN_DTYPES, TensorFiles
from penstock.engine.models.errors import InvalidModel
from penstock.engine.models.formats.awq.layer import read_awq
from penstock.engine.models.formats.compressed_tensors.layer import read_integers
from penstock.engine.models.formats.config import QuantizationConfig
from penstock.engine.models.formats.cut import Cut
from penstock.engine.models.formats.fp4.layer import read_fp4
from penstock.engine.models.formats.fp8.layer import read_fp8
from penstock.engine.models.formats.gptq.layer import read_gptq
from penstock.engine.models.formats.parts import Part, PlainPart, stacked
from penstock.engine.models.formats.scheme import Awq, Fp4, Fp8, Gptq, Integers
from penstock.engine.models.formats.tensors import LayerTensors
from penstock.engine.models.layers.linear import StoredLinear

_READERS: dict[type, Callable[[LayerTensors, Any], Part]] = {
    Awq: read_awq,
    Fp4: read_fp4,
    Fp8: read_fp8,
    Gptq: read_gptq,
    Integers: read_integers,
}
# The tensors of which any shows that a layer is in the checkpoint.
_WEIGHTS = ("weight", "weight_packed", "qweight", "blocks")


def read_layer(
    files: TensorFiles,
    quantization: QuantizationConfig,
    shape: tuple[int, int],
    bias: Tensor | None,
    names: Sequence[str],
    read_plain: Callable[..., Tensor],
    cut_of: Callable[[str], Cut] = lambda _: Cut(),
) -> StoredLinear | None:
    """See `WeightSource.quantized`. Raises InvalidModel.

    What the tensors are decides whether a layer is plain: checkpoints do not name all of those.
    read_plain: `WeightSource.read`. cut_of: which part of a layer is read.
    """
    plain = [_is_plain(files, name) for name in names]
    if all(plain) or not any(f"{names[0]}.{weight}" in files for weight in _WEIGHTS):
        return None

    def read_rows(num_rows: int, layers: Sequence[str]) -> Tensor:
        return read_plain((num_rows, shape[1]), *(f"{layer}.weight" for layer in layers))

    parts: list[Part] = []
    for name, is_plain in zip(names, plain, strict=True):
        cut = cut_of(name)
        if is_plain:
            rows = files.get(f"{name}.weight").shape[:1].numel()  # a scalar is refused when read
            parts.append(PlainPart(name, cut.num_rows(rows), read_rows))
        else:
            columns = shape[1] if cut.columns is None else cut.columns.whole
            parts.append(_part(files, quantization, name, columns, cut))
    if (rows := sum(part.rows for part in parts)) != shape[0]:
        raise InvalidModel(
            f"{', '.join(map(repr, names))} in {files.directory} have {rows} rows in all, not the "
            f"{shape[0]} that config.json implies"
        )
    return stacked(parts, bias)


def _part(
    files: TensorFiles, quantization: QuantizationConfig, name: str, columns: int, cut: Cut
) -> Part:
    """columns: of the whole."""
    scheme = quantization.scheme_if_quantized(name)
    if scheme is None:
        raise InvalidModel(
            f"the layer {name!r} in {files.directory} is quantized, but config.json does not say "
            "how: none of its groups has it"
        )
    return _READERS[type(scheme)](LayerTensors(files, name, columns, cut), scheme)


def _is_plain(files: TensorFiles, name: str) -> bool:
    weight = f"{name}.weight"
    return weight in files and files.get(weight).dtype in PLAIN_DTYPES
