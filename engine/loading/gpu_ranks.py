"""Starts a model that several GPUs compute: each rank's process finds its device, meets the others,
and loads its part. Rank 0 is this process, with the first GPU that it sees; rank i has the i-th.
"""

import logging
import os
import queue
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch

from penstock.engine.config import EngineConfig
from penstock.engine.executors.cuda.device import CudaGpu, Gpu, Interpreter
from penstock.engine.executors.cuda.executor import CudaExecutor
from penstock.engine.executors.cuda.launched_step import LaunchedStep
from penstock.engine.executors.first_rank import FirstRank, causes
from penstock.engine.executors.followers import Followers, Start, Step
from penstock.engine.loading.cpu_ranks import (
    START_TIMEOUT_S,
    first_rank,
    flags_of,
    layout_of,
    wait_limit_s,
)
from penstock.engine.loading.gpu import load_on_gpu
from penstock.engine.memory.tiers.offload import offload_flag
from penstock.engine.models.config import ModelConfig
from penstock.engine.process.logs import flush_all
from penstock.engine.process.phases import Phases
from penstock.engine.ranks.board import Board, board_memory
from penstock.engine.ranks.group import RankFailed
from penstock.engine.ranks.layout import RankLayout
from penstock.engine.ranks.rendezvous import Rendezvous, rendezvous_memory
from penstock.engine.ranks.torch_ranks import TorchRanks
from penstock.engine.step.executor import AdapterStore
from penstock.scheduler.errors import InvalidConfig

logger = logging.getLogger(__name__)

# For tests: all ranks compute on one device, the first GPU or, where there is none, Triton's
# interpreter; slowly, since each sum passes the host.
SHARED_DEVICE = "PENSTOCK_RANKS_SHARE_DEVICE"
_LOOK_S = 0.02
# For a device to stop waiting for a rank that has ended.
_STOP_S = 10.0


def build_cuda_ranks(
    config: EngineConfig, phases: Phases, followers: Followers
) -> FirstRank[CudaExecutor]:
    """Tells the other ranks to begin, and loads this one's part. Raises PenstockError."""
    model_dir, layout = Path(config.model), layout_of(config)
    check_offload(config)
    check_stages(layout, ModelConfig.from_dir(model_dir))
    if not _shares_device():
        check_num_gpus(layout, torch.cuda.device_count())
    with phases.timed("ranks", f"meeting {layout.size - 1} more processes"):
        store, board = rendezvous_memory(), board_memory(layout.size)
        followers.begin(config, store, board)
        with causes(followers):
            ranks = _connected(0, layout, store, board, followers)
    return first_rank(
        config, followers, ranks, lambda: load_on_gpu(config, model_dir, _gpu_of(0), phases, ranks)
    )


def follow_on_gpu(
    start: Start, on_error: Callable[[BaseException], None]
) -> tuple[Callable[[Step], None], AdapterStore | None]:
    """Loads this rank's part, where it is not rank 0. Returns what computes that of each step, and
    the store of its parts of adapters. on_error: called in another thread, with what its device
    reports of a step."""
    config, gpu = start.config, _gpu_of(start.rank)
    assert start.board is not None, start
    ranks = _connected(start.rank, layout_of(config), start.store, start.board)
    executor = load_on_gpu(config, Path(config.model), gpu, ranks=ranks)
    ranks.everyone.barrier()
    ranks.wait_at_most(wait_limit_s(config))
    launched: queue.SimpleQueue[LaunchedStep] = queue.SimpleQueue()

    def watch() -> None:
        # An error of a device is that of the next call that waits for it; and rank 0, which then
        # waits for a step, sends no other one.
        try:
            if gpu.device.type == "cuda":
                torch.cuda.set_device(gpu.device)  # a thread has the first GPU, and takes memory
            while True:
                step = launched.get()
                step.wait_for_device()
                if step.stage_time is not None:
                    ranks.has_computed(step.step, step.stage_time.seconds)
        except BaseException as error:
            on_error(error)

    threading.Thread(target=watch, daemon=True).start()
    return lambda step: launched.put(executor.follow(step.batch, step.sampled)), executor.adapters


def check_offload(config: EngineConfig) -> None:
    """Raises InvalidConfig for a tier below the pools of several GPUs."""
    if flag := offload_flag(config):
        raise InvalidConfig(
            f"{flags_of(layout_of(config))} cannot be combined with {flag} on GPUs, as each "
            "rank would have to move its share of every block at the same step; leave one of the "
            "two out"
        )


def check_stages(layout: RankLayout, model: ModelConfig) -> None:
    """Raises InvalidConfig for a model that GPUs do not compute in stages."""
    if layout.num_stages > 1 and model.per_layer_inputs is not None:
        raise InvalidConfig(
            f"--pipeline-parallel-size {layout.num_stages}: stages on GPUs do not pass on what "
            "this model's per_layer_inputs are made of; use --tensor-parallel-size, or "
            "--device cpu"
        )


def check_num_gpus(layout: RankLayout, num_gpus: int) -> None:
    """Raises InvalidConfig where there are too few."""
    if num_gpus < layout.size:
        raise InvalidConfig(
            f"{flags_of(layout)} needs {layout.size} GPUs, one for each rank, and torch finds "
            f"{num_gpus} here; ask for fewer ranks, make more GPUs visible (CUDA_VISIBLE_DEVICES, "
            "docker run --gpus), or use --device cpu"
        )


def _shares_device() -> bool:
    return os.environ.get(SHARED_DEVICE) == "1"


def _gpu_of(rank: int) -> Gpu:
    if _shares_device():
        return CudaGpu(torch.device("cuda", 0)) if torch.cuda.is_available() else Interpreter()
    device = torch.device("cuda", rank)
    torch.cuda.set_device(device)
    return CudaGpu(device)


def _connected(
    rank: int, layout: RankLayout, store: int, board: int, followers: Followers | None = None
) -> TorchRanks:
    """Once all ranks are there. store, board: see `Start`. followers: whose end ends the waiting of
    rank 0."""
    rendezvous = Rendezvous(store, layout.size)
    rendezvous.arrive(rank)
    ends_s = time.monotonic() + START_TIMEOUT_S
    while not rendezvous.all_are_here():
        if followers is not None:
            followers.check()
        if time.monotonic() > ends_s:
            raise RankFailed(f"a rank did not start within {START_TIMEOUT_S:g} s", rank=rank)
        time.sleep(_LOOK_S)
    alone = not _shares_device()
    if followers is not None:
        followers.on_end(partial(_end, None, followers))  # to connect cannot be interrupted
    device = _gpu_of(rank).device
    ranks = TorchRanks(rendezvous, rank, device, Board(board), layout, alone=alone)
    ranks.wait_at_most(START_TIMEOUT_S)
    if followers is not None:
        followers.on_end(partial(_end, ranks, followers))
    return ranks


def _end(ranks: TorchRanks | None, followers: Followers, rank: int) -> None:
    """A rank has ended. ranks: None where they are not connected yet."""
    if ranks is not None:
        ranks.end(rank)
    if not _shares_device():
        threading.Thread(target=_leave, args=(ranks, followers), daemon=True).start()


def _leave(ranks: TorchRanks | None, followers: Followers) -> None:
    """Ends this process, unless that ends by itself, as its GPU waits no more."""
    closed = threading.Event()
    if ranks is not None:
        ranks.abort()
        closed = ranks.closed
    if closed.wait(_STOP_S):
        return
    try:
        followers.check()
    except RankFailed as error:
        logger.error("%s; this process ends too, as its GPU still waits for that rank", error)
    flush_all()
    os._exit(1)
