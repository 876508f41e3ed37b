"""How long a launch takes: what it has to do, by what is assumed of an H200.

Each launch is one sum: the gap before it, the loads that depend on each other, the memory's
latency, the longest of what streams (bytes of the memory, bytes of the cache, the busiest
multiprocessor, operations), the end, and the waves of programs without work.
"""

from dataclasses import dataclass

from tests.bench.gpu.launches import CUBLAS
from tests.bench.gpu.work import Work
from tests.support.compile_kernels import NUM_SMS

_TORCH = (CUBLAS, "torch ")


@dataclass(frozen=True, kw_only=True)
class Assumptions:
    """Rates in bytes or operations a second, times in microseconds. `SOURCES` says whence."""

    copy: float = 4.3e12
    read_share: float
    cublas_read_share: float
    cache: float
    port: float = 112e9
    latency: float
    matrix: float = 790e12
    few_share: float
    many_share: float
    prefill_share: float
    gap: float
    gap_alone: float
    access: float
    end: float
    empty_wave: float
    prefetches: bool


EXPECTED = Assumptions(
    read_share=0.95, cublas_read_share=0.85, cache=5.5e12, latency=0.6, few_share=0.75,
    many_share=0.88, prefill_share=0.55, gap=0.6, gap_alone=1.3, access=0.35, end=0.4,
    empty_wave=0.8, prefetches=True,
)  # fmt: skip
AT_WORST = Assumptions(
    read_share=0.89, cublas_read_share=0.75, cache=4.5e12, latency=0.8, few_share=0.65,
    many_share=0.80, prefill_share=0.40, gap=1.3, gap_alone=1.8, access=0.5, end=0.7,
    empty_wave=1.2, prefetches=False,
)  # fmt: skip
SOURCES = {
    "copy": "bytes/s, read and written; measured on an H200: device-to-device copies of 8.6 GB",
    "read_share": "of it, by kernels of ours that stream; 0.89 is 80 % of the datasheet's 4.8 "
    "TB/s, which SGLang reports for its own kernels on an H200; 0.95 to be measured",
    "cublas_read_share": "of it, by cuBLAS where the weights decide; to be measured (0.6 to 0.75 "
    "is said of small shapes)",
    "cache": "bytes/s from L2, all multiprocessors; to be measured",
    "port": "bytes/s into one multiprocessor: 64 bytes a clock at 1.755 GHz",
    "latency": "us from a load to its bytes from memory; to be measured",
    "matrix": "operations/s of an 8,192-cubed bf16 product by cuBLAS; measured on an H200: 769 to "
    "798 TFLOP/s",
    "few_share": "of it, by cuBLAS at up to 512 rows; to be measured",
    "many_share": "of it, by cuBLAS above; to be measured",
    "prefill_share": "of it, by our prefill attention; to be measured",
    "gap": "us between two of our kernels in a graph, started early (PDL); 1.3 is Hazy Research's "
    "figure for graphs without it; 0.6 to be measured",
    "gap_alone": "us before and after a kernel of torch; as above",
    "access": "us for one load that the next one waits for, from L2; to be measured",
    "end": "us from the last bytes to the end: reductions, stores; to be measured",
    "empty_wave": "us for a wave of programs that find nothing to do; to be measured",
    "prefetches": "a product's prefetch uses the memory while the kernel before leaves it idle; to "
    "be measured",
}  # fmt: skip

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
}


@dataclass(frozen=True)
class Timed:
    """us: of the launch. memory_us: for which it keeps the memory busy."""

    work: Work
    us: float
    memory_us: float


def timed(works: list[Work], given: Assumptions) -> list[Timed]:
    found: list[Timed] = []
    for work in works:
        found.append(_timed(work, found[-1] if found else None, given))
    return found


def _timed(work: Work, before: Timed | None, given: Assumptions) -> Timed:
    is_torch = work.name.startswith(_TORCH)
    was_torch = before is not None and before.work.name.startswith(_TORCH)
    gap = given.gap_alone if is_torch or was_torch else given.gap
    kernel = work.name.split()[0]
    # Rotating waits for its barrier; combining, for a count and for the pieces.
    chain = _CHAIN.get(kernel, 0) + work.rotates + 2 * work.is_split
    lead = gap + chain * given.access
    share = given.cublas_read_share if is_torch else given.read_share
    rate = given.copy * share / 1e6
    memory = work.memory_bytes / rate
    ahead = 0.0
    if given.prefetches and before is not None:
        ahead = min(work.ahead_bytes / rate, lead + before.us - before.memory_us)
    streams = max(
        memory - ahead,
        work.cached_bytes / given.cache * 1e6,
        _busiest(work, given),
        work.flops / (given.matrix * _share(work, given)) * 1e6,
    )
    empty = -(-work.empty // (work.fit * NUM_SMS)) if work.fit else 0
    us = lead + given.latency + streams + given.end + empty * given.empty_wave
    return Timed(work, us, memory - ahead)


def _busiest(work: Work, given: Assumptions) -> float:
    """us of the multiprocessor with most programs, if the memory were not shared."""
    if not work.busy or not work.in_flight:
        return 0.0
    held = min(work.fit, work.busiest)
    rate = min(given.port, held * work.in_flight / given.latency * 1e6)
    return work.busiest * work.memory_bytes / work.busy / rate * 1e6


def _share(work: Work, given: Assumptions) -> float:
    if not work.name.startswith(CUBLAS):
        return given.prefill_share
    return given.few_share if int(work.name.split()[1]) <= 512 else given.many_share
