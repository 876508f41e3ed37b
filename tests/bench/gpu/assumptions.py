"""How long a launch takes: what it has to do, by what is assumed of an H200.

Each launch is one sum: the gap before it, the loads that depend on each other, the memory's
latency, the longest of what streams (bytes of the memory, bytes of the cache, the busiest
multiprocessor, operations, instructions), the end, and the waves of programs without work. A
product of cuBLAS takes what others measured. How long the gap is depends on whether the launch's
programs have had room beside the one before: see `tests.bench.gpu.residency`.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from enum import Enum
from itertools import groupby

from tests.bench.gpu.cublas import Of, product_us
from tests.bench.gpu.launches import CUBLAS, FP8_PRODUCT
from tests.bench.gpu.residency import Grid, Started, started
from tests.bench.gpu.work import Work
from tests.support.compile_kernels import NUM_SMS


@dataclass(frozen=True, kw_only=True)
class Assumptions:
    """Rates in bytes or operations a second, times in microseconds. `SOURCES` says whence."""

    copy: float = 4.3e12
    read_share: float
    attention_share: float
    cache: float
    port: float = 112e9
    latency: float
    matrix: float = 790e12
    cublas: Of
    prefill_share: float
    issue_share: float
    tile_share: float
    flash_attention: float
    release: float
    start: float
    gap_alone: float
    between_steps: float
    access: float
    combine: float
    end: float
    empty_wave: float


EXPECTED = Assumptions(
    read_share=1.01, attention_share=0.94, cache=6e12, latency=0.6, cublas=Of.MEDIAN,
    prefill_share=0.37, issue_share=0.8, tile_share=0.6, flash_attention=269.4,
    release=1.0, start=1.3, gap_alone=2.0, between_steps=12.0, access=0.8, combine=0.53, end=0.4,
    empty_wave=0.9,
)  # fmt: skip
AT_WORST = Assumptions(
    read_share=0.95, attention_share=0.89, cache=5.5e12, latency=0.8, cublas=Of.SLOWEST,
    prefill_share=0.21, issue_share=0.6, tile_share=0.45, flash_attention=248.2,
    release=1.3, start=1.8, gap_alone=2.4, between_steps=16.0, access=1.0, combine=0.7, end=0.7,
    empty_wave=1.2,
)  # fmt: skip
SOURCES = {
    "copy": "bytes/s, read and written; measured on an H200: device-to-device copies of 8.6 GB",
    "read_share": "of it, by products of ours; measured on an H200: those of an 8B layer alone, "
    "235 MB in 56 us, 50 in 14, two of 151 together in 38, which are 4.4 TB/s and 2.3 us each; "
    "FlashAttention 3 reads 1.01 of it at 32 sequences of 8,192",
    "attention_share": "of it, by our decode attention; measured on an H200: 276 us at 32 sequences"
    " of 8,192; 0.89 is 80 % of the datasheet's 4.8 TB/s, which SGLang reports for its own kernels",
    "cache": "bytes/s from L2, all multiprocessors; such that a step of 16 rows takes the 4.88 ms "
    "that an H200 measured",
    "port": "bytes/s into one multiprocessor: 64 bytes a clock at 1.755 GHz",
    "latency": "us from a load to its bytes from memory; to be measured",
    "matrix": "operations/s of an 8,192-cubed bf16 product by cuBLAS; measured on an H200: 769 to "
    "798 TFLOP/s",
    "cublas": "of three frameworks' times of each product on an H200, its launch included; "
    "cublas.py says whence, and what is between the measured sizes",
    "prefill_share": "of it, by our prefill attention; at a chunk of 1,024 FlashAttention 3 "
    "reaches 0.37, TensorRT-LLM's kernel 0.21 (see below); ours to be measured",
    "issue_share": "of four instructions a clock at 1.755 GHz, by products that make numbers of "
    "codes and attention that does: their loops' instructions are counted in resources.json; to be "
    "measured",
    "tile_share": "of the rate of matrix, by tiles whose weights are made of codes, which wait for "
    "each product before they make the next weights, and by those of experts: both supposed, to be "
    "measured",
    "flash_attention": "us of FlashAttention 3 at batch 32, context 8,192 on an H200: vLLM's, "
    "which `make bench-gpu` times too; at worst SGLang's",
    "release": "us from a kernel's end until programs that wait for it (PDL) begin; such that a "
    "step of an 8B model at batch 1 takes the 4.30 ms that an H200 measured; that of 0.6B tests it",
    "start": "us from a place to the begin of a program that gets it late; measured on an H200: "
    "the 2.3 us above, of products that leave each other no room, less latency and end; Hazy "
    "Research has 1.3 between empty kernels in a graph",
    "gap_alone": "us before and after a kernel of torch, and between ours without early starts; "
    "measured on an H200: 0.74 us a launch more without them at batch 1 (4.757 and 4.882 ms)",
    "between_steps": "us between two graphs: the copy of the ids on the same stream, and two "
    "launches; measured on an H200 by torch's profiler",
    "access": "us for one load that the next one waits for, and the arithmetic between; measured "
    "on an H200 as attention at batch 1, context 512, of which there are nine or so: 0.43 ms of a "
    "step of 4.37, a layer 13.4 us",
    "combine": "us of a round in which a decode combines pieces, for each head of a group; "
    "measured on an H200: 2.2 a layer of 8B, with groups of 4, and 1.0 of 0.6B, with groups of 2, "
    "by doing with one round in place of two",
    "end": "us from the last bytes to the end: reductions, stores; to be measured",
    "empty_wave": "us for a wave of programs that find nothing to do; measured on an H200: 0.94 a "
    "layer, of 264 programs of a decode",
}  # fmt: skip

# Instructions of warps in a microsecond, of all multiprocessors.
_ISSUED = 4 * 1755 * NUM_SMS
# Loads that depend on each other before a program's first tile is asked for.
_CHAIN = {
    "_decode": 4,  # the list's length, the item, the query, the block
    "_prefill": 4,
    "_rotate_and_store": 1,
    "_embed": 1,
    "_gather_decodes": 3,
    "_gather_chunks": 3,
    "_gather_drafted": 4,
    "_accept_drafts": 4,
    "_combine_queries": 1,
    "_plan_decode": 2,
    "_plan_prefill": 2,
    "_store_sampled": 1,
    "_sort": 3,  # the experts, once more, and sums over its warps
    "_gate_up": 2,  # the tile, its rows
    "_down": 1,
}


class Early(Enum):
    """Which launches of ours begin `release` after the one before: none, those whose programs have
    had room, or all."""

    NONE = "none"
    AS_ROOM_ALLOWS = "as room allows"
    ALL = "all"


@dataclass(frozen=True)
class Timed:
    """us: of the launch, with the gap before it. early: of its programs, those that waited when the
    launch before ended. memory_us, matrix_us: for which it keeps the memory or the matrix units
    busy."""

    work: Work
    us: float
    memory_us: float
    matrix_us: float = 0.0
    gap: float = 0.0
    early: int = 0


def timed(
    works: list[Work], given: Assumptions, early: Early = Early.AS_ROOM_ALLOWS
) -> list[Timed]:
    """Of a step, one after the other."""
    found = [_alone(work, given) for work in works]
    starts = _starts(found, given, early)
    return [
        replace(one, us=one.us + start.gap, gap=start.gap, early=start.early)
        for one, start in zip(found, starts, strict=True)
    ]


def _starts(found: list[Timed], given: Assumptions, early: Early) -> Iterator[Started]:
    """Of a step's launches. Those of ours that follow each other may start early."""
    for is_ours, group in groupby(found, key=lambda one: one.work.room is not None):
        launches = list(group)
        first = given.between_steps if launches[0] is found[0] else given.gap_alone
        if not is_ours:
            # A time of cuBLAS has its own launch.
            products = [one.work.name.startswith((CUBLAS, FP8_PRODUCT)) for one in launches]
            yield from (Started(0.0 if is_product else first, 0) for is_product in products)
            continue
        grids = [_grid(one) for one in launches]
        yield Started(first, 0)
        if early is Early.AS_ROOM_ALLOWS:
            yield from started(grids, release=given.release, start=given.start)[1:]
        elif early is Early.ALL:
            yield from (Started(given.release, grid.programs) for grid in grids[1:])
        else:
            yield from (Started(given.gap_alone, 0) for _ in grids[1:])


