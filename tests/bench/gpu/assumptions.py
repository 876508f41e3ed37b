"""How long a launch takes: what it has to do, by what is assumed of an H200.

Each launch is one sum: the gap before it, the loads that depend on each other, the memory's
latency, the longest of what streams (bytes of the memory, bytes of the cache, the busiest
multiprocessor, operations, instructions), the end, and the waves of programs without work. A
product of cuBLAS takes what others measured.
"""

from dataclasses import dataclass

from tests.bench.gpu.cublas import Of, product_us
from tests.bench.gpu.launches import CUBLAS, FP8_PRODUCT
from tests.bench.gpu.work import Work
from tests.support.compile_kernels import NUM_SMS

_TORCH = (CUBLAS, FP8_PRODUCT, "torch ")


@dataclass(frozen=True, kw_only=True)
class Assumptions:
    """Rates in bytes or operations a second, times in microseconds. `SOURCES` says whence."""

    copy: float = 4.3e12
    read_share: float
    cache: float
    port: float = 112e9
    latency: float
    matrix: float = 790e12
    cublas: Of
    prefill_share: float
    issue_share: float
    tile_share: float
    flash_attention: float
    gap: float
    gap_alone: float
    access: float
    end: float
    empty_wave: float


EXPECTED = Assumptions(
    read_share=0.95, cache=5.5e12, latency=0.6, cublas=Of.MEDIAN,
    prefill_share=0.37, issue_share=0.8, tile_share=0.6, flash_attention=269.4,
    gap=0.6, gap_alone=1.3, access=0.35, end=0.4,
    empty_wave=0.8,
)  # fmt: skip
AT_WORST = Assumptions(
    read_share=0.89, cache=4.5e12, latency=0.8, cublas=Of.SLOWEST,
    prefill_share=0.21, issue_share=0.6, tile_share=0.45, flash_attention=248.2,
    gap=1.3, gap_alone=1.8, access=0.5, end=0.7,
    empty_wave=1.2,
)  # fmt: skip
SOURCES = {
    "copy": "bytes/s, read and written; measured on an H200: device-to-device copies of 8.6 GB",
    "read_share": "of it, by kernels of ours that stream; 0.89 is 80 % of the datasheet's 4.8 "
    "TB/s, which SGLang reports for its own kernels on an H200; FlashAttention 3 reads 1.01 of it "
    "at 32 sequences of 8,192, and 0.83 at 256 of 512 (see below); 0.95 to be measured",
    "cache": "bytes/s from L2, all multiprocessors; to be measured",
    "port": "bytes/s into one multiprocessor: 64 bytes a clock at 1.755 GHz",
    "latency": "us from a load to its bytes from memory; to be measured",
    "matrix": "operations/s of an 8,192-cubed bf16 product by cuBLAS; measured on an H200: 769 to "
    "798 TFLOP/s",
    "cublas": "of three frameworks' times of each product on an H200, its launch included; "
    "cublas.py says whence, and what is between the measured sizes",
    "prefill_share": "of it, by our prefill attention; at a chunk of 1,024 FlashAttention 3 "
    "reaches 0.37, TensorRT-LLM's kernel 0.21 (see below); ours to be measured",
    "issue_share": "of four instructions a clock at 1.755 GHz, by products that make numbers of "
    "codes: their loops' instructions are counted in resources.json; to be measured",
    "tile_share": "of the rate of matrix, by tiles whose weights are made of codes, which wait for "
    "each product before they make the next weights, and by those of experts: both supposed, to be "
    "measured",
    "flash_attention": "us of FlashAttention 3 at batch 32, context 8,192 on an H200: vLLM's, "
    "which `make bench-gpu` times too; at worst SGLang's",
    "gap": "us between two of our kernels in a graph, started early (PDL); 1.3 is Hazy Research's "
    "figure for graphs without it; 0.6 to be measured",
    "gap_alone": "us before and after a kernel of torch; as above",
    "access": "us for one load that the next one waits for, from L2; to be measured",
    "end": "us from the last bytes to the end: reductions, stores; to be measured",
    "empty_wave": "us for a wave of programs that find nothing to do; to be measured",
}  # fmt: skip

# Instructions of warps in a microsecond, of all multiprocessors.
_ISSUED = 4 * 1755 * NUM_SMS
# Loads that depend on each other before a program's first tile is asked for.
_CHAIN = {
    "_decode": 2,  # the item, the block
    "_prefill": 4,
    "_rotate_and_store": 1,
    "_embed": 1,
    "_gather_decodes": 3,
    "_gather_chunks": 3,
    "_plan_decode": 2,
    "_plan_prefill": 2,
    "_store_sampled": 1,
    "_store_lengths": 1,
    "_sort": 3,  # the experts, once more, and sums over its warps
    "_gate_up": 2,  # the tile, its rows
    "_down": 1,
}


@dataclass(frozen=True)
class Timed:
    """us: of the launch. memory_us, matrix_us: for which it keeps the memory or the matrix units
    busy."""

    work: Work
    us: float
    memory_us: float
    matrix_us: float = 0.0


def timed(works: list[Work], given: Assumptions) -> list[Timed]:
    found: list[Timed] = []
    for work in works:
        found.append(_timed(work, found[-1] if found else None, given))
    return found


def _timed(work: Work, before: Timed | None, given: Assumptions) -> Timed:
    read_rate = given.copy * given.read_share / 1e6
    if work.name.startswith((CUBLAS, FP8_PRODUCT)):
        is_fp8 = work.name.startswith(FP8_PRODUCT)
        us = product_us(*work.product, given.cublas, is_fp8=is_fp8)
        rows, outputs, columns = work.product
        flops = (1 if is_fp8 else 2) * rows * outputs * columns
        matrix = min(us, flops / given.matrix * 1e6)
        return Timed(work, us, min(us, work.memory_bytes / read_rate), matrix)
    is_torch = work.name.startswith(_TORCH)
    was_torch = before is not None and before.work.name.startswith(_TORCH)
    gap = given.gap_alone if is_torch or was_torch else given.gap
    kernel = work.name.split()[0]
    # Rotating waits for its barrier; combining, for a count and for the pieces.
    chain = _CHAIN.get(kernel, 0) + work.rotates + 2 * work.is_split
    lead = gap + chain * given.access
    memory = work.memory_bytes / read_rate
    matrix = max(
        work.products / (given.matrix * given.tile_share) * 1e6,
        work.flops / (given.matrix * given.prefill_share) * 1e6,
    )
    streams = max(
        memory,
        work.cached_bytes / given.cache * 1e6,
        _busiest(work, given),
        work.issued / (_ISSUED * given.issue_share),
        matrix,
    )
    empty = -(-work.empty // (work.fit * NUM_SMS)) if work.fit else 0
    us = lead + given.latency + streams + given.end + empty * given.empty_wave
    return Timed(work, us, memory, matrix)


def _busiest(work: Work, given: Assumptions) -> float:
    """us of the multiprocessor with most programs, if the memory were not shared."""
    if not work.busy or not work.in_flight:
        return 0.0
    held = min(work.fit, work.busiest)
    rate = min(given.port, held * work.in_flight / given.latency * 1e6)
    return work.busiest * work.memory_bytes / work.busy / rate * 1e6
