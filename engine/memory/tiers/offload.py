"""The tier on a disk that --kv-offload-dir, --kv-offload-gb and --kv-offload-disk-gb ask for."""

import logging
from pathlib import Path

from penstock.engine.config import EngineConfig
from penstock.engine.memory.tiers.block_files import BlockFiles
from penstock.engine.memory.tiers.disk_tier import BlockMemory, DiskTier
from penstock.scheduler.errors import InvalidConfig

logger = logging.getLogger(__name__)

DEFAULT_BYTES = 10 * 2**30


def block_files(config: EngineConfig, identity: bytes) -> BlockFiles | None:
    """Where the pool is in the host's memory: None without --kv-offload-dir. identity: see
    `BlockFiles`. Raises InvalidConfig."""
    if config.kv_offload_dir is None:
        if config.kv_offload_bytes is not None:
            raise InvalidConfig(
                "--kv-offload-gb is the limit of a directory where no GPU computes the model: name "
                "it with --kv-offload-dir, or leave the flag out"
            )
        return None
    if None not in (config.kv_offload_bytes, config.kv_offload_disk_bytes):
        raise InvalidConfig(
            "--kv-offload-gb and --kv-offload-disk-gb are both the limit of the directory where no "
            "GPU computes the model; leave one of them out"
        )
    return files_in(config.kv_offload_dir, config, identity, config.kv_offload_bytes)


def files_in(
    directory: str, config: EngineConfig, identity: bytes, limit_bytes: int | None = None
) -> BlockFiles:
    """limit_bytes: where --kv-offload-disk-gb does not say. Raises InvalidConfig."""
    limit_bytes = config.kv_offload_disk_bytes or limit_bytes or DEFAULT_BYTES
    return BlockFiles(Path(directory).expanduser(), identity, limit_bytes)


def disk_tier(files: BlockFiles, memory: BlockMemory) -> DiskTier:
    """Raises InvalidConfig where the directory cannot be written."""
    tier = DiskTier(files, memory, files.measure_read())
    stats = tier.place_stats()
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
    if flag := offload_flag(config):
        raise InvalidConfig(
            f"{flag} is not supported for a model that is computed {of}, only for those that "
            "Penstock's own implementations compute; leave the flag out"
        )


def offload_flag(config: EngineConfig) -> str | None:
    """The flag that asks for a tier; None where none does."""
    if config.kv_offload_dir is not None:
        return "--kv-offload-dir"
    return None if config.kv_offload_bytes is None else "--kv-offload-gb"
