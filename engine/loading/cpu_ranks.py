"""Starts a model that several processes compute on this machine's processors."""

import os
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from penstock.engine.config import EngineConfig, LoadFormat
from penstock.engine.executors.cpu import CpuExecutor
from penstock.engine.executors.first_rank import FirstRank, Own, causes
from penstock.engine.executors.followers import Followers, Start, Step
from penstock.engine.files.gguf.file import is_gguf
from penstock.engine.loading.cpu import load_on_cpu
from penstock.engine.loading.place import Place
from penstock.engine.loading.rank_pools import rank_pools
from penstock.engine.models.config import ModelConfig
from penstock.engine.models.division.shard import Shard
from penstock.engine.models.division.stage import Stage, num_passed
from penstock.engine.native.library import load_ranks_library
from penstock.engine.process.phases import Phases
from penstock.engine.ranks.layout import MAX_RANKS, RankLayout
from penstock.engine.ranks.link import LinkSize
from penstock.engine.ranks.membership import Membership, membership_bytes
from penstock.engine.ranks.shared_memory import shared_memory
from penstock.engine.step.executor import AdapterStore
from penstock.scheduler.errors import InvalidConfig

if TYPE_CHECKING:  # which torch.distributed loads
    from penstock.engine.ranks.torch_ranks import TorchRanks

# To read weights takes what the disk needs, and may have to wait for a compiler.
START_TIMEOUT_S = 3600.0


def build_parallel_executor(
    config: EngineConfig, phases: Phases, followers: Followers
) -> FirstRank[CpuExecutor]:
    """Tells the other ranks to begin, and loads this one's part. Raises PenstockError."""
    layout = layout_of(config)
    with phases.timed("ranks", f"meeting {layout.size - 1} more processes"):
        try:
            library = load_ranks_library()
        except (OSError, subprocess.SubprocessError) as error:
            raise InvalidConfig(
                f"{flags_of(layout)} needs a C++ compiler for what the ranks exchange; install g++ "
                f"({getattr(error, 'stderr', None) or error})"
            ) from error
        memory = shared_memory(membership_bytes(library, layout, link_size(config)))
        pools = () if config.kv_offload_dir is None else rank_pools(layout)
        followers.begin(config, memory, pools=pools)
        membership = join(config, memory, 0)
        os.close(memory)
        followers.on_end(membership.end)
    place = Place.on_cpu(membership, layout, pools)

    def load() -> CpuExecutor:
        executor = CpuExecutor(load_on_cpu(config, Path(config.model), phases, place))
        for pool in pools:
            os.close(pool)
        return executor

    return first_rank(config, followers, membership, load)


def first_rank(
    config: EngineConfig,
    followers: Followers,
    ranks: "Membership | TorchRanks",
    load: Callable[[], Own],
) -> FirstRank[Own]:
    """Loads rank 0's part while the others load theirs. Raises PenstockError."""
    followers.is_waiting = True
    try:
        with causes(followers):
            executor = load()
            ranks.everyone.barrier()
        followers.is_waiting = False
        ranks.wait_at_most(wait_limit_s(config))
        return FirstRank(executor, followers, ranks.close)
    except BaseException:
        followers.on_end(lambda _: None)
        ranks.close()
        followers.close()
        raise


def follow_on_cpu(start: Start) -> tuple[Callable[[Step], None], AdapterStore | None]:
    """Loads this rank's part, where it is not rank 0. Returns what computes that of each step, and
    the store of its parts of adapters."""
    config = start.config
    membership = join(config, start.store, start.rank)
    place = Place.on_cpu(membership, layout_of(config), start.pools)
    executor = CpuExecutor(load_on_cpu(config, Path(config.model), Phases(), place))
    membership.everyone.barrier()
    membership.wait_at_most(wait_limit_s(config))
    return lambda step: executor.follow(step.batch, step.sampled), executor.adapters


def layout_of(config: EngineConfig) -> RankLayout:
    return RankLayout(config.tensor_parallel_size, config.pipeline_parallel_size)


def join(config: EngineConfig, memory: int, rank: int) -> Membership:
    """memory: the descriptor of what all ranks share."""
    return Membership.join(
        load_ranks_library(),
        memory,
        layout_of(config),
        link_size(config),
        rank,
        timeout_s=START_TIMEOUT_S,
    )


def link_size(config: EngineConfig) -> LinkSize:
    """Between stages: room for the states, in float32, of as many steps as may be in flight."""
    model = ModelConfig.from_dir(Path(config.model))
    num_rows = num_passed(model) * config.scheduler.max_num_batched_tokens
    return LinkSize(config.pipeline_parallel_size, 4 * num_rows * model.hidden_size)


def wait_limit_s(config: EngineConfig) -> float:
    """For how long a rank waits for another in a step: less than the server waits for the engine,
    which does not know the rank."""
    return 0.75 * config.stall_timeout_s


def check_parallel(config: EngineConfig, model_dir: Path) -> None:
    """Raises InvalidConfig for what several ranks do not compute."""
    layout = layout_of(config)
    flag = flags_of(layout)
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
    is_read = config.load_format is not LoadFormat.DUMMY
    if layout.tensor_size > 1 and is_gguf(model_dir) and is_read:
        raise InvalidConfig(
            f"--tensor-parallel-size {layout.tensor_size}: the layers of a GGUF file cannot be "
            "split over ranks; use the model's safetensors, or --pipeline-parallel-size"
        )
    model = ModelConfig.from_dir(model_dir)
    if layout.tensor_size > 1:
        model = Shard(model, 0, layout.tensor_size).config
    if layout.num_stages > 1:
        Stage(model, 0, layout.num_stages)


def flags_of(layout: RankLayout) -> str:
    """That ask for so many ranks, for messages."""
    flags = []
    if layout.tensor_size > 1:
        flags.append(f"--tensor-parallel-size {layout.tensor_size}")
    if layout.num_stages > 1:
        flags.append(f"--pipeline-parallel-size {layout.num_stages}")
    return " with ".join(flags)
