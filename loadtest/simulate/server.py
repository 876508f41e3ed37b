"""The simulated server, from flags: a calibrated one, or a model on a device by its datasheet."""

import argparse
from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

from penstock.engine.config import Dtype, EngineConfig, KVCacheDtype, Quantization
from penstock.engine.memory.pool.kv_layout import GroupPool, bytes_needed, divide
from penstock.engine.step.model_info import ModelInfo
from penstock.loadtest.calibrate.calibration import NO_FRONT_END, Calibration
from penstock.loadtest.calibrate.drafts import DraftsAssumed
from penstock.loadtest.calibrate.engine_flags import scheduler_config
from penstock.loadtest.command_line import require
from penstock.loadtest.simulate.replica import SimulatedServer
from penstock.scheduler.config import SchedulerConfig
from penstock.scheduler.errors import InvalidConfig

if TYPE_CHECKING:
    from penstock.engine.sizing.sizing import Sizing


# Flags of simulate and plan.
ACCEPTANCE = {
    "--acceptance SHARE ...": "of drafts of next tokens, by position, if those before it were "
    "accepted; 0: no drafts; default: as calibrated",
}


class NamedServer(NamedTuple):
    """name: the model's, for people. note: how far the step model can be trusted."""

    name: str
    server: SimulatedServer
    note: str


def check_source(args: argparse.Namespace, command: str) -> None:
    """Raises InvalidConfig unless one of the two sources of a server is given."""
    if (args.calibration is None) == (args.model_dir is None):
        raise InvalidConfig(
            "give either --calibration, a file of penstock calibrate, or a model's directory and "
            f"--device; see {command} --help"
        )


def simulated_server(args: argparse.Namespace) -> NamedServer:
    """Raises InvalidConfig, and InvalidModel for a directory that is none."""
    check_source(args, "penstock simulate")
    if args.calibration is not None:
        return calibrated_server(args)
    if args.device is None:
        raise InvalidConfig("give the --device on which the model would run, such as H200")
    scheduler, size = scheduler_config(args, SchedulerConfig()), args.tensor_parallel_size
    size = 1 if size is None else size
    return planned_server(args, args.device, None, scheduler, tensor_parallel_size=size)


def calibrated_server(args: argparse.Namespace) -> NamedServer:
    """The server of args.calibration, with the flags that were given. Raises InvalidConfig."""
    for flag in ("device", "memory_gb"):
        if getattr(args, flag) is not None:
            raise InvalidConfig(
                f"--{flag.replace('_', '-')} is for a model's directory; --calibration says what "
                "the device is"
            )
    if args.dtype != "auto" or args.kv_cache_dtype != "auto":
        raise InvalidConfig("--dtype and --kv-cache-dtype are those of --calibration; remove them")
    read = Calibration.read(args.calibration)
    scheduler, info = scheduler_config(args, read.scheduler), read.model
    size = args.tensor_parallel_size
    if size not in (None, info.tensor_parallel_size):
        raise InvalidConfig(
            f"--tensor-parallel-size is {size}, and --calibration was measured with "
            f"{info.tensor_parallel_size}, which says nothing of the sums of other ranks; remove "
            "it, or calibrate a server that has it"
        )
    if args.block_size is not None:
        raise InvalidConfig("--block-size is that of --calibration; remove it")
    longest = info.max_model_len if args.max_model_len is None else args.max_model_len
    if longest > info.max_model_len:
        raise InvalidConfig(
            f"--max-model-len is {longest}, and the calibrated model has {info.max_model_len}"
        )
    info = replace(info, max_model_len=longest)
    if args.kv_cache_memory_bytes is not None:
        info = _with_pools(info, args.kv_cache_memory_bytes, scheduler)
    worst = max((error.mape for error in read.step_model.errors.values()), default=1.0)
    note = f"calibrated on {read.source}; steps are off by {worst:.0%} at worst"
    drafts = _assumed_drafts(args.acceptance, info, read.drafts)
    server = SimulatedServer(
        info, read.step_model, scheduler, read.front_end, args.max_num_queued_reqs, drafts
    )
    return NamedServer(read.name, server, note)


def _assumed_drafts(
    acceptance: list[float] | None, info: ModelInfo, measured: DraftsAssumed | None
) -> DraftsAssumed | None:
    """acceptance: as given, else as measured. Raises InvalidConfig."""
    if acceptance is None:
        return measured
    for share in acceptance:
        require(0 <= share <= 1, "--acceptance", share, "from 0 to 1")
    if not any(acceptance):
        return None
    if not info.takes_drafts:
        raise InvalidConfig(
            "--acceptance is for a --calibration of a server whose steps have drafts"
        )
    return DraftsAssumed(tuple(acceptance), measured.found if measured else 1.0)


