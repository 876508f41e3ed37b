"""What --kv-offload-dir and --kv-offload-gb ask for."""

import logging
from pathlib import Path

from penstock.engine.config import EngineConfig
from penstock.engine.memory.block_files import BlockFiles
from penstock.engine.memory.disk_tier import BlockMemory, DiskTier
from penstock.scheduler.errors import InvalidConfig

logger = logging.getLogger(__name__)

_DEFAULT_BYTES = 10 * 2**30


def block_files(config: EngineConfig, identity: bytes) -> BlockFiles | None:
    """None without --kv-offload-dir. identity: see `BlockFiles`. Raises InvalidConfig."""
    if config.kv_offload_dir is None:
        return None
    directory = Path(config.kv_offload_dir).expanduser()
    return BlockFiles(directory, identity, config.kv_offload_bytes or _DEFAULT_BYTES)


def disk_tier(files: BlockFiles, memory: BlockMemory) -> DiskTier:
    """Raises InvalidConfig where the directory cannot be written."""
    tier = DiskTier(files, memory, files.measure_read())
    stats = tier.stats()
    logger.info(
        "blocks of keys and values that an earlier server wrote to %s: %d; all files there take "
        "%.2f GiB of %.2f",
        files.directory,
        stats.num_blocks,
        stats.num_bytes / 2**30,
        files.limit_bytes / 2**30,
    )
    return tier


def refuse_offload(config: EngineConfig, of: str) -> None:
    """For executors without it. of: what they compute with. Raises InvalidConfig."""
    if config.kv_offload_dir is not None:
        raise InvalidConfig(
            f"--kv-offload-dir is not supported for a model that is computed {of}, only for those "
            "that Penstock's own implementations compute on the CPU; leave the flag out"
        )


def refuse_with_states(config: EngineConfig) -> None:
    """For a model with recurrent states: without the state after them, the blocks of a prompt's
    beginning are of no use. Raises InvalidConfig."""
    flags = {"--kv-offload-dir": config.kv_offload_dir, "--kv-events-config": config.kv_events}
    for flag, value in flags.items():
        if value is not None:
            raise InvalidConfig(
                f"{flag} is not supported for {config.model}: it has layers with a recurrent "
                "state, which is neither written to files nor told of; leave the flag out"
            )
