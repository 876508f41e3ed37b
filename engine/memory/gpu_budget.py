"""How a GPU's memory is divided: arithmetic, and error messages that name the flag to change."""

import math
from collections.abc import Callable
from dataclasses import dataclass

from penstock.engine.config import EngineConfig, LoraConfig
from penstock.scheduler.errors import InvalidConfig

GIB = 2**30
# The driver keeps these for each captured graph besides its buffers: records of some 300 kernels.
# An estimate; the memory table in the log has what the graphs really took.
_BYTES_PER_GRAPH = 8 * 2**20


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryBudget:
    """A GPU's memory in bytes, once the weights are loaded. used: by all processes, the weights
    included. reserved: what activations and graphs will take on top."""

    total: int
    used: int
    reserved: int

    @property
    def free(self) -> int:
        return self.total - self.used - self.reserved


def check_weights(name: str, total: int, free: int, weights: int, dtype_name: str) -> None:
    """Raises InvalidConfig for weights that do not fit."""
    if weights > free:
        hint = "; or halve them with --dtype bfloat16" if dtype_name == "float32" else ""
        raise InvalidConfig(
            f"the model's weights take {weights / GIB:.2f} GiB in {dtype_name}, but of the "
            f"{total / GIB:.2f} GiB of {name} only {free / GIB:.2f} are free; stop other "
            f"processes that use it, serve a smaller model, or use --device cpu{hint}"
        )


def check_adapters(config: LoraConfig, name: str, num_bytes: int, free: int) -> None:
    """Raises InvalidConfig for slots of adapters that do not fit. num_bytes: of all. free: after
    the weights."""
    if num_bytes > free:
        raise InvalidConfig(
            f"--max-loras {config.max_loras} of --max-lora-rank {config.max_rank} take "
            f"{num_bytes / GIB:.2f} GiB, and {name} has {max(0, free) / GIB:.2f} free after the "
            "weights; lower one of them"
        )


def graph_bytes(num_graphs: int, activations: int) -> int:
    """An estimate of what the graphs will take: their records, and the memory of their two pools
    (decodes, and steps with chunks), neither of which needs more than the largest step."""
    return num_graphs * _BYTES_PER_GRAPH + 2 * activations if num_graphs else 0


def pool_bytes(config: EngineConfig, budget: MemoryBudget) -> int:
    """For keys and values. May be negative. Raises InvalidConfig if the flag asks for too much."""
    wanted = config.kv_cache_memory_bytes
    if wanted is None:
        return int(budget.total * config.gpu_memory_utilization) - budget.used - budget.reserved
    if wanted > budget.free:
        raise InvalidConfig(
            f"--kv-cache-memory-bytes is {wanted}, but after the weights and a step's activations "
            f"the GPU has {max(0, budget.free)} bytes free; set it to at most that"
        )
    return wanted


def pool_advice(config: EngineConfig, budget: MemoryBudget) -> Callable[[int], str]:
    """Says what to change so that the pool can have a number of bytes."""

    def advice(needed: int) -> str:
        if config.kv_cache_memory_bytes is not None and needed <= budget.free:
            return f"set --kv-cache-memory-bytes to at least {needed}"
        share = math.ceil((budget.used + budget.reserved + needed) / budget.total * 1000) / 1000
        if share <= 1:
            return f"set --gpu-memory-utilization to at least {share}"
        missing = (needed - budget.free) / GIB
        return f"the GPU has {missing:.2f} GiB too little: use a larger one"

    return advice


def out_of_memory(config: EngineConfig, phase: str) -> str:
    """The error message for a GPU whose memory ran out in this phase of the start."""
    scheduler = config.scheduler
    step = (
        f"lower --max-num-batched-tokens (now {scheduler.max_step_tokens}) "
        f"or --max-num-seqs (now {scheduler.max_num_seqs})"
    )
    if config.kv_cache_memory_bytes is not None:
        pool = f"lower --kv-cache-memory-bytes (now {config.kv_cache_memory_bytes})"
    else:
        pool = f"lower --gpu-memory-utilization (now {config.gpu_memory_utilization})"
    others = "stop other processes that use it"
    before = "before the model was loaded", others
    when, change = {
        "bandwidth": before,
        "flops": before,
        "weights": (
            "while the weights were being loaded",
            f"{others}, or serve a smaller model",
        ),
        "activations": ("in the largest step that the settings allow", step),
        "kv_pool": ("while the KV pool was being allocated", pool),
        "graphs": (
            "while CUDA graphs were being captured",
            f"{pool}, lower --max-num-seqs (now {scheduler.max_num_seqs}), or start with "
            "--enforce-eager",
        ),
        "kv_offload": (
            "while memory was being taken for blocks on their way to the host",
            f"{pool}, or leave --kv-offload-gb and --kv-offload-dir out",
        ),
    }[phase]
    return f"the GPU's memory ran out {when}; {change}"
