"""How near a prefill step on the CPU comes to torch's products of the same matrices.

Both with the same threads, in turns, because a shared machine changes from one second to the next.
A step does more than products: attention, norms and the output layer of one row are in its time,
and not in its operations.
"""

import json
import statistics
import time

import torch
from torch import Tensor

from penstock.engine.config import Dtype
from penstock.engine.executors.cpu import CpuExecutor
from penstock.engine.models.layers.linear import cpu_linear
from penstock.scheduler.types import SamplingParams, ScheduledBatch, SlotAssignment
from tests.bench.engine.cpu_decode import SHAPE_135M, random_executor


def cpu_prefill(dtype: Dtype, num_threads: int, num_rows: int, rounds: int) -> None:
    executor = random_executor(dtype, num_threads, num_seqs=1)
    matrices = _matrices()
    flops = 2 * num_rows * sum(rows * columns for rows, columns in matrices)
    products = _Products(matrices, getattr(torch, executor.info.dtype), num_rows)
    _prefill(executor, num_rows), products.run()  # warm
    ours, theirs = [], []
    for turn in range(rounds):
        ours.append(flops / _prefill(executor, num_rows) / 1e9)
        theirs.append(flops / products.run() / 1e9)
        print(
            f"round {turn + 1} of {rounds}: a step {ours[-1]:.0f} GFLOP/s, torch's products "
            f"{theirs[-1]:.0f} GFLOP/s"
        )
    ratios = [a / b for a, b in zip(ours, theirs, strict=True)]
    print(
        f"\n{num_rows} tokens, {executor.info.dtype}, {num_threads} threads, medians of {rounds} "
        f"rounds: {statistics.median(ours):.0f} of {statistics.median(theirs):.0f} GFLOP/s, ratio "
        f"{statistics.median(ratios):.2f} ({min(ratios):.2f}-{max(ratios):.2f})"
    )
    result = {
        "benchmark": "cpu-prefill",
        "dtype": executor.info.dtype,
        "num_rows": num_rows,
        "num_threads": num_threads,
        "gflops": round(statistics.median(ours), 1),
        "torch_gflops": round(statistics.median(theirs), 1),
        "ratio": round(statistics.median(ratios), 3),
        "ratio_min": round(min(ratios), 3),
        "ratio_max": round(max(ratios), 3),
    }
    print(json.dumps(result))


def _matrices() -> list[tuple[int, int]]:
    """(rows, columns) of the layers' matrices."""
    hidden, mlp = SHAPE_135M["hidden_size"], SHAPE_135M["intermediate_size"]
    heads, kv_heads = SHAPE_135M["num_attention_heads"], SHAPE_135M["num_key_value_heads"]
    assert isinstance(hidden, int) and isinstance(mlp, int)
    assert isinstance(heads, int) and isinstance(kv_heads, int)
    qkv = hidden + 2 * kv_heads * hidden // heads
    layer = [(qkv, hidden), (hidden, hidden), (2 * mlp, hidden), (hidden, mlp)]
    layers = SHAPE_135M["num_hidden_layers"]
    assert isinstance(layers, int)
    return layer * layers


class _Products:
    """torch's fastest for this processor, as oneDNN's of matrices in its own layout."""

    def __init__(self, matrices: list[tuple[int, int]], dtype: torch.dtype, num_rows: int) -> None:
        def random(*size: int) -> Tensor:
            return torch.randn(*size).to(dtype)

        make = cpu_linear(dtype, has_experts=False)
        self._pairs = [
            (make(random(rows, columns), None), random(num_rows, columns))
            for rows, columns in matrices
        ]

    @torch.inference_mode()
    def run(self) -> float:
        """Seconds of the fastest of three passes over all."""
        return min(self._pass() for _ in range(3))

    def _pass(self) -> float:
        start = time.perf_counter()
        for linear, x in self._pairs:
            linear(x)
        return time.perf_counter() - start


def _prefill(executor: CpuExecutor, num_rows: int) -> float:
    """Seconds of the fastest of three steps of one prompt."""
    blocks = tuple(range(-(-num_rows // executor.info.block_size)))
    greedy = SamplingParams(max_tokens=1, temperature=0.0)
    prompt = tuple(1 + i % 1000 for i in range(num_rows))
    batch = ScheduledBatch(
        step=0,
        assignments=(SlotAssignment(0, prompt, num_rows, (blocks,), greedy, seed=0),),
        table_updates=(),
        copies=(),
        slots=(0,),
        starts=(0,),
        num_tokens=(num_rows,),
        samples=(True,),
        num_decodes=0,
    )
    times = []
    for _ in range(3):
        start = time.perf_counter()
        executor.execute(batch).wait()
        times.append(time.perf_counter() - start)
    return min(times)
