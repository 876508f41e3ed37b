"""Starts a model that several processes compute: each rank's process meets the others, and loads
its part. Rank 0 is this process.
"""

import os
import queue
import subprocess
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from penstock.engine.config import EngineConfig
from penstock.engine.executors.cpu import CpuExecutor
from penstock.engine.executors.cuda.device import Device, Processor
from penstock.engine.executors.first_rank import FirstRank, causes
from penstock.engine.executors.followers import Followers, Start, Step, layout_of
from penstock.engine.loading.load import load_executor
from penstock.engine.models.config import ModelConfig
from penstock.engine.models.division.shard import Shard
from penstock.engine.models.division.stage import Stage, num_passed
from penstock.engine.native.library import load_ranks_library
from penstock.engine.process.phases import Phases
from penstock.engine.ranks.layout import MAX_RANKS
from penstock.engine.ranks.link import LinkSize
from penstock.engine.ranks.membership import Membership, membership_bytes
from penstock.engine.ranks.shared_memory import RankMemory, shared_memory
from penstock.engine.step.executor import AdapterStore
from penstock.scheduler.errors import InvalidConfig

# To read weights takes what the disk needs, and may have to wait for a compiler.
START_TIMEOUT_S = 3600.0


def build_ranks(
    config: EngineConfig, phases: Phases, followers: Followers, *, on_gpus: bool
) -> FirstRank[Any]:
    """Tells the other ranks to begin, and loads this one's part while they load theirs. Raises
    PenstockError."""
    with phases.timed("ranks", f"meeting {layout_of(config).size - 1} more processes"):
        start = Start(config, 0, on_gpus, _memory(config, on_gpus=on_gpus))
        followers.begin(start)
        with causes(followers):
            place, device = _connected(start, followers)
    followers.is_waiting = True
    try:
        with causes(followers):
            executor = _load(start, place, device, phases)
        followers.is_waiting = False
        return FirstRank(executor, followers, place.close)
    except BaseException:
        followers.on_end(lambda _: None)
        place.close()
        followers.close()
        raise


def follow(
    start: Start, on_error: Callable[[BaseException], None]
) -> tuple[Callable[[Step], None], AdapterStore]:
    """Loads this rank's part, where it is not rank 0. Returns what computes that of each step, and
    the store of its parts of adapters. on_error: called in another thread, with what its device
    reports of a step."""
    place, device = _connected(start)
    executor = _load(start, place, device, Phases())
    if isinstance(executor, CpuExecutor):
        return lambda step: executor.follow(step.batch, step.sampled), executor.adapters
    launched: queue.SimpleQueue[Any] = queue.SimpleQueue()

    def watch() -> None:
        # An error of a device is that of the next call that waits for it; and rank 0, which then
        # waits for a step, sends no other one.
        try:
            if device.device.type == "cuda":
                torch.cuda.set_device(device.device)  # a thread has the first GPU, and takes memory
            while True:
                step = launched.get()
                step.wait_for_device()
                if step.stage_time is not None:
                    place.has_computed(step.step, step.stage_time.seconds)
        except BaseException as error:
            on_error(error)

    threading.Thread(target=watch, daemon=True).start()
    return lambda step: launched.put(executor.follow(step.batch, step.sampled)), executor.adapters


def _load(start: Start, place: Any, device: Device, phases: Phases) -> Any:
    """Returns the executor once all ranks have theirs. Raises PenstockError."""
    executor = load_executor(start.config, Path(start.config.model), place, device, phases)
    if not start.on_gpus:  # all have mapped it
        for descriptor in start.memory:
            os.close(descriptor)
    place.everyone.barrier()
    # Less than the server waits for the engine, which does not know the rank.
    place.wait_at_most(0.75 * start.config.stall_timeout_s)
    return executor


def _connected(start: Start, followers: Followers | None = None) -> tuple[Any, Device]:
    """The place of this rank among all, and its device. followers: whose end ends the waiting of
    rank 0. Raises RankFailed."""
    if start.on_gpus:
        from penstock.engine.loading.gpu_ranks import connected

        return connected(start, START_TIMEOUT_S, followers)
    membership = join(start.config, start.memory[0], start.rank, start.memory[1:])
    if followers is not None:
        followers.on_end(membership.end)
    return membership, Processor()


def _memory(config: EngineConfig, *, on_gpus: bool) -> tuple[int, ...]:
    """Descriptors of what the ranks share. Raises InvalidConfig, also where there is no compiler
    for processors."""
    if on_gpus:
        from penstock.engine.loading.gpu_ranks import shared_by_gpus

        return shared_by_gpus(config)
    layout = layout_of(config)
    try:
        library = load_ranks_library()
    except (OSError, subprocess.SubprocessError) as error:
        raise InvalidConfig(
            f"{layout.flags} needs a C++ compiler for what the ranks exchange; install g++ "
            f"({getattr(error, 'stderr', None) or error})"
        ) from error
    memory = shared_memory(membership_bytes(library, layout, link_size(config)))
    return memory, *rank_pools(config)


def rank_pools(config: EngineConfig) -> tuple[int, ...]:
    """Descriptors for the pools of the ranks after the first, where rank 0 moves their blocks with
    its own."""
    num_others = 0 if config.kv_offload_dir is None else layout_of(config).size - 1
    return tuple(shared_memory(0) for _ in range(num_others))


def join(
    config: EngineConfig, descriptor: int, rank: int, pools: tuple[int, ...] = ()
) -> Membership:
    """descriptor: of what all ranks share. pools: see `rank_pools`."""
    library = load_ranks_library()
    memory = RankMemory(library, descriptor, layout_of(config), rank, START_TIMEOUT_S)
    return Membership.join(memory, link_size(config), pools)


def link_size(config: EngineConfig) -> LinkSize:
    """Between stages: room for the states, in float32, of as many steps as may be in flight."""
    model = ModelConfig.from_dir(Path(config.model))
    num_rows = num_passed(model) * config.scheduler.max_step_tokens
    return LinkSize(config.pipeline_parallel_size, 4 * num_rows * model.hidden_size)


def check_parallel(config: EngineConfig, model_dir: Path) -> None:
    """Raises InvalidConfig for what several ranks do not compute."""
    layout = layout_of(config)
    flag = layout.flags
    if layout.size > MAX_RANKS:
        raise InvalidConfig(
            f"{flag}: at most {MAX_RANKS} ranks are supported, and these are {layout.size}"
        )
    if config.quantization_report:
        raise InvalidConfig(
            f"{flag} cannot be combined with --quantization-report, as each rank rounds its own "
            "part, and none could compute the whole model to compare; leave it out, or measure "
            "with one rank"
        )
    model = ModelConfig.from_dir(model_dir)
    if layout.tensor_size > 1:
        model = Shard(model, 0, layout.tensor_size).config
    if layout.num_stages > 1:
        Stage(model, 0, layout.num_stages)
