"""`LoadedModel`: what an executor is made of."""

from collections.abc import Callable
from dataclasses import dataclass, field

from torch import Tensor

from penstock.engine.encoders.encoder import Encoder
from penstock.engine.memory.ledger import Ledger
from penstock.engine.memory.pool.kv_pool import KVPools
from penstock.engine.models.lora.store import Adapters
from penstock.engine.sampling.grammar_table import GrammarTable
from penstock.engine.step.model_info import ModelInfo


@dataclass(slots=True, kw_only=True)
class LoadedModel:
    """See `penstock.engine.executors.cpu.HostModel` and
    `penstock.engine.executors.cuda.executor.DeviceModel`. encoder: of images; None where text alone
    is taken. pooled: see `PromptReader`. ledger: of the device's memory."""

    pool: KVPools
    info: ModelInfo
    adapters: Adapters
    grammars: GrammarTable
    max_num_seqs: int
    encoder: Encoder | None = None
    pooled: Callable[[Tensor], Tensor] | None = None
    ledger: Ledger = field(default_factory=Ledger)
