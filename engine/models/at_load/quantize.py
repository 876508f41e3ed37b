"""Quantization at load: a model's linear layers, rounded now or at an earlier start."""

import logging
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch

from penstock.engine.config import EngineConfig, LoadFormat, Quantization
from penstock.engine.memory.host import Arena
from penstock.engine.models.at_load.cache import (
    CacheWriter,
    cache_directory,
    find,
)
from penstock.engine.models.at_load.plan import Plan, Scheme
from penstock.engine.models.at_load.quality import Quality, compare, token_ids_of_text
from penstock.engine.models.at_load.rounding import (
    Allocate,
    Codes,
    NotRoundable,
    rounded,
)
from penstock.engine.models.at_load.weights import CodesOf, Part, QuantizedWeights
from penstock.engine.models.config import ModelConfig
from penstock.engine.models.division.shard import Shard
from penstock.engine.models.division.stage import Stage
from penstock.engine.models.errors import InvalidModel
from penstock.engine.models.formats.kept import CodePolicy
from penstock.engine.models.parts.per_layer_inputs.config import PROJECTION
from penstock.engine.models.parts.reader import WeightSource
from penstock.engine.models.weights import Checkpoint, RandomWeights
from penstock.engine.process.phases import Phases
from penstock.engine.step.model_info import QuantizationInfo
from penstock.scheduler.errors import InvalidConfig

logger = logging.getLogger(__name__)

_CPU = torch.device("cpu")


@dataclass(frozen=True, slots=True)
class Quantized:
    """The codes of a model, in memory or on disk, and what is known of them."""

    plan: Plan
    codes_of: CodesOf
    info: QuantizationInfo

    def of(self, plain: WeightSource, kept: CodePolicy) -> QuantizedWeights:
        """plain: gives what is not quantized, in the type in which it is served."""
        return QuantizedWeights(plain, self.plan.scheme.parts, self.codes_of, kept)


def quantization_plan(
    method: Quantization | None,
    model: ModelConfig,
    dtype: torch.dtype,
    kept: CodePolicy | None = None,
    stage: Stage | None = None,
) -> Plan | None:
    """None without --quantization. model: of a rank or a stage, its own. dtype, kept, stage: see
    `Plan.of`. Raises InvalidConfig for a model that nothing computes from codes."""
    if method is None:
        return None
    if stage is not None and stage.num_stages > 1 and model.per_layer_inputs is not None:
        raise InvalidConfig(
            f"--quantization is {method}, and a stage cannot round its own layers' rows of "
            f"{PROJECTION}; leave it out, or --pipeline-parallel-size"
        )
    first_layer = 0 if stage is None else stage.layers.start
    return Plan.of(Scheme(method, model, first_layer), dtype, kept, stage)


def quantize(
    config: EngineConfig,
    model_dir: Path,
    plan: Plan,
    phases: Phases,
    num_threads: int,
    device: torch.device = _CPU,
    kept: CodePolicy | None = None,
    shard: Shard | None = None,
    stage: Stage | None = None,
) -> Quantized:
    """Finds them in the cache, or makes them, one matrix at a time, and caches them.

    Of several ranks, each does so with its own part: the groups of int8 and int4 are those of the
    whole, where none is of two ranks; rows of FP8 that ranks divide get a scale in each of them.

    In this machine's memory are the quantized weights; on the device that rounds and compares, one
    layer or the output layer in float32: of a large model less than its unquantized weights take.
    kept: what computes the codes there, as in `QuantizedWeights`. shard, stage: of a rank. Raises
    InvalidModel.
    """
    torch.set_num_threads(num_threads)
    allocate = Arena().empty
    float32 = partial(torch.empty, dtype=torch.float32, device=device)
    if config.load_format is LoadFormat.DUMMY:
        rounder = Rounder(RandomWeights(float32, shard=shard), plan, allocate, phases, num_threads)
        rounder.round_all()
        return Quantized(plan, rounder, _info(plan, None))
    checkpoint, model = Checkpoint(model_dir, float32, shard=shard), plan.scheme.model

    def compared(codes_of: CodesOf) -> Quality:
        quantized = QuantizedWeights(checkpoint, plan.scheme.parts, codes_of, kept)
        return compare(model, checkpoint, quantized, token_ids, device)

    share = _share(shard, stage)
    # A rank alone cannot compute the model.
    token_ids = [] if share else token_ids_of_text(model_dir, model)
    rounder = Rounder(checkpoint, plan, allocate, phases, num_threads)
    return _cached(config, model_dir, rounder, share, compared if token_ids else None)


def _cached(
    config: EngineConfig,
    model_dir: Path,
    rounder: "Rounder",
    share: str,
    compared: Callable[[CodesOf], Quality] | None,
) -> Quantized:
    """Returns what is in the cache, or what it writes there. compared: None where there is no text
    to compare on. Raises InvalidModel."""
    plan = rounder.plan
    directory = cache_directory(model_dir, plan, share)
    codes_of: CodesOf
    if (stored := find(directory, plan, rounder.allocate)) is not None:
        logger.info("quantized weights: made at an earlier start, and kept in %s", directory)
        codes_of, quality = stored, stored.manifest.quality
        if config.quantization_report and compared is not None:
            what = "comparing the quantized model with the unquantized one"
            with rounder.phases.timed("quality", what):
                quality = compared(stored)
    else:
        with CacheWriter(directory, plan) as writer:
            codes_of, quality = rounder, rounder.round_all(compared, writer)
            kept_in = writer.finish(plan.scheme.method, model_dir, share, quality)
        rounder.log(kept_in)
    _log(plan, quality, is_long=config.quantization_report)
    return Quantized(plan, codes_of, _info(plan, quality))