def planned_server(
    args: argparse.Namespace,
    device: str,
    quantization: str | None,
    scheduler: SchedulerConfig,
    *,
    tensor_parallel_size: int = 1,
) -> NamedServer:
    """args.model_dir on so many devices of a kind, by its datasheet. quantization: as the server's
    flag. Raises InvalidConfig, also for what a server refuses to split, and InvalidModel for a
    directory that is none."""
    # Not at the top: it imports torch, and a calibrated server does not need it.
    from penstock.engine.sizing.planned_model import planned_model

    planned = planned_model(
        _sizing(args, device, quantization, tensor_parallel_size),
        scheduler,
        tensor_parallel_size=tensor_parallel_size,
        max_model_len=args.max_model_len,
        block_size=args.block_size,
        kv_cache_memory_bytes=args.kv_cache_memory_bytes,
    )
    drafts = _assumed_drafts(args.acceptance, planned.info, None)
    server = SimulatedServer(
        planned.info, planned.step_model, scheduler, NO_FRONT_END, args.max_num_queued_reqs, drafts
    )
    source = "step times come from the datasheet"
    if tensor_parallel_size > 1:
        source = (
            "step times of several GPUs come from the datasheet and from what others measured of "
            "NCCL over such a link"
        )
    bias = max(error.bias for error in planned.step_model.errors.values())
    note = (
        f"{source}, and no measurement has confirmed them; the error bars assume "
        f"{bias * 100:.0f} %. The front end is not in the TTFT"
    )
    return NamedServer(args.model_dir.resolve().name, server, note)


def _sizing(
    args: argparse.Namespace, device: str, quantization: str | None, tensor_parallel_size: int
) -> "Sizing":
    """Returns the model on one device. Raises InvalidConfig and InvalidModel."""
    from penstock.engine.loading.ranks import check_parallel
    from penstock.engine.memory.dtypes import TORCH_DTYPES
    from penstock.engine.models.config import ModelConfig
    from penstock.engine.sizing.sizing import DEVICES, GB, Machine, Sizing

    memory_gb = args.memory_gb or dict(DEVICES).get(device)
    if memory_gb is None or memory_gb <= 0:
        raise InvalidConfig(f"give --memory-gb, the memory of a {device}, in GB")
    weights = None if quantization is None else Quantization(quantization)
    config = EngineConfig(
        model=str(args.model_dir),
        quantization=weights,
        tensor_parallel_size=tensor_parallel_size,
    )
    if tensor_parallel_size > 1:
        check_parallel(config, args.model_dir)
    dtype = Dtype.BFLOAT16 if args.dtype == Dtype.AUTO else Dtype(args.dtype)
    return Sizing(
        ModelConfig.from_dir(args.model_dir),
        Machine(name=device, memory_bytes=int(memory_gb * GB)),
        TORCH_DTYPES[dtype],
        weights,
        KVCacheDtype(args.kv_cache_dtype),
    )


def _with_pools(info: ModelInfo, num_bytes: int, scheduler: SchedulerConfig) -> ModelInfo:
    """With pools of keys and values, and of recurrent states, of this size. Raises InvalidConfig
    where it is too small."""
    token_bytes = [group.held_bytes for group in info.attention]
    if not info.more_blocks:
        token_bytes = [sum(token_bytes)]
    block_bytes = [each * info.block_size for each in token_bytes]
    if info.num_states:
        block_bytes.append(info.state_bytes)
    pools = [
        GroupPool(group, info.block_size, each)
        for group, each in zip(info.kv_groups, block_bytes, strict=True)
    ]
    needed = bytes_needed(pools, info.max_model_len)
    if num_bytes < needed:
        raise InvalidConfig(
            f"--kv-cache-memory-bytes is {num_bytes}, and one sequence of --max-model-len "
            f"{info.max_model_len} needs {needed}; raise the first or lower the second"
        )
    first, *more = divide(
        pools,
        num_bytes,
        max_model_len=info.max_model_len,
        max_num_seqs=scheduler.max_num_seqs,
        max_step_tokens=scheduler.max_step_tokens,
    )
    num_states = more.pop() if info.num_states else 0
    return replace(info, num_blocks=first, more_blocks=tuple(more), num_states=num_states)
