"""`MtpLoading`: a model in the memory of a processor, and the head of its checkpoint that proposes
its next tokens (`penstock.engine.drafting.mtp`)."""

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from penstock.engine.config import LoadFormat, SpeculativeConfig
from penstock.engine.drafting.mtp import MOST_KEPT, MOST_ROWS, MtpProposer, num_spare_blocks
from penstock.engine.executors.cpu import HostModel
from penstock.engine.executors.loaded_model import LoadedModel
from penstock.engine.files.gguf.file import is_gguf
from penstock.engine.loading.cpu import CpuLoading
from penstock.engine.loading.weights import weight_source
from penstock.engine.memory.host import Arena
from penstock.engine.memory.pool.kv_layout import KVLayout
from penstock.engine.memory.pool.kv_pool import KVPools
from penstock.engine.models.at_load.plan import Plan, Scheme
from penstock.engine.models.at_load.quantize import Rounder
from penstock.engine.models.at_load.weights import QuantizedWeights
from penstock.engine.models.decoder.mtp import (
    HeadWeights,
    MtpHead,
    head_config,
    head_weights,
    lacks_head,
)
from penstock.engine.models.parts.reader import WeightSource
from penstock.engine.models.weights import Checkpoint
from penstock.engine.native.model import NativeModel

_LAYOUT = KVLayout((None,), (0,))


def why_no_head(directory: Path, load_format: LoadFormat) -> str | None:
    """Says in words why this checkpoint has no head that proposes; None where it has one."""
    if load_format is LoadFormat.DUMMY or is_gguf(directory):
        return "weights that are made up, or of a GGUF file, have no such head"
    return lacks_head(directory)


class MtpLoading(CpuLoading):
    """Each block of the model has one of the head beside it, so that there are fewer of both."""

    has_head = True

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        wanted = self.config.speculative or SpeculativeConfig()
        self._most = wanted.num_speculative_tokens
        self._head = head_config(self.model)
        self._num_spare = num_spare_blocks(self._most, self.block_size)

    def plan_pool(self) -> None:
        super().plan_pool()
        sizes = self.block_size, self.kv_type.itemsize
        self._block_bytes = _LAYOUT.pools(self._head.kv_shape, *sizes)[0].block_bytes
        if self._library is None:
            return
        first, *others = self.largest_pools
        both = first.block_bytes + self._block_bytes
        self.largest_pools = [replace(first, block_bytes=both), *others]
        self.bytes_beside = head_weights(self._head) * self.dtype.itemsize + self._other_bytes

    @property
    def _other_bytes(self) -> int:
        """Of spare blocks, and of the states that are kept."""
        kept = MOST_ROWS * MOST_KEPT * self.model.hidden_size * self.dtype.itemsize
        return self._num_spare * self._block_bytes + kept

    def load(self) -> LoadedModel:
        loaded = super().load()
        assert isinstance(loaded, HostModel)
        if loaded.native is None or self._library is None:
            return loaded
        num_blocks = loaded.info.num_blocks
        sizes = (num_blocks + self._num_spare,), self.block_size
        cpu = torch.device("cpu")
        pool = KVPools(self._head.kv_shape, _LAYOUT, *sizes, self.kv_type, cpu)
        with self.phases.timed("draft_model", "reading the head that proposes next tokens"):
            head = MtpHead(self.llama, self._weights(), make_linear=self.make_linear)
        num_bytes = head.own_bytes
        native = NativeModel(self._library, head, pool, self.num_threads, loaded.native)
        loaded.make_proposer = partial(
            MtpProposer,
            head=native,
            pool=pool,
            num_blocks=num_blocks,
            block_size=self.block_size,
            most=self._most,
            hidden_size=self.model.hidden_size,
            vocab_size=self.whole.vocab_size,
            dtype=self.dtype,
        )
        loaded.info = replace(loaded.info, proposes=MtpProposer.name)
        loaded.ledger.draft_model = num_bytes + num_blocks * self._block_bytes + self._other_bytes
        return loaded

    def _weights(self) -> WeightSource:
        empty = partial(Arena().empty, dtype=self.dtype)
        source: WeightSource = HeadWeights(
            weight_source(
                self.config.load_format,
                self.directory,
                self._head,
                empty,
                self.phases,
                make_linear=self.make_linear,
                kept=self.kept,
            )
        )
        if self.config.quantization is None:
            return source
        plan = Plan.of(Scheme(self.config.quantization, self._head), self.dtype)
        plain = Checkpoint(self.directory, partial(torch.empty, dtype=torch.float32))
        rounder = Rounder(HeadWeights(plain), plan, Arena().empty, self.phases, self.num_threads)
        return QuantizedWeights(source, plan.scheme.parts, rounder, self.kept)