class Rounder:
    """Rounds each part when it is first asked for, and keeps what it made."""

    def __init__(
        self,
        plain: WeightSource,
        plan: Plan,
        allocate: Allocate,
        phases: Phases,
        num_threads: int,
    ) -> None:
        """plain: in float32. phases: its current phase is advanced by the weights of each part."""
        self._plain = plain
        self.plan = plan
        self.phases = phases
        self._num_threads = num_threads
        self.allocate = allocate
        self._writer: CacheWriter | None = None
        self._made: dict[str, Codes] = {}
        self.seconds = 0.0  # of rounding alone

    def round_all(
        self,
        compared: Callable[[CodesOf], Quality] | None = None,
        writer: CacheWriter | None = None,
    ) -> Quality | None:
        """Rounds all parts, and returns what `compared` finds, which asks for every part, layer by
        layer. Raises InvalidModel."""
        plan, self._writer = self.plan, writer
        what = (
            f"rounding {plan.num_weights:.3g} weights to {plan.scheme.method}, "
            f"{plan.bits_per_weight:.2f} bits each with their scales"
        )
        with self.phases.timed("quantize", what, total=plan.num_weights, unit="weights"):
            quality = None if compared is None else compared(self)
            for part in plan.parts:
                self(part)
        return quality

    def log(self, kept_in: Path | None) -> None:
        """kept_in: where the cache is, if it could be written."""
        num_weights = self.plan.num_weights
        logger.info(
            "quantized %.3g weights in %.1f s of rounding, %.1f s per billion",
            num_weights,
            self.seconds,
            self.seconds / num_weights * 1e9,
        )
        if kept_in is not None:
            message = "quantized weights: kept in %s for the next start; it may be deleted"
            logger.info(message, kept_in)

    def __call__(self, part: Part) -> Codes:
        """Raises InvalidModel."""
        made = self._made.get(part.key)
        if made is None:
            made = self._made[part.key] = self._round(part)
            if self._writer is not None:
                self._writer.add(part, made)
            self.phases.advance(part.rows * part.in_features)
        return made

    def _round(self, part: Part) -> Codes:
        names = part.names
        if names == ("lm_head",) and self.plan.scheme.model.head.is_tied:
            names = ("model.embed_tokens",)
        weight = self._plain.read(part.shape, *(f"{name}.weight" for name in names))
        start = time.perf_counter()
        try:
            return rounded(weight, part.kind, self.allocate, self._num_threads)
        except NotRoundable:
            raise InvalidModel(
                f"the layer {' + '.join(names)} has weights that are NaN, infinite or more than "
                "millions, so --quantization cannot round them; download the model again, or "
                "leave the flag out"
            ) from None
        finally:
            self.seconds += time.perf_counter() - start


def _share(shard: Shard | None, stage: Stage | None) -> str:
    """Which part of the model a rank has; empty where it has all."""
    words = []
    if shard is not None and shard.size > 1:
        words.append(f"rank {shard.rank} of {shard.size}")
    if stage is not None and stage.num_stages > 1:
        words.append(f"stage {stage.index} of {stage.num_stages}")
    return ", ".join(words)


def _info(plan: Plan, quality: Quality | None) -> QuantizationInfo:
    names = ("num_tokens", "kl_divergence", "top1_agreement")
    return QuantizationInfo(
        method=plan.scheme.method.value,
        bits=plan.scheme.method.bits,
        bits_per_weight=plan.bits_per_weight,
        group_size=plan.group_size,
        **({} if quality is None else {name: getattr(quality, name) for name in names}),
    )


def _log(plan: Plan, quality: Quality | None, *, is_long: bool) -> None:
    """One line, or with is_long the report."""
    method = plan.scheme.method
    if quality is None:
        logger.info(
            "%s: not compared with the unquantized model, for which it takes a decoder, one "
            "process that has all of it, and a tokenizer.json for the text that is compared on",
            method,
        )
        return
    logger.info(
        "%s against the unquantized model: mean KL divergence %.2g, same likeliest token %.1f %%, "
        "over %d tokens",
        method,
        quality.kl_divergence,
        100 * quality.top1_agreement,
        quality.num_tokens,
    )
    if is_long:
        for line in _report(plan, quality):
            logger.info("quantization report: %s", line)


def _report(plan: Plan, quality: Quality) -> Iterator[str]:
    yield (
        f"KL divergence: mean {quality.kl_divergence:.3g}, "
        f"99th percentile {quality.kl_divergence_p99:.3g} nats"
    )
    yield f"same likeliest token: {100 * quality.top1_agreement:.2f} % of {quality.num_tokens}"
    yield (
        f"perplexity of the text: {quality.perplexity:.4g}, "
        f"unquantized {quality.unquantized_perplexity:.4g}"
    )
    for bits in (4, 8):
        parts = [part for part in plan.parts if part.kind.bits == bits]
        if parts:
            num_weights = sum(part.rows * part.in_features for part in parts)
            layers = sorted({name.rpartition(".")[2] for part in parts for name in part.names})
            yield f"{bits} bits: {num_weights:,} weights, in {', '.join(layers)}"
    yield f"bits per weight of these layers, scales included: {plan.bits_per_weight:.3f}"
    yield f"bytes that a decode step reads of weights: {plan.step_weight_bytes:,}"
