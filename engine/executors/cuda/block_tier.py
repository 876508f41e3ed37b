"""The tiers of `--kv-offload-gb` and `--kv-offload-dir` on a GPU: host memory, then a disk."""

import logging
from collections.abc import Sequence
from operator import mul

from penstock.engine.config import EngineConfig
from penstock.engine.executors.cuda.device import Device
from penstock.engine.executors.cuda.pool_mover import STAGING_BYTES, PoolMover, pin
from penstock.engine.memory.machine import available_memory_bytes
from penstock.engine.memory.pool.kv_layout import GroupPool
from penstock.engine.memory.pool.kv_pool import KVPools
from penstock.engine.memory.tiers.block_files import BlockFiles
from penstock.engine.memory.tiers.host_pieces import HostPieces
from penstock.engine.memory.tiers.host_tier import HostTier
from penstock.engine.memory.tiers.offload import DEFAULT_BYTES, disk_tier, files_in
from penstock.scheduler.errors import InvalidConfig

logger = logging.getLogger(__name__)

# Where only a directory is asked for: of the memory that is free at the start.
_DEFAULT_SHARE = 0.25


class GpuOffload:
    """Sized before anything is loaded, so that what does not fit is reported at once."""

    def __init__(
        self, pools: Sequence[GroupPool], num_slots: Sequence[int], files: BlockFiles | None
    ) -> None:
        """num_slots: of each group of layers."""
        self._num_slots = num_slots
        self._files = files
        self._block_bytes = [pool.block_bytes for pool in pools]
        self._num_bytes = sum(map(mul, num_slots, self._block_bytes))
        self._staging = min(STAGING_BYTES, self._num_bytes)
        self.staging_bytes = 2 * max(self._staging, *self._block_bytes)
        """How much of the GPU's memory it takes."""

    @classmethod
    def of(
        cls, config: EngineConfig, pools: Sequence[GroupPool], identity: bytes
    ) -> "GpuOffload | None":
        """None where it is not asked for. identity: see `BlockFiles`. Raises InvalidConfig."""
        directory, wanted = config.kv_offload_dir, config.kv_offload_bytes
        if directory is None and wanted is None:
            return None
        available = available_memory_bytes()
        if wanted is None:
            wanted = min(DEFAULT_BYTES, int(_DEFAULT_SHARE * available))
        if wanted > available:
            raise InvalidConfig(
                f"--kv-offload-gb {wanted / 2**30:g} is of this machine's memory, of which "
                f"{available / 2**30:.2f} GiB are free; set it to less than that"
            )
        least = sum(pool.block_bytes for pool in pools)
        # Of each group one, and of what is left as many as conversations have.
        of_each = sum(pool.num_below * pool.block_bytes for pool in pools)
        num_more = (wanted - least) / of_each
        if num_more < 0:
            raise InvalidConfig(
                f"--kv-offload-gb {wanted / 2**30:g} has no room for one block of this model, of "
                f"{least} bytes; raise it, or lower --block-size"
            )
        num_slots = [1 + int(num_more * pool.num_below) for pool in pools]
        files = None if directory is None else files_in(directory, config, identity)
        return cls(pools, num_slots, files)

    def tier(self, pools: KVPools, gpu: Device) -> HostTier:
        """After graphs were captured: pinning in a thread would break that. Raises InvalidConfig
        where no memory can be pinned."""
        on_gpu = gpu.device.type == "cuda"
        mover = PoolMover(pools, self._staging, gpu.device)
        assert mover.piece_bytes == self._block_bytes, (mover.piece_bytes, self._block_bytes)
        pieces = HostPieces(mover.piece_bytes, self._num_slots, pin if on_gpu else None)
        try:
            pieces.grow()
        except RuntimeError as error:
            raise InvalidConfig(
                f"--kv-offload-gb: the host's memory cannot be pinned for the GPU ({error}); allow "
                "it with ulimit -l unlimited or docker run --ulimit memlock=-1, or leave the flag "
                "out"
            ) from error
        mover.use(pieces)
        mover.warm_up()
        to_host, to_device = mover.measure()
        disk = None if self._files is None else disk_tier(self._files, pieces)
        logger.info(
            "blocks of keys and values in the host's memory: room for %s, %.2f GiB; they are "
            "copied there at %.1f GB/s and back at %.1f GB/s",
            " and ".join(map(str, self._num_slots)),
            self._num_bytes / 2**30,
            to_host / 1e9,
            to_device / 1e9,
        )
        # Triton's interpreter runs kernels in one thread alone.
        return HostTier(mover, pieces, to_device, disk, has_threads=on_gpu)
