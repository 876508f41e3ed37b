"""Products with weights in codes beside torch's with bfloat16 (cuBLAS), by the number of rows.

As the fused step computes them: `fused_linear` chooses the kernel, few rows, tiles or cuBLAS of
dequantized weights. The figures decide MAX_TILED_ROWS, and the tiles of `codes.tiles`.
"""

from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch import Tensor

from penstock.engine.kernels.codes.scaled import takes
from penstock.engine.kernels.linear import MAX_ROWS
from penstock.engine.memory.pool.kv_codes import decode, encode
from penstock.engine.models.formats.awq.config import Awq
from penstock.engine.models.formats.compressed_tensors.config import Integers
from penstock.engine.models.formats.fp8.config import Fp8
from penstock.engine.models.formats.kept import OnGpu
from penstock.engine.models.formats.scheme import TensorScheme
from penstock.engine.models.layers.coded import CodedLinear
from penstock.engine.models.layers.fused_linear import fused_linear
from penstock.engine.models.layers.linear import StoredLinear
from tests.bench.engine.case import Bench, Case, MakeCase, size_of
from tests.bench.engine.linear_cases import layer_shapes
from tests.bench.engine.models import model_config
from tests.bench.engine.timing import relative_error

_MODEL = "Llama-3.1-8B"
_ROWS, _CHECKED_ROWS, _TINY_ROWS = (1, 16, 64, 256, 1024), (1, 20), (2, 20)
# As --quantization and common checkpoints have them.
_SCHEMES: dict[str, TensorScheme] = {
    "int8": Integers(bits=8, group_size=32, is_packed=False),
    "int4": Integers(bits=4, group_size=128, is_packed=True),
    "awq": Awq(group_size=128),
    "fp8": Fp8(),
    "fp8 blocks": Fp8(block=(128, 128)),
}


def coded(bench: Bench) -> Iterator[MakeCase]:
    shapes = layer_shapes(model_config(_MODEL, bench.tiny))
    for name, (outputs, columns) in shapes.items():
        for codes in list(_SCHEMES)[: 2 if bench.tiny else None]:
            for rows in bench.pick(_ROWS, _CHECKED_ROWS, _TINY_ROWS):
                at: dict[str, object] = {
                    "model": _MODEL, "layer": name, "rows": rows, "codes": codes,
                }  # fmt: skip
                yield partial(_case, bench, at, _SCHEMES[codes], rows, (outputs, columns))
        if bench.tiny or not bench.is_timed:
            break


def _case(
    bench: Bench, at: dict[str, object], scheme: TensorScheme, rows: int, shape: tuple[int, int]
) -> Case:
    outputs, columns = shape
    first = _linear(bench, scheme, shape)
    layers = [first]
    layers += [_linear(bench, scheme, shape) for _ in range(1, bench.sets(first.num_bytes))]
    x, out = bench.random(rows, columns), bench.poisoned(rows, outputs)
    plain = torch.empty(shape, dtype=bench.dtype, device=bench.device)
    first.write_weight(plain)
    count = bench.sets(size_of(plain))
    weights = [plain, *(plain.clone() for _ in range(1, count))]
    calls = [_call(layer, x, out) for layer in layers]

    def error() -> float:
        out.fill_(float("nan"))
        calls[0]()
        is_rounded = rows > MAX_ROWS and takes(first.weight, x.dtype)
        read = decode(*encode(x, torch.float8_e4m3fn)) if is_rounded else x
        return relative_error(out, read.double() @ plain.double().T)

    return Case(
        kernel="a product with codes",
        at=at,
        calls=calls,
        error=error,
        num_bytes=size_of(x, out) + first.num_bytes,
        flops=2 * rows * outputs * columns,
        rivals={"torch": [partial(torch.mm, x, weight.T, out=out) for weight in weights]},
    )


def _call(layer: CodedLinear, x: Tensor, out: Tensor) -> Callable[[], object]:
    product = fused_linear(layer)
    if len(x) <= MAX_ROWS:
        return partial(product.few, x, out)
    return partial(product.many, x, out)


def _linear(bench: Bench, scheme: TensorScheme, shape: tuple[int, int]) -> CodedLinear:
    generator = torch.Generator(bench.device).manual_seed(0)
    stored: StoredLinear = scheme.made_up(shape, None, shape[1] ** -0.5, generator)
    layer = OnGpu(bench.device).layer(stored)
    assert isinstance(layer, CodedLinear), layer
    return layer
