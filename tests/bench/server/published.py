"""`python -m tests.bench.server.published`: a datasheet's step times beside published figures.

What others measured with vLLM, and what our step model says of the same load on the same device
before any step of ours has run there. The model assumes the shares of the peaks that our kernels
are to reach (`scheduler/step_model/analytic.py`), so a deviation has two parts: how far we hope to
be from vLLM, and how wrong the model is. Only a measurement of ours on a GPU tells them apart.
Takes half a minute of a core, and prints Markdown.

Source of the rows: github.com/tgarg01/silybench-data of 2026-09-24, vLLM 0.30.0, Qwen3-8B in
bfloat16 on one H100 SXM with 80 GB; the last one vLLM's own nightly benchmark of 2024 (build 9515),
Llama-3.1-8B in bfloat16 on an H200.
"""

import sys
from dataclasses import dataclass
from statistics import median

from penstock.engine.config import Dtype, KVCacheDtype
from penstock.engine.memory.dtypes import TORCH_DTYPES
from penstock.engine.models.config import ModelConfig
from penstock.engine.planned_model import planned_model
from penstock.engine.sizing import GB, Machine, Sizing
from penstock.loadtest.report.report import Replay, percentile
from penstock.loadtest.simulate.replica import SimulatedServer
from penstock.loadtest.simulate.simulation import Plan, simulate
from penstock.loadtest.workload.config import WorkloadConfig
from penstock.loadtest.workload.workload import make_requests
from penstock.scheduler.config import SchedulerConfig
from tests.support.paths import ROOT

# vLLM's defaults of a server on these devices.
LIMITS = SchedulerConfig(
    max_num_seqs=1024, max_num_batched_tokens=8192, enable_prefix_caching=False
)
_MEMORY_GB = {"H100": 80, "H200": 141}
ITL, THROUGHPUT, TTFT = "ITL median, ms", "output tokens/s", "TTFT p95, ms"


@dataclass(frozen=True, slots=True)
class Published:
    """A closed loop: as many requests at a time as `concurrency`."""

    input_len: int
    output_len: int
    concurrency: int
    figure: str
    value: float
    model: str = "Qwen3-8B"
    device: str = "H100"


ROWS = [
    *(
        Published(128, 128, concurrency, ITL, value)
        for concurrency, value in ((1, 6.83), (16, 7.14), (64, 8.15), (128, 9.34), (256, 12.83))
    ),
    *(
        Published(128, 1024, concurrency, ITL, value)
        for concurrency, value in ((1, 6.86), (16, 7.53), (64, 9.49), (128, 12.0), (256, 18.08),
                                   (512, 30.4))
    ),
    *(
        Published(128, 1024, concurrency, THROUGHPUT, value)
        for concurrency, value in ((1, 146), (16, 2117), (64, 6597), (128, 10301), (256, 13567),
                                   (512, 13523))
    ),
    Published(128, 128, 512, THROUGHPUT, 14540),
    Published(1024, 128, 256, THROUGHPUT, 3618),
    Published(2048, 2048, 128, THROUGHPUT, 3917),
    Published(8192, 512, 1, ITL, 7.30),
    Published(8192, 512, 64, THROUGHPUT, 997),  # "saturated"
    *(
        Published(input_len, 128, 1, TTFT, value)
        for input_len, value in ((128, 14.0), (1024, 34.0), (2048, 61.0))
    ),
    Published(32, 128, 8, ITL, 6.5, "Llama-3.1-8B", "H200"),
]  # fmt: skip


def server_of(row: Published) -> SimulatedServer:
    sizing = Sizing(
        ModelConfig.from_dir(ROOT / "configs" / "models" / row.model),
        Machine(name=row.device, memory_bytes=_MEMORY_GB[row.device] * GB),
        TORCH_DTYPES[Dtype.BFLOAT16],
        None,
        KVCacheDtype.AUTO,
    )
    made = planned_model(sizing, LIMITS, max_model_len=16384)
    return SimulatedServer(made.info, made.step_model, LIMITS)


def observed(row: Published) -> Replay:
    requests = make_requests(
        WorkloadConfig(
            num_prompts=max(3, 2 * row.concurrency),
            input_len=row.input_len,
            output_len=row.output_len,
            vocab_size=256,
        )
    )
    plan = Plan(server=server_of(row), max_concurrency=row.concurrency, seed=None)
    return simulate(plan, requests).observed


def figure_of(replay: Replay, figure: str) -> float:
    if figure == THROUGHPUT:
        return sum(each.num_output_tokens for each in replay.completed) / replay.duration_s
    if figure == TTFT:
        return percentile(sorted(each.ttft_s for each in replay.completed), 95) * 1e3
    return median(gap for each in replay.completed for gap in each.itls_s) * 1e3


def _short(value: float) -> str:
    return f"{value:,.0f}" if value >= 1000 else f"{value:.3g}"


def main() -> int:
    print("| model, device | in/out | concurrency | figure | vLLM | datasheet model | deviation |")
    print("|---|---|---:|---|---:|---:|---:|")
    replays: dict[tuple[object, ...], Replay] = {}
    for row in ROWS:
        key = (row.model, row.device, row.input_len, row.output_len, row.concurrency)
        if key not in replays:
            replays[key] = observed(row)
        ours = figure_of(replays[key], row.figure)
        print(
            f"| {row.model}, {row.device} | {row.input_len:,}/{row.output_len:,} | "
            f"{row.concurrency} | {row.figure} | {row.value:,g} | {_short(ours)} | "
            f"{ours / row.value - 1:+.0%} |",
            flush=True,
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
