"""`DraftedLoading`: a model in the memory of a processor, and beside it a smaller one that proposes
its next tokens (`penstock.engine.drafting.draft_model`)."""

import logging
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from penstock.engine.config import DraftMethod, EngineConfig, LoadFormat, SpeculativeConfig
from penstock.engine.drafting.draft_model import DraftModel, num_spare_blocks
from penstock.engine.drafting.proposer import MakeProposer
from penstock.engine.errors import InvalidModel
from penstock.engine.executors.cpu import HostModel
from penstock.engine.executors.loaded_model import LoadedModel
from penstock.engine.loading.cpu import CpuLoading
from penstock.engine.memory.pool.kv_layout import KVLayout
from penstock.engine.memory.pool.kv_pool import KVPools, PoolSize
from penstock.engine.native.inputs import gather_input
from penstock.scheduler.errors import InvalidConfig

logger = logging.getLogger(__name__)

_NOT_OF_DRAFTS: dict[str, Any] = {
    **dict.fromkeys(("quantization_report", "takes_images"), False),
    "max_model_len": None,
    **dict.fromkeys(("speculative", "lora", "kv_memory", "kv_offload_dir", "kv_offload_bytes")),
    "kv_offload_disk_bytes": None,
}


def load_with_own_draft(config: EngineConfig, directory: Path, *others: Any) -> LoadedModel | None:
    """The model with the one in its folder draft/, which nobody asked for: None where there is
    none, where drafts are set otherwise, or where that cannot be used, as without a compiler."""
    own = directory / "draft"
    is_set = config.speculative is not None or config.load_format is LoadFormat.DUMMY
    if is_set or not (own / "config.json").is_file():
        return None
    speculative = SpeculativeConfig(method=DraftMethod.DRAFT_MODEL, model=str(own))
    try:
        return DraftedLoading(replace(config, speculative=speculative), directory, *others).load()
    except (InvalidConfig, InvalidModel) as error:
        logger.info("starts without the draft model in %s: %s", own, error)
        return None


class DraftedLoading(CpuLoading):
    """Each block of the larger model has one of the smaller model beside it."""

    def __init__(self, config: EngineConfig, *others: Any) -> None:
        super().__init__(config, *others)
        wanted = config.speculative
        assert wanted is not None and wanted.model is not None
        of_draft: dict[str, Any] = {"model": wanted.model, "quantization": wanted.quantization}
        settings = replace(config, block_size=self.block_size, **of_draft, **_NOT_OF_DRAFTS)
        self._draft = _DraftLoading(settings, Path(wanted.model), None, self.device, self.phases)
        self._draft.most = wanted.num_speculative_tokens

    def plan_pool(self) -> None:
        super().plan_pool()
        if self.layout.windows[0] is not None:
            raise InvalidConfig(
                f"--speculative-config names a model, and all layers of {self.config.model} have a "
                "sliding window: a draft model needs the blocks of whole sequences; leave it out"
            )
        self._draft.plan_beside(self.whole.vocab_size)
        first, *others = self.largest_pools
        block_bytes = first.block_bytes + self._draft.block_bytes
        self.largest_pools = [replace(first, block_bytes=block_bytes), *others]
        self.bytes_beside = self._draft.num_bytes(0)

    def load(self) -> HostModel:
        loaded = super().load()
        assert isinstance(loaded, HostModel)
        loaded.make_proposer = self._draft.load_beside(self._size)
        loaded.info = replace(loaded.info, proposes=DraftModel.name)
        loaded.ledger.draft_model = self._draft.num_bytes(self._size.num_blocks)
        return loaded


class _DraftLoading(CpuLoading):
    """The smaller model. most: drafts of a sequence."""

    most = 0

    def plan_beside(self, vocab_size: int) -> None:
        """vocab_size: of the larger model. Raises InvalidConfig."""
        if self.whole.vocab_size != vocab_size:
            raise self._refusal(
                f"has a vocabulary of {self.whole.vocab_size} ids, and the served model one of "
                f"{vocab_size}; name one with the same tokenizer"
            )
        if any(self.whole.recurrent):
            raise self._refusal(
                "has recurrent layers, which cannot go back to the last accepted token; name one "
                "without"
            )
        self.plan_model()

    def plan_pool(self) -> None:
        """All layers share a pool, since its block tables are those of whole sequences."""
        super().plan_pool()
        self.layout = KVLayout((None,), (0,) * self.model.num_layers)
        sizes = self.block_size, self.kv_type.itemsize
        self.pools = self.layout.pools(self.model.kv_shape, *sizes)

    @property
    def block_bytes(self) -> int:
        return self.pools[0].block_bytes

    def num_bytes(self, num_blocks: int) -> int:
        """Of its weights, and of so many blocks and those that are spare."""
        return (self.num_weight_bytes or 0) + (num_blocks + self._num_spare) * self.block_bytes

    @property
    def _num_spare(self) -> int:
        each = num_spare_blocks(self.most, self.block_size)
        return each * self.config.scheduler.max_num_seqs

    def load_beside(self, size: PoolSize) -> MakeProposer:
        """size: of the larger model's pool. Raises InvalidConfig."""
        longest = min(size.max_model_len, self.model.max_model_len)
        self._size = PoolSize(size.num_blocks + self._num_spare, longest)
        quantized = self.quantize()
        with self.phases.timed("draft_model", self.reading, total=self.num_weight_bytes):
            self.read(quantized)
        sizes, cpu = (self._size.by_group, self.block_size), torch.device("cpu")
        pool = KVPools(self.model.kv_shape, self.layout, *sizes, self.kv_type, cpu)
        native = self._native(pool)
        if native is None or self._library is None:
            raise self._refusal("is one that the compiled step cannot compute, as the log says")
        return partial(
            DraftModel,
            model=native,
            pool=pool,
            build_input=partial(gather_input, self._library),
            vocab_size=self.whole.vocab_size,
            num_blocks=size.num_blocks,
            block_size=self.block_size,
            max_model_len=longest,
            most=self.most,
        )

    def _refusal(self, why: str) -> InvalidConfig:
        return InvalidConfig(f"--speculative-config: the draft model {self.config.model} {why}")
