"""Connects the ranks of a model that several GPUs compute. Rank 0 has the first GPU that it sees;
rank i has the i-th.
"""

import logging
import os
import threading
import time
from functools import partial
from pathlib import Path

import torch

from penstock.engine.config import EngineConfig, GpuWay
from penstock.engine.executors.cuda.device import CudaGpu, Device, Interpreter
from penstock.engine.executors.followers import Followers, Start, layout_of
from penstock.engine.memory.tiers.offload import offload_flag
from penstock.engine.models.config import ModelConfig
from penstock.engine.process.logs import flush_all
from penstock.engine.ranks.board import Board, board_memory
from penstock.engine.ranks.group import RankFailed
from penstock.engine.ranks.layout import RankLayout
from penstock.engine.ranks.rendezvous import Rendezvous, rendezvous_memory
from penstock.engine.ranks.torch_ranks import TorchRanks
from penstock.scheduler.errors import InvalidConfig

logger = logging.getLogger(__name__)

# For tests: all ranks compute on one device, the first GPU or, where there is none, Triton's
# interpreter; slowly, since each sum passes the host.
SHARED_DEVICE = "PENSTOCK_RANKS_SHARE_DEVICE"
_LOOK_S = 0.02
# For a device to stop waiting for a rank that has ended.
_STOP_S = 10.0


def shared_by_gpus(config: EngineConfig) -> tuple[int, ...]:
    """Descriptors of what the ranks share, for `connected`. Raises InvalidConfig for what several
    GPUs do not compute."""
    layout = layout_of(config)
    check_offload(config)
    if config.gpu_way is GpuWay.TORCH:
        raise InvalidConfig(
            f"{layout.flags} cannot be combined with --gpu-way torch, by which one GPU computes a "
            "model; leave one of the two out"
        )
    check_stages(layout, ModelConfig.from_dir(Path(config.model)))
    if not _shares_device():
        check_num_gpus(layout, torch.cuda.device_count())
    return rendezvous_memory(), board_memory(layout.size)


def connected(
    start: Start, timeout_s: float, followers: Followers | None
) -> tuple[TorchRanks, Device]:
    """Where this rank is among all, once all are there, and its GPU. followers: whose end ends the
    waiting of rank 0. Raises RankFailed."""
    layout, (store, board) = start.layout, start.memory
    rendezvous = Rendezvous(store, layout.size)
    rendezvous.arrive(start.rank)
    ends_s = time.monotonic() + timeout_s
    while not rendezvous.all_are_here():
        if followers is not None:
            followers.check()
        if time.monotonic() > ends_s:
            raise RankFailed(f"a rank did not start within {timeout_s:g} s", rank=start.rank)
        time.sleep(_LOOK_S)
    if followers is not None:
        followers.on_end(partial(_end, None, followers))  # to connect cannot be interrupted
    gpu, alone = _gpu_of(start.rank), not _shares_device()
    ranks = TorchRanks(rendezvous, start.rank, gpu.device, Board(board), layout, alone=alone)
    ranks.wait_at_most(timeout_s)
    if followers is not None:
        followers.on_end(partial(_end, ranks, followers))
    return ranks, gpu


def check_offload(config: EngineConfig) -> None:
    """Raises InvalidConfig for a tier below the pools of several GPUs."""
    if flag := offload_flag(config):
        raise InvalidConfig(
            f"{layout_of(config).flags} cannot be combined with {flag} on GPUs, as each "
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
            f"{layout.flags} needs {layout.size} GPUs, one for each rank, and torch finds "
            f"{num_gpus} here; ask for fewer ranks, make more GPUs visible (CUDA_VISIBLE_DEVICES, "
            "docker run --gpus), or use --device cpu"
        )


def _shares_device() -> bool:
    return os.environ.get(SHARED_DEVICE) == "1"


def _gpu_of(rank: int) -> Device:
    if _shares_device():
        return CudaGpu(torch.device("cuda", 0)) if torch.cuda.is_available() else Interpreter()
    device = torch.device("cuda", rank)
    torch.cuda.set_device(device)
    return CudaGpu(device)


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
