"""How near a decode step on the CPU comes to what its memory allows.

The ceiling is measured beside the thing itself, with the same threads, in turns, because on a
shared machine both change from one second to the next.
"""

import json
import statistics
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from penstock.engine.config import Device, Dtype, EngineConfig, LoadFormat
from penstock.engine.executors.cpu import CpuExecutor
from penstock.engine.memory.hardware import read_bandwidth
from penstock.scheduler.config import SchedulerConfig
from penstock.scheduler.types import SamplingParams, ScheduledBatch, SlotAssignment
from tests.support.executors import cpu_executor

# SmolLM-135M's shape: 134.5 million parameters, 269 MB in bfloat16, eight times a large L3.
SHAPE_135M = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 49152,
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "max_position_embeddings": 2048,
    "tie_word_embeddings": True,
}
_PROBE_BYTES = 2**28  # a step's worth, so that both are as likely to be disturbed
_CONTEXT = 64  # tokens before the first measured step


def random_executor(
    dtype: Dtype, num_threads: int, num_seqs: int, shape: Mapping[str, Any] = SHAPE_135M
) -> CpuExecutor:
    """Of random weights in this shape, which is written as config.json."""
    with tempfile.TemporaryDirectory() as model_dir:
        Path(model_dir, "config.json").write_text(json.dumps(shape))
        return cpu_executor(
            EngineConfig(
                model=model_dir,
                device=Device.CPU,
                dtype=dtype,
                load_format=LoadFormat.DUMMY,
                num_threads=num_threads,
                scheduler=SchedulerConfig(max_num_seqs=num_seqs),
            ),
            Path(model_dir),
        )


def cpu_decode(dtype: Dtype, num_threads: int, num_seqs: int, rounds: int, steps: int) -> None:
    executor = random_executor(dtype, num_threads, num_seqs)
    info = executor.info
    decode = _Decode(executor, num_seqs)
    decode.run(steps)  # warm: caches, threads, oneDNN's primitives
    tpots, bandwidths = [], []
    for turn in range(rounds):
        bandwidths.append(read_bandwidth(_PROBE_BYTES, repeats=steps))
        tpots.append(decode.run(steps))
        print(
            f"round {turn + 1} of {rounds}: TPOT {tpots[-1] * 1e3:.2f} ms, "
            f"read bandwidth {bandwidths[-1] / 1e9:.1f} GB/s"
        )
    context_bytes = num_seqs * decode.mean_context * info.kv_bytes_per_token
    step_bytes = info.weight_bytes + context_bytes
    # Pairs, and their median: one round can have twice the bandwidth of the next on a shared host.
    mbus = [step_bytes / t / b for t, b in zip(tpots, bandwidths, strict=True)]
    tpot, bandwidth = statistics.median(tpots), statistics.median(bandwidths)
    mbu = statistics.median(mbus)
    print(
        f"\n{info.num_parameters / 1e6:.1f}M parameters, {info.dtype}, batch {num_seqs}, "
        f"{num_threads} threads: a step reads {step_bytes / 1e6:.0f} MB\n"
        f"medians of {rounds} rounds: TPOT {tpot * 1e3:.2f} ms, {step_bytes / tpot / 1e9:.1f} GB/s "
        f"of {bandwidth / 1e9:.1f} GB/s read, MBU {mbu:.2f} ({min(mbus):.2f}-{max(mbus):.2f})"
    )
    result = {
        "benchmark": "cpu-decode",
        "dtype": info.dtype,
        "num_seqs": num_seqs,
        "num_threads": num_threads,
        "tpot_ms": round(tpot * 1e3, 3),
        "step_bytes": round(step_bytes),
        "read_bandwidth_gb_s": round(bandwidth / 1e9, 2),
        "mbu": round(mbu, 3),
        "mbu_min": round(min(mbus), 3),
        "mbu_max": round(max(mbus), 3),
    }
    print(json.dumps(result))


class _Decode:
    """Endless greedy decode steps of num_seqs sequences."""

    def __init__(self, executor: CpuExecutor, num_seqs: int) -> None:
        self._executor = executor
        self._slots = tuple(range(num_seqs))
        self._length = _CONTEXT
        info = executor.info
        per_seq = -(-info.max_model_len // info.block_size)
        per_seq = min(per_seq, info.num_blocks // num_seqs)
        greedy = SamplingParams(max_tokens=1, temperature=0.0)
        prompt = tuple(range(1, _CONTEXT + 1))

        def blocks_of(slot: int) -> tuple[int, ...]:
            return tuple(range(slot * per_seq, (slot + 1) * per_seq))

        self._assignments = tuple(
            SlotAssignment(slot, prompt, _CONTEXT, (blocks_of(slot),), greedy, seed=0)
            for slot in self._slots
        )
        self._step(0, _CONTEXT, num_decodes=0)
        self._assignments = ()

    @property
    def mean_context(self) -> float:
        return (_CONTEXT + self._length) / 2

    def run(self, steps: int) -> float:
        """Seconds per step: the fastest, as the bandwidth beside it is that of the fastest read."""
        times = []
        for _ in range(steps):
            start = time.perf_counter()
            self._step(self._length, 1, num_decodes=len(self._slots))
            times.append(time.perf_counter() - start)
            self._length += 1
        return min(times)

    def _step(self, start: int, num_tokens: int, num_decodes: int) -> None:
        count = len(self._slots)
        batch = ScheduledBatch(
            step=start,
            assignments=self._assignments,
            table_updates=(),
            copies=(),
            slots=self._slots,
            starts=(start,) * count,
            num_tokens=(num_tokens,) * count,
            samples=(True,) * count,
            num_decodes=num_decodes,
        )
        self._executor.execute(batch).wait()
