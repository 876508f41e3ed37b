"""`TorchLoading`: a model of ours that torch's operators alone compute on a GPU.

Slower by several times: it is for a GPU, or a driver, on which all faster ways have failed
(`penstock.engine.config.GpuWay`).
"""

import logging

from penstock.engine.executors.cpu import HostModel
from penstock.engine.loading.devices import run_largest_step
from penstock.engine.loading.gpu import GpuLoading
from penstock.engine.memory.pool.kv_pool import KVPools, PoolSize
from penstock.engine.models.at_load.quantize import Quantized
from penstock.engine.models.decoder.on_device import OnDevice

logger = logging.getLogger(__name__)


class TorchLoading(GpuLoading):
    def plan(self) -> None:
        super().plan()
        self._padding_bytes = 0
        if self._offload is not None:
            self._offload = None
            logger.warning("--gpu-way torch moves no blocks of keys and values to the host")

    def read(self, quantized: Quantized | None) -> None:
        super().read(quantized)
        self._slots = None  # torch takes the same memory for adapters as they are loaded
        self._model = OnDevice(self.llama, self.device.device)

    def measure_step(self) -> int:
        with self.phases.timed("activations", "running the largest step"):
            scheduler, groups = self.config.scheduler, len(self.pools)
            pool = self._pool(PoolSize(1, self.longest, (1,) * (groups - 1)))
            run_largest_step(self._model, pool, scheduler, self.longest, self.block_size, groups)
            # Torch frees nothing by itself, so this is the peak.
            peak = self.device.used_bytes()
            del pool
            self.device.release()
            return max(0, peak - self.used)

    def complete(self, size: PoolSize) -> HostModel:
        logger.warning("torch's operators compute the model: slower than our kernels by far")
        return HostModel(
            model=self._model,
            pool=self._pool(size),
            info=self.info(size, computed_by="torch"),
            adapters=self.adapters(self.device.device),
            grammars=self._grammar_table,
            max_num_seqs=self.config.scheduler.max_num_seqs,
            ledger=self.ledger(size),
        )

    def _pool(self, size: PoolSize) -> KVPools:
        sizes = size.by_group, self.block_size, self.kv_type, self.device.device
        return KVPools(self.model.kv_shape, self.layout, *sizes)
