"""How a GPU's memory is shared out, as arithmetic: numbers in, numbers and sentences out."""

import math
from collections.abc import Callable
from dataclasses import dataclass

from penstock.engine.config import EngineConfig
from penstock.scheduler.errors import InvalidConfig

GIB = 2**30
# Of what the driver keeps of each captured graph beside its buffers: some 300 kernels' records.
# An estimate; the ledger tells what the graphs have really taken.
_BYTES_PER_GRAPH = 8 * 2**20


@dataclass(frozen=True, slots=True, kw_only=True)
class Room:
    """A GPU's bytes when its weights are loaded. used: by everybody, the weights included.
    reserved: what activations and graphs will take beside that."""

    total: int
    used: int
    reserved: int

    @property
    def free(self) -> int:
        return self.total - self.used - self.reserved


def check_weights(name: str, total: int, free: int, weights: int, dtype_name: str) -> None:
    """Raises InvalidConfig for weights that cannot be loaded."""
    if weights > free:
        hint = "; or halve them by --dtype bfloat16" if dtype_name == "float32" else ""
        raise InvalidConfig(
            f"the model's weights take {weights / GIB:.2f} GiB in {dtype_name}, but of the "
            f"{total / GIB:.2f} GiB of {name} only {free / GIB:.2f} are free; end what else uses "
            f"it, serve a smaller model, or use --device cpu{hint}"
        )


def graph_bytes(num_graphs: int, activations: int) -> int:
    """What the graphs will take, about: their records, and the memory of their two pools (decodes,
    and steps with chunks), of which none needs more than the largest step."""
    return num_graphs * _BYTES_PER_GRAPH + 2 * activations if num_graphs else 0


def pool_bytes(config: EngineConfig, room: Room) -> int:
    """For keys and values. May be negative. Raises InvalidConfig where a wish exceeds the room."""
    wanted = config.kv_cache_memory_bytes
    if wanted is None:
        return int(room.total * config.gpu_memory_utilization) - room.used - room.reserved
    if wanted > room.free:
        raise InvalidConfig(
            f"--kv-cache-memory-bytes is {wanted}, but beside the weights and a step's activations "
            f"the GPU has {max(0, room.free)} bytes free; set it to at most that"
        )
    return wanted


def pool_advice(config: EngineConfig, room: Room) -> Callable[[int], str]:
    """What to change where the pool should have so many bytes."""

    def advice(needed: int) -> str:
        if config.kv_cache_memory_bytes is not None and needed <= room.free:
            return f"set --kv-cache-memory-bytes to at least {needed}"
        share = math.ceil((room.used + room.reserved + needed) / room.total * 1000) / 1000
        if share <= 1:
            return f"set --gpu-memory-utilization to at least {share}"
        missing = (needed - room.free) / GIB
        return f"the GPU lacks {missing:.2f} GiB for it: use a larger one"

    return advice


def out_of_memory(config: EngineConfig, phase: str) -> str:
    """What to change where the GPU's memory ran out in this phase of the start."""
    scheduler = config.scheduler
    step = (
        f"lower --max-num-batched-tokens (now {scheduler.max_num_batched_tokens}) "
        f"or --max-num-seqs (now {scheduler.max_num_seqs})"
    )
    if config.kv_cache_memory_bytes is not None:
        pool = f"lower --kv-cache-memory-bytes (now {config.kv_cache_memory_bytes})"
    else:
        pool = f"lower --gpu-memory-utilization (now {config.gpu_memory_utilization})"
    change = {
        "bandwidth": "end what else uses it",
        "flops": "end what else uses it",
        "weights": "end what else uses it, or serve a smaller model",
        "activations": step,
        "kv_pool": pool,
        "graphs": f"{pool}, lower --max-num-seqs (now {scheduler.max_num_seqs}), or start with "
        "--enforce-eager",
    }[phase]
    names = {
        "bandwidth": "before anything was loaded",
        "flops": "before anything was loaded",
        "weights": "while the weights were loaded",
        "activations": "in the largest step that the settings allow",
        "kv_pool": "while the KV pool was made",
        "graphs": "while CUDA graphs were captured",
    }
    return f"the GPU's memory ran out {names[phase]}; {change}"
