"""Steps of a device whose coefficients are known, for tests of step models."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from random import Random

from penstock.engine.executors.scripted import scripted_info
from penstock.engine.step.model_info import ModelInfo
from penstock.scheduler.stats import NO_GRAPHS, GraphSizes, StepClass
from penstock.scheduler.step_model.amounts import Amounts, AttentionGroup
from penstock.scheduler.step_model.model import StepModel
from penstock.scheduler.step_model.samples import StepSample, sample_of

KV_BYTES = 1000  # of a position
FLOPS_PER_PAIR = 2000
# Seconds: a step, a byte of weights, tokens below and above the knee, bytes of decodes and of
# chunks, operations, sequences, chunks, sampled rows.
DEVICE = (1e-3, 0.0, 2e-6, 2e-5, 3e-10, 1e-10, 1e-11, 5e-6, 3e-5, 0.0)
HOST = (2e-4, 1e-6, 2e-5, 1e-7)
KNEE = 16


def known_model(*, runs_ahead: bool) -> StepModel:
    return StepModel(device=DEVICE, host=HOST, knee=KNEE, runs_ahead=runs_ahead)


def made_up_amounts(
    random: Random, *, max_sequences: int = 64, max_context: int = 2000
) -> tuple[StepClass, Amounts]:
    """A step of any class."""
    kind = random.choice(list(StepClass))
    decodes = 0 if kind is StepClass.PREFILL else random.randint(1, max_sequences)
    chunks = 0 if kind is StepClass.DECODE else random.randint(1, 4)
    chunk_tokens = chunks * random.randint(1, 256)
    context = sum(random.randint(1, max_context) for _ in range(decodes))
    before = random.randint(0, 500) * chunks
    return kind, Amounts(
        tokens=decodes + chunk_tokens,
        weight_bytes=10_000_000,
        decode_kv_bytes=KV_BYTES * context,
        prefill_kv_bytes=KV_BYTES * (before + chunk_tokens),
        attention_flops=FLOPS_PER_PAIR * chunk_tokens * (before + chunk_tokens) // 2,
        sequences=decodes + chunks,
        chunks=chunks,
        sampled=decodes + chunks,
        prefill_tokens=chunk_tokens,
    )


def made_up_steps(
    num: int,
    *,
    seed: int = 0,
    runs_ahead: bool = False,
    noise: Callable[[Random], float] = lambda _: 1.0,
    max_sequences: int = 64,
) -> Iterator[StepSample]:
    """noise: the factor from the known model's times to those that are measured."""
    random, model = Random(seed), known_model(runs_ahead=runs_ahead)
    for number in range(num):
        kind, amounts = made_up_amounts(random, max_sequences=max_sequences)
        device_s, host_s = (seconds * noise(random) for seconds in model.time_of(amounts))
        wait_s = max(0.0, device_s - host_s) if runs_ahead else device_s
        yield sample_of(number, kind, amounts, wait_s=wait_s, host_s=host_s, runs_ahead=runs_ahead)


def served_model(
    *, runs_ahead: bool = False, window: int | None = None, graph_sizes: GraphSizes = NO_GRAPHS
) -> ModelInfo:
    """The model whose steps these are; its attention reaches back `window` positions."""
    group = AttentionGroup(
        window=window, kv_bytes_per_token=KV_BYTES, flops_per_pair=FLOPS_PER_PAIR
    )
    info = scripted_info(num_blocks=4096, max_model_len=32_768)
    return replace(
        info,
        attention=(group,),
        weight_bytes=10_000_000,
        runs_ahead=runs_ahead,
        graph_sizes=graph_sizes,
    )
