"""`LoadedModel`: what a start gives to `CpuExecutor`."""

from collections.abc import Callable
from dataclasses import dataclass, field

from torch import Tensor

from penstock.engine.memory.pool.kv_pool import KVPools
from penstock.engine.memory.tiers.disk_tier import DiskTier
from penstock.engine.memory.tiers.pool_bytes import StepsInFlight
from penstock.engine.models.decoder.model import Model
from penstock.engine.models.lora.store import Adapters
from penstock.engine.native.model import NativeModel
from penstock.engine.ranks.group import Group, SoleRank
from penstock.engine.ranks.pipeline import Pipeline
from penstock.engine.sampling.grammar_table import GrammarTable
from penstock.engine.sampling.sampler import argmax
from penstock.engine.step.model_info import ModelInfo
from penstock.engine.step.model_input import ModelInput, build_model_input
from penstock.scheduler.types import ScheduledBatch

BuildInput = Callable[[ScheduledBatch, Tensor, Tensor, int], ModelInput]


@dataclass(slots=True, kw_only=True)
class LoadedModel:
    """native: the same as model where a step is compiled. build_input: as `build_model_input`.
    argmax: of logits, the likeliest ids. everyone, pipeline: the ranks that compute it."""

    model: Model
    pool: KVPools
    info: ModelInfo
    adapters: Adapters
    grammars: GrammarTable
    max_num_seqs: int
    tier: DiskTier | None = None
    steps_in_flight: StepsInFlight = field(default_factory=StepsInFlight)
    native: NativeModel | None = None
    build_input: BuildInput = build_model_input
    argmax: Callable[[Tensor], Tensor] = argmax
    everyone: Group = field(default_factory=SoleRank)
    pipeline: Pipeline = field(default_factory=Pipeline)
