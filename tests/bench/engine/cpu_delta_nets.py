"""How fast the compiled step computes gated delta nets: beside a Llama of as many bytes, and beside
torch, all in one process and in turns, because a shared machine changes from one second to the
next.
"""

import json
import time
from typing import Any
from unittest.mock import patch

from penstock.engine.config import Dtype
from penstock.engine.executors.cpu import CpuExecutor
from penstock.engine.loading import cpu
from penstock.scheduler.types import SamplingParams, ScheduledBatch, SlotAssignment
from tests.bench.engine.cpu_decode import random_executor

# The layers of Qwen3.5-0.8B, eight of its 24, and a small vocabulary.
QWEN: dict[str, Any] = {
    "architectures": ["Qwen3_5ForCausalLM"],
    "model_type": "qwen3_5_text",
    "vocab_size": 32768,
    "hidden_size": 1024,
    "intermediate_size": 3584,
    "num_hidden_layers": 8,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 256,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 16,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_conv_kernel_dim": 4,
    "full_attention_interval": 4,
    "attn_output_gate": True,
    "rms_norm_eps": 1e-6,
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 10000000,
        "partial_rotary_factor": 0.25,
    },
    "max_position_embeddings": 4096,
    "tie_word_embeddings": True,
}
# As many bytes a layer, within one percent.
LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 32768,
    "hidden_size": 1024,
    "intermediate_size": 5888,
    "num_hidden_layers": 8,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "max_position_embeddings": 4096,
    "tie_word_embeddings": True,
}


def cpu_delta_nets(
    dtype: Dtype, num_threads: int, num_rows: int, rounds: int, steps: int, *, has_torch: bool
) -> None:
    """num_rows: of a prefill step. steps: decodes of one sequence in each round."""
    sides = {
        "qwen3.5": random_executor(dtype, num_threads, 1, QWEN),
        "llama": random_executor(dtype, num_threads, 1, LLAMA),
    }
    if has_torch:
        with patch.object(cpu, "load_library", lambda *_, **__: None):
            sides["torch"] = random_executor(dtype, num_threads, 1, QWEN)
    runs = {name: _Run(executor, num_rows) for name, executor in sides.items()}
    for _ in range(rounds):
        for run in runs.values():
            run.measure(steps)
    ours, llama = runs["qwen3.5"], runs["llama"]
    result: dict[str, Any] = {
        "benchmark": "cpu-delta-nets",
        "dtype": sides["qwen3.5"].info.dtype,
        "num_threads": num_threads,
        "num_rows": num_rows,
        "weight_bytes": {name: each.info.weight_bytes for name, each in sides.items()},
        "decode_ms": {name: round(run.decode_s * 1e3, 2) for name, run in runs.items()},
        "prefill_ms": {name: round(run.prefill_s * 1e3, 1) for name, run in runs.items()},
        "decode_of_llama": round(llama.decode_s / ours.decode_s, 3),
        "prefill_of_llama": round(llama.prefill_s / ours.prefill_s, 3),
    }
    if has_torch:
        result["decode_of_torch"] = round(runs["torch"].decode_s / ours.decode_s, 2)
        result["prefill_of_torch"] = round(runs["torch"].prefill_s / ours.prefill_s, 2)
    print(json.dumps(result))


class _Run:
    """Steps of one sequence. decode_s, prefill_s: the fastest of each so far."""

    def __init__(self, executor: CpuExecutor, num_rows: int) -> None:
        self._executor, self._num_rows = executor, num_rows
        self.decode_s = self.prefill_s = float("inf")

    def measure(self, steps: int) -> None:
        self.prefill_s = min(self.prefill_s, self._step(0, self._num_rows))
        for step in range(steps):
            self.decode_s = min(self.decode_s, self._step(self._num_rows + step, 1))

    def _step(self, start: int, num_tokens: int) -> float:
        """Returns the seconds that it took."""
        assignments: tuple[SlotAssignment, ...] = ()
        if start == 0:
            greedy = SamplingParams(max_tokens=1, temperature=0.0)
            prompt = tuple(1 + i % 1000 for i in range(num_tokens))
            blocks = tuple(range(-(-1024 // self._executor.info.block_size)))
            tables = (blocks, (0,))[: len(self._executor.pool.all_groups)]
            assignments = (SlotAssignment(0, prompt, num_tokens, tables, greedy, seed=0),)
        batch = ScheduledBatch(
            step=start,
            assignments=assignments,
            table_updates=(),
            copies=(),
            slots=(0,),
            starts=(start,),
            num_tokens=(num_tokens,),
            samples=(True,),
            num_decodes=int(start > 0),
        )
        begin = time.perf_counter()
        self._executor.execute(batch).wait()
        return time.perf_counter() - begin