def _grid(one: Timed) -> Grid:
    work = one.work
    assert work.room is not None
    return Grid(programs=work.programs, busy=work.busy, room=work.room, us=one.us)


def _alone(work: Work, given: Assumptions) -> Timed:
    """Without what is between it and the launch before."""
    share = given.attention_share if work.name == "_decode" else given.read_share
    memory = work.memory_bytes / (given.copy * share / 1e6)
    if work.name.startswith((CUBLAS, FP8_PRODUCT)):
        is_fp8 = work.name.startswith(FP8_PRODUCT)
        us = product_us(*work.product, given.cublas, is_fp8=is_fp8)
        rows, outputs, columns = work.product
        flops = (1 if is_fp8 else 2) * rows * outputs * columns
        return Timed(work, us, min(us, memory), min(us, flops / given.matrix * 1e6))
    # Rotating waits for the new key and its barrier; combining, until what is stored is there, and
    # for a count.
    chain = _CHAIN.get(work.name.split()[0], 0) + work.rotates + 2 * (work.combined > 0)
    matrix = max(
        work.products / (given.matrix * given.tile_share) * 1e6,
        work.flops / (given.matrix * given.prefill_share) * 1e6,
    )
    streams = max(
        memory,
        work.cached_bytes / given.cache * 1e6,
        _busiest(work, given),
        issue_us(work, given),
        matrix,
    )
    empty = -(-work.empty // (work.fit * NUM_SMS)) if work.fit else 0
    us = (chain + work.loads_at_end) * given.access + given.latency + streams
    us += work.combined * given.combine + given.end + empty * given.empty_wave
    return Timed(work, us, memory, matrix)


def issue_us(work: Work, given: Assumptions) -> float:
    """As long as its instructions take."""
    return work.issued / (_ISSUED * given.issue_share)


def _busiest(work: Work, given: Assumptions) -> float:
    """us of the multiprocessor with most programs, if the memory were not shared."""
    if not work.busy or not work.in_flight:
        return 0.0
    held = min(work.fit, work.busiest)
    rate = min(given.port, held * work.in_flight / given.latency * 1e6)
    return work.busiest * work.memory_bytes / work.busy / rate * 1e6
