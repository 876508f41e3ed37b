"""What each recorded launch has to do: bytes, operations, and programs that have work at all.

The figures come from the tensors and grids that the launch code made; only the meaning of a grid's
axes is repeated here, by kernel.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tests.bench.gpu.launches import CUBLAS, FP8_PRODUCT, Launched, Step
from tests.bench.gpu.resources import known
from tests.support.compile_kernels import NUM_SMS
from tests.support.multiprocessor import ROOM, Room, room_of

# What a step writes and soon reads again stays in the L2 cache, up to half of its 50 or 60 MB.
_CACHED_BYTES = 25_000_000


@dataclass(frozen=True, kw_only=True)
class Work:
    """name: the kernel, with its matrix. fit: programs on one multiprocessor at once, 0 where
    torch launches it; room: that one takes. busy: programs that have anything to do. memory_bytes:
    that cannot be in the cache; cached_bytes: that should. flops: on the matrix units, of
    attention; products: of tiles whose weights are codes, or an expert's. issued: instructions of
    warps. in_flight: bytes of a program that are on their way at once. loads_at_end: of a product,
    one after the other. Of a decode, combined: rounds in which it combines pieces, times the heads
    of each, none where no row has several; rotates: queries and keys first; num_keys: of all rows;
    query_size: of a row. product: rows, outputs and columns of one of cuBLAS.
    """

    name: str
    programs: int
    fit: int
    busy: int
    memory_bytes: int = 0
    cached_bytes: int = 0
    flops: float = 0.0
    issued: float = 0.0
    products: float = 0.0
    in_flight: int = 0
    room: Room | None = None
    loads_at_end: int = 0
    combined: int = 0
    rotates: bool = False
    num_keys: int = 0
    query_size: int = 0
    product: tuple[int, int, int] = (0, 0, 0)

    @property
    def waves(self) -> float:
        return self.programs / (self.fit * NUM_SMS) if self.fit else 0.0

    @property
    def empty(self) -> int:
        return self.programs - self.busy

    @property
    def busiest(self) -> int:
        """Working programs of the multiprocessor that has most of them."""
        return -(-self.busy // NUM_SMS)


class Workbench:
    """Of one model."""

    def __init__(self) -> None:
        self._resources: dict[str, Any] = known()["kernels"]

    def of(self, launched: Launched, step: Step) -> Work:
        """Raises KeyError for a kernel that is not in resources.json."""
        kernel, arguments = launched.kernel, launched.arguments
        if kernel in (CUBLAS, FP8_PRODUCT):
            return _product(kernel, arguments)
        if kernel.startswith("torch "):
            return Work(name=kernel, programs=0, fit=0, busy=0, cached_bytes=_size(arguments))
        compiled = self._resources[launched.key]
        base: dict[str, Any] = {
            "name": kernel, "programs": launched.programs, "busy": launched.programs,
            "fit": compiled["fit"], "room": room_of(**{name: compiled[name] for name in ROOM}),
        }  # fmt: skip
        if kernel == "_skinny":
            return Work(**base | _skinny(launched))
        if kernel == "_skinny_grouped":
            return Work(**base | _skinny_grouped(launched, compiled["loop"]))
        if kernel == "_tiled":
            return Work(**base | _tiled(launched, compiled["loop"]))
        if kernel in ("_gate_up", "_down"):
            return Work(**base | _experts(launched))
        if kernel == "_dequantize":
            return Work(**base | _dequantize(launched))
        if kernel == "_decode":
            return Work(**base | _decode(launched, step, compiled["inner"]))
        if kernel == "_combine_queries":
            return Work(**base | _combine_queries(launched))
        if kernel == "_prefill":
            return Work(**base | _prefill(launched, step))
        return Work(**base | _small(launched))


def _product(kernel: str, arguments: dict[str, Tensor]) -> Work:
    x, weight, out = arguments["x"], arguments["weight"], arguments["out"]
    product = (len(x), out.shape[1], x.shape[1])
    return Work(
        name=f"{kernel} {' x '.join(map(str, product))}",
        programs=0,
        fit=0,
        busy=0,
        memory_bytes=weight.nbytes,
        product=product,
    )


def _skinny(launched: Launched) -> dict[str, Any]:
    a = launched.arguments
    weight, constants = a["weight"], launched.constants
    outputs, columns = weight.shape
    tile_bytes = constants["OUTPUTS"] * constants["CHUNK"] * weight.element_size()
    gates = 2 if constants["IS_GATED"] else 1
    return {
        "name": f"_skinny {outputs} x {columns}",
        "memory_bytes": weight.nbytes,
        # Every program reads all rows of x; the weight comes by the cache too.
        "cached_bytes": weight.nbytes + a["x"].nbytes * launched.programs + 2 * a["out"].nbytes,
        "in_flight": (launched.options["num_stages"] - 1) * tile_bytes * gates,
        "loads_at_end": _loads_at_end(a),
    }


def _loads_at_end(a: dict[str, Any]) -> int:
    """What `store_outputs` waits for: the residual, then the weight of the norm that follows."""
    return (a["residual"] is not None) + (a["following"] is not None)


def _skinny_grouped(launched: Launched, loop: int) -> dict[str, Any]:
    """loop: the instructions of a warp in each round."""
    a, constants = launched.arguments, launched.constants
    codes, gates = a["codes"], 2 if constants["IS_GATED"] else 1
    outputs = len(codes)
    rows_each = constants["OUTPUTS"] * gates
    chunk = constants["RUN"] * constants["WARPS"]
    rounds = -(-codes.shape[1] // chunk)
    coded = _coded_bytes(a)
    return {
        "name": f"_skinny_grouped {_kind(launched)} {outputs} x {a['columns']}",
        "memory_bytes": coded,
        "cached_bytes": coded + a["x"].nbytes * launched.programs + 2 * a["out"].nbytes,
        "in_flight": (constants["STAGES"] - 1) * rows_each * chunk,
        "issued": float(launched.programs * constants["WARPS"] * rounds * loop),
        "loads_at_end": _loads_at_end(a),
    }


def _tiled(launched: Launched, loop: int) -> dict[str, Any]:
    """loop: as above."""
    a, constants = launched.arguments, launched.constants
    rows, outputs, size = constants["ROWS"], constants["OUTPUTS"], constants["SIZE"]
    tiles, row_tiles, splits = launched.grid
    columns = size * 8 // constants["BITS"]
    rounds = splits * -(-a["split_bytes"] // size)
    coded = _coded_bytes(a)
    # Each program reads its rows of x, and writes its sums.
    x_bytes = tiles * a["x"].nbytes
    return {
        "name": f"_tiled {_kind(launched)} {len(a['x'])} x {a['outputs']} x {a['columns']}",
        "memory_bytes": coded,
        "cached_bytes": coded * row_tiles + x_bytes + a["out"].nbytes,
        "in_flight": (constants["STAGES"] - 1) * outputs * size,
        "issued": float(tiles * row_tiles * rounds * launched.options["num_warps"] * loop),
        "products": float(tiles * row_tiles * rounds) * 2 * rows * outputs * columns,
    }


def _experts(launched: Launched) -> dict[str, Any]:
    """Of tokens that choose experts at random, all as likely; those that are chosen have as many
    rows each."""
    a, constants = launched.arguments, launched.constants
    weight, x = a["weight"], a["x"]
    gates = 2 if launched.kernel == "_gate_up" else 1
    num_outputs = a["size"] if gates == 2 else a["hidden"]
    num_rows = len(a["order"])
    num_each = constants["EACH"] if gates == 2 else a["weights"].shape[1]
    num_experts, columns = len(weight) // (gates * num_outputs), a["columns"]
    share = 1 - (1 - num_each / num_experts) ** (num_rows // num_each)
    chosen = num_experts * share
    rows, outputs, chunk = (constants[name] for name in ("ROWS", "OUTPUTS", "CHUNK"))
    busy = launched.grid[0] * min(launched.grid[1], round(chosen * -(-num_rows // (chosen * rows))))
    tile_bytes = outputs * chunk * weight.element_size() * gates
    # A program reads its rows of x and of the weights by the cache.
    read = (rows + outputs * gates) * columns * x.element_size()
    return {
        "name": f"{launched.kernel} {num_experts} of {gates * num_outputs} x {columns}",
        "busy": busy,
        "memory_bytes": int(share * weight.nbytes),
        "cached_bytes": int(busy * read) + a["out"].nbytes,
        "in_flight": (launched.options["num_stages"] - 1) * tile_bytes,
        "products": 2.0 * busy * rows * outputs * gates * columns,
    }


def _kind(launched: Launched) -> str:
    """Of the codes."""
    bits = launched.constants["BITS"]
    is_float = bits == 8 and launched.arguments["codes"].dtype is torch.uint8
    return "fp8" if is_float else f"int{bits}"


def _dequantize(launched: Launched) -> dict[str, Any]:
    """What it writes is read by the next product, from the cache if that holds it."""
    a = launched.arguments
    rows, columns = a["out"].shape
    share = rows / len(a["codes"])
    fits = a["out"].nbytes <= _CACHED_BYTES
    return {
        "name": f"_dequantize {_kind(launched)} {rows} x {columns}",
        "memory_bytes": int(_coded_bytes(a) * share) + (0 if fits else a["out"].nbytes),
        "cached_bytes": a["out"].nbytes,
    }


def _coded_bytes(a: dict[str, Any]) -> int:
    """Codes, scales and zeros."""
    tables = a["scales"].nbytes * (1 + (a["zeros"] is not None))
    return int(a["codes"].nbytes) + int(tables)


def _decode(launched: Launched, step: Step, inner: int) -> dict[str, Any]:
    """inner: the instructions of a warp for each tile of keys."""
    a, constants = launched.arguments, launched.constants
    heads, dim = constants["NUM_KV_HEADS"], constants["HEAD_DIM"]
    first = a["first_item"][: a["num_rows"] + 1]
    pieces, counts = int(first[-1]), first[1:] - first[:-1]
    # Of split rows: each head's partial result is written, and read by who combines them.
    partials = int(counts[counts > 1].sum()) * constants["NUM_HEADS"] * dim * 4
    rounds = -(-int(counts.max()) // constants["COMBINED"]) if partials else 0
    num_queries = 1 + step.drafts
    if step.drafts:  # another kernel combines them
        rounds = 0
    scale_bytes = 0 if a["key_scales"] is None else a["key_scales"].element_size()
    # A latent is key and value of all heads, and is read for each part of these.
    rest = constants["REST"]
    key_bytes = (dim + rest) * a["keys"].element_size()
    token_bytes = (1 if rest else 2 * heads) * (key_bytes + scale_bytes)
    again = (heads - 1) * sum(step.decodes) * token_bytes if rest else 0
    tiles = sum(-(-context // constants["TILE"]) for context in step.decodes)
    tile_bytes = (1 if rest else 2) * constants["TILE"] * key_bytes
    combined_bytes = (2 - bool(step.drafts)) * num_queries * partials
    return {
        "busy": min(launched.programs, pieces * heads),
        "memory_bytes": sum(step.decodes) * token_bytes,
        "cached_bytes": again + 2 * a["out"].nbytes + combined_bytes,
        "in_flight": 2 * tile_bytes,
        "issued": float(tiles * heads * launched.options["num_warps"] * inner),
        "combined": rounds * constants["GROUP_SIZE"],
        "rotates": constants["ROTATES"],
        "num_keys": sum(step.decodes),
        "query_size": constants["NUM_HEADS"] * dim,
    }


def _combine_queries(launched: Launched) -> dict[str, Any]:
    a, constants = launched.arguments, launched.constants
    counts = a["tokens"][: len(a["out"]), 1]
    pieces, heads = int(counts[counts > 1].sum()), constants["NUM_HEADS"]
    rounds = -(-int(counts.max()) // constants["COMBINED"]) if pieces else 0
    return {
        "busy": int((counts > 1).sum()) * constants["NUM_KV_HEADS"],
        "cached_bytes": pieces * heads * constants["HEAD_DIM"] * 4 + a["out"].nbytes,
        "combined": rounds * constants["GROUP_SIZE"],
    }


def _prefill(launched: Launched, step: Step) -> dict[str, Any]:
    a, constants = launched.arguments, launched.constants
    heads, dim = constants["NUM_KV_HEADS"], constants["HEAD_DIM"]
    pairs = sum(count * before + count * (count + 1) / 2 for count, before in step.chunks)
    tokens, rest = sum(count + before for count, before in step.chunks), constants["REST"]
    return {
        "busy": min(launched.programs, int(a["first_item"][a["num_rows"]]) * heads),
        "cached_bytes": 2 * tokens * heads * (dim + rest if rest else 2 * dim)
        + 2 * a["out"].nbytes,
        "flops": 2 * pairs * constants["NUM_HEADS"] * (2 * dim + rest),
    }


# Of a kernel whose tensors are larger than what it touches, those that it touches whole.
_TOUCHED = {
    "_rotate_and_store": ("qkv", "qkv"),
    "_rotate_and_store_latents": ("latents", "heads", "query"),
    "_embed": ("residual", "residual"),
    "_scan": ("logits",),
    "_coarse": ("logits",),
    "_gather": ("logits",),
    "_finish": (),
    "_select": (),
}
_TABLES = (
    "_gather_decodes", "_gather_chunks", "_gather_drafted", "_store_sampled", "_accept_drafts",
    "_plan_decode", "_plan_prefill",
)  # fmt: skip


def _small(launched: Launched) -> dict[str, Any]:
    if launched.kernel in _TABLES:
        return {}
    arguments = launched.arguments
    if launched.kernel == "_head_products":
        cached = arguments["x"].nbytes + arguments["out"].nbytes
        return {"memory_bytes": arguments["weight"].nbytes, "cached_bytes": cached}
    if launched.kernel == "_sort":  # every program reads all rows twice
        return {"cached_bytes": 2 * arguments["chosen"].nbytes * launched.programs}
    if launched.kernel in _TOUCHED:
        touched = sum(arguments[name].nbytes for name in _TOUCHED[launched.kernel])
    else:
        touched = _size({k: v for k, v in arguments.items() if k != "weight"})
    where = "cached_bytes" if touched < _CACHED_BYTES else "memory_bytes"
    return {where: touched}


def _size(arguments: dict[str, Any]) -> int:
    return sum(value.nbytes for value in arguments.values() if isinstance(value, Tensor))
