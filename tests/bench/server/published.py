"""`python -m tests.bench.server.published`: a datasheet's step times beside published figures.

What others measured with vLLM, and what our step model says of the same load on the same device
before any step of ours has run there. The model assumes the shares of the peaks that our kernels
are to reach (`scheduler/step_model/analytic.py`), so a deviation has two parts: how far we hope to
be from vLLM, and how wrong the model is. Only a measurement of ours on a GPU tells them apart.
Takes a minute of a core, and prints Markdown.

Source of the rows: github.com/tgarg01/silybench-data of 2026-09-24, vLLM 0.30.0, Qwen3-8B in
bfloat16 on one H100 SXM with 80 GB; and vLLM's own nightly benchmark of 2024 (build 9515), Llama in
bfloat16 on H200s.

Of several GPUs, with weights of 16 bits: LMDeploy 0.1.0a1 on A100s (docs/en/benchmark/a100_fp16.md
in its repository), TensorRT-LLM by NeMo on H100s (docs.nvidia.com/nemo-framework, Llama-2 results),
vLLM on A100s before its own all-reduce (vllm, pull 2192, of 2023), and vLLM on B200s (vllm, pull
20759, of 2025; one request a second, which keeps two or three open). Each has the same engine on
one GPU beside it where that was published: so what ranks add is told from what the engine adds.
"""

import sys
from dataclasses import dataclass
from statistics import fmean, median
from typing import Any

from penstock.engine.config import Dtype, KVCacheDtype
from penstock.engine.memory.dtypes import TORCH_DTYPES
from penstock.engine.models.config import ModelConfig
from penstock.engine.sizing.planned_model import planned_model
from penstock.engine.sizing.sizing import GB, Machine, Sizing
from penstock.loadtest.report.report import Replay, percentile
from penstock.loadtest.simulate.replica import SimulatedServer
from penstock.loadtest.simulate.simulation import Plan, simulate
from penstock.loadtest.workload.config import WorkloadConfig
from penstock.loadtest.workload.workload import make_requests
from penstock.scheduler.config import SchedulerConfig
from tests.support.changed_models import changed
from tests.support.paths import ROOT

# vLLM's defaults of a server on these devices.
LIMITS = SchedulerConfig(
    max_num_seqs=1024, max_num_batched_tokens=8192, enable_prefix_caching=False
)
_MEMORY_GB = {"H100": 80, "H200": 141, "A100-SXM4-80GB": 80, "B200": 180}
ITL, THROUGHPUT, TTFT = "ITL median, ms", "output tokens/s", "TTFT p95, ms"
LATENCY = "latency mean, ms"
# Of models of which configs/models has none: what they have that Llama-3.1-8B has not.
_LLAMA_2 = {"embedding": {"vocab_size": 32_000}, "head": {"vocab_size": 32_000}}
_70B = {"num_layers": 80, "hidden_size": 8_192, "mixer": {"num_heads": 64},
        "mlp": {"size": 28_672}}  # fmt: skip
_SHAPES: dict[str, dict[str, Any]] = {
    "Llama-2-7B": {**_LLAMA_2, "mlp": {"size": 11_008}, "mixer": {"num_kv_heads": 32}},
    "Llama-2-70B": {**_LLAMA_2, **_70B},
    "Llama-3.1-70B": _70B,
}  # fmt: skip


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
    num_devices: int = 1


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
    Published(32, 128, 8, ITL, 16.2, "Llama-3.1-70B", "H200", 4),
    *(
        Published(128, 2048, concurrency, THROUGHPUT, value, "Llama-2-7B", "A100-SXM4-80GB")
        for concurrency, value in ((1, 98.92), (16, 1010.62), (32, 1462.12))
    ),
    *(
        Published(128, 2048, concurrency, THROUGHPUT, value, "Llama-2-70B", "A100-SXM4-80GB", 4)
        for concurrency, value in ((1, 32.38), (16, 482.99), (32, 853.56), (64, 1391.8))
    ),
    Published(2048, 2048, 64, THROUGHPUT, 930.46, "Llama-2-70B", "A100-SXM4-80GB", 4),
    *(
        Published(128, 20, concurrency, LATENCY, value, "Llama-2-7B", "H100", num_devices)
        for concurrency, values in ((1, (153.8, 128.6, 107.4, 97.6)),
                                    (8, (199.2, 151.2, 134.6, 129.1)))
        for num_devices, value in zip((1, 2, 4, 8), values, strict=True)
    ),
    Published(256, 256, 64, LATENCY, 16370, "Llama-2-70B", "A100-SXM4-80GB", 4),
    Published(550, 150, 2, ITL, 12.87, "Llama-3.1-70B", "B200", 4),
]  # fmt: skip


def model_of(name: str) -> ModelConfig:
    configs = ROOT / "configs" / "models"
    if name not in _SHAPES:
        return ModelConfig.from_dir(configs / name)
    return changed(ModelConfig.from_dir(configs / "Llama-3.1-8B"), **_SHAPES[name])


def server_of(row: Published) -> SimulatedServer:
    sizing = Sizing(
        model_of(row.model),
        Machine(name=row.device, memory_bytes=_MEMORY_GB[row.device] * GB),
        TORCH_DTYPES[Dtype.BFLOAT16],
        None,
        KVCacheDtype.AUTO,
    )
    made = planned_model(sizing, LIMITS, tensor_parallel_size=row.num_devices, max_model_len=16384)
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
    if figure == LATENCY:
        return fmean(each.latency_s for each in replay.completed) * 1e3
    return median(gap for each in replay.completed for gap in each.itls_s) * 1e3


def _short(value: float) -> str:
    return f"{value:,.0f}" if value >= 1000 else f"{value:.3g}"


def main() -> int:
    print("| model, device | in/out | concurrency | figure | theirs | datasheet | deviation |")
    print("|---|---|---:|---|---:|---:|---:|")
    replays: dict[tuple[object, ...], Replay] = {}
    for row in ROWS:
        key = (row.model, row.device, row.num_devices, row.input_len, row.output_len,
               row.concurrency)  # fmt: skip
        if key not in replays:
            replays[key] = observed(row)
        ours = figure_of(replays[key], row.figure)
        device = row.device if row.num_devices == 1 else f"{row.num_devices} x {row.device}"
        print(
            f"| {row.model}, {device} | {row.input_len:,}/{row.output_len:,} | "
            f"{row.concurrency} | {row.figure} | {row.value:,g} | {_short(ours)} | "
            f"{ours / row.value - 1:+.0%} |",
            flush=True,
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
