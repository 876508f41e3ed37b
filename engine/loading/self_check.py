"""A GPU's check of itself at the start: that the way in which it is to compute gives what torch's
operators give.

The first layers of the model that has been loaded, one of each kind, serve some random prompts as
the whole will be served, CUDA graphs included; then torch computes the same tokens on the same
weights. Another result, a kernel that does not compile and a fault of the device are a
`GpuWayFailed`. A GPU that does not answer ends the process.
"""

import copy
import faulthandler
import logging
import math
import random
import signal
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import repeat
from typing import TypeAlias

import torch
from torch import Tensor
from triton.runtime.errors import OutOfResources

from penstock.engine.config import GpuWay
from penstock.engine.executors.cuda.executor import CudaExecutor
from penstock.engine.memory.pool.kv_pool import KVPools, PoolSize
from penstock.engine.models.decoder.model import LlamaModel
from penstock.engine.step.gpu_fault import GpuWayFailed, first_line
from penstock.engine.step.model_input import ModelInput
from penstock.scheduler.config import SchedulerConfig
from penstock.scheduler.errors import PenstockError
from penstock.scheduler.scheduler import Scheduler
from penstock.scheduler.types import (
    Request,
    RequestId,
    SampledTokens,
    SamplingParams,
    ScheduledBatch,
    TokenLogprobs,
)

logger = logging.getLogger(__name__)

# Together they take cuBLAS and one graph; decodes of all take the kernels for few rows.
_PROMPTS = (3, 20, 40)
_NUM_OUTPUTS = 4
_NUM_LOGPROBS = 20
# Of log probabilities, in standard deviations of a row's. In bfloat16 two layers are off by 0.013,
# in FP8 or where a router chooses another expert by up to 0.1; a wrong row of ten by 0.3 and more.
_TOLERANCE, _TOLERANCE_OF_FLOAT32 = 0.2, 0.01
# To compile the kernels of a step, on a busy machine; and for the device to compute a small one.
COMPILE_S, DEVICE_S = 600.0, 60.0

_DUMP_S = 0.5
_STDERR = 2

_Outputs: TypeAlias = "list[tuple[int, TokenLogprobs | None]]"


def first_layers(model: LlamaModel) -> LlamaModel:
    """The same weights, of the layers up to the first one of each kind, and of two at least."""
    layers = model.config.layers
    count = min(len(layers), max(2, *(1 + layers.index(kind) for kind in set(layers))))
    part = copy.copy(model)
    part.config, part.layers = model.config.part(range(count)), model.layers[:count]
    part.rotary = copy.copy(model.rotary)
    angles = model.rotary.layers
    part.rotary.layers = {index: angles[index] for index in range(count) if index in angles}
    return part


def checked_size(block_size: int, num_groups: int, max_model_len: int) -> PoolSize:
    """The pools that `check` needs: so many blocks, or states, for each prompt and one more."""
    most = (len(_PROMPTS) + 1) * (1 + -(-(max(_PROMPTS) + _NUM_OUTPUTS) // block_size))
    most = max(most, 3 * (len(_PROMPTS) + 1))
    return PoolSize(most, max_model_len, (most,) * (num_groups - 1))


@torch.inference_mode()
def check(executor: CudaExecutor, model: LlamaModel, way: GpuWay, limits: SchedulerConfig) -> None:
    """model: of the executor, whose pools are of `checked_size`. limits: of its steps. Raises
    GpuWayFailed."""
    longest, vocab_size = executor.info.max_model_len - _NUM_OUTPUTS, model.config.vocab_size
    if longest < 1:
        return
    chance = random.Random(0)
    prompts = [
        chance.choices(range(vocab_size), k=min(length, longest))
        for length in _PROMPTS[: limits.max_num_seqs]
    ]
    scheduler = SchedulerConfig(
        max_num_seqs=len(prompts), max_num_batched_tokens=min(64, limits.max_step_tokens)
    )
    _serve(
        executor, scheduler, prompts, None
    )  # compiles, and captures the graphs that are replayed then
    found = _serve(executor, scheduler, prompts, min(_NUM_LOGPROBS, vocab_size))
    logits = [
        _logits(model, executor.pool, [*prompt, *(token_id for token_id, _ in outputs[:-1])])
        for prompt, outputs in zip(prompts, found, strict=True)
    ]
    if not math.isfinite(max(float(each.abs().max()) for each in logits)):
        logger.warning("the GPU is not checked, as the model's first layers give no finite numbers")
        return
    below, differences = map(torch.cat, zip(*map(_compare, found, logits), strict=True))
    # The mean of all rows, as in one of them a router may choose another expert by rounding.
    error = max(float(each.square().mean().sqrt()) for each in (below, differences))
    is_wide = model.embedding.dtype is torch.float32
    limit = _TOLERANCE_OF_FLOAT32 if is_wide else _TOLERANCE
    logger.info("checked: %d layers, by %.4f of at most %g", len(model.layers), error, limit)
    if not error <= limit:
        raise GpuWayFailed(
            way,
            f"the first {len(model.layers)} layers give other logits than torch's operators: they "
            f"differ by {error:.2g} of their standard deviation, and at most {limit:g} is rounding",
        )


def _serve(
    executor: CudaExecutor,
    config: SchedulerConfig,
    prompts: Sequence[Sequence[int]],
    num_logprobs: int | None,
) -> list[_Outputs]:
    """Each prompt's outputs, all run together. num_logprobs: None where nothing is compiled yet."""
    info = executor.info
    scheduler = Scheduler(
        config,
        groups=info.kv_groups,
        block_size=info.block_size,
        max_model_len=max(map(len, prompts)) + _NUM_OUTPUTS,
    )
    sampling = SamplingParams(max_tokens=_NUM_OUTPUTS, temperature=0.0, num_logprobs=num_logprobs)
    found: dict[RequestId, _Outputs] = {}
    for index, prompt in enumerate(prompts):
        name = RequestId(str(index))
        found[name] = []
        scheduler.add(
            Request(id=name, prompt_token_ids=tuple(prompt), sampling=sampling, arrival_s=0.0)
        )
    while scheduler.has_work:
        batch = scheduler.schedule(0.0)
        assert batch, "all fit"
        for output in scheduler.update(run_step(executor, batch)):
            logprobs = output.logprobs or repeat(None)
            found[output.request_id] += zip(output.token_ids, logprobs, strict=False)
    return list(found.values())


def _logits(model: LlamaModel, pool: KVPools, token_ids: list[int]) -> Tensor:
    """By torch, those after the last tokens: (outputs, vocab_size)."""
    at, num_groups = torch.arange(len(token_ids)), len(pool.all_groups)
    blocks = torch.arange(-(-len(token_ids) // pool.block_size), dtype=torch.int32)
    kv_slots, tables = at.repeat(num_groups, 1), blocks.repeat(num_groups, 1, 1)
    step = ModelInput(
        token_ids=torch.tensor(token_ids),
        positions=at,
        kv_slots=kv_slots if num_groups > 1 else kv_slots[0],
        block_tables=tables if num_groups > 1 else tables[0],
        query_starts=[0, len(token_ids)],
        context_lens=[len(token_ids)],
        num_decodes=0,
        sample_rows=at[-_NUM_OUTPUTS:],
    )
    return model(step.to(model.embedding.device), pool).float()


def _compare(outputs: _Outputs, logits: Tensor) -> tuple[Tensor, Tensor]:
    """How far below the likeliest each id is, (outputs,), and how far off the log probabilities
    are, (outputs, logprobs), in standard deviations of each row of logits."""
    expected, spread = logits.log_softmax(-1), logits.std(-1, keepdim=True)

    def at(ids: list[list[int]]) -> Tensor:
        return expected.gather(1, torch.tensor(ids, device=logits.device))

    below = expected.amax(-1, keepdim=True) - at([[token_id] for token_id, _ in outputs])
    tops = [logprobs.top for _, logprobs in outputs if logprobs is not None]
    values = torch.tensor([[value for _, value in top] for top in tops], device=logits.device)
    differences = values - at([[token_id for token_id, _ in top] for top in tops])
    return (below / spread).squeeze(1), differences / spread


def run_step(
    executor: CudaExecutor, batch: ScheduledBatch, *, most_s: float = DEVICE_S
) -> SampledTokens:
    """most_s: that the device may take."""
    with deadline(COMPILE_S):
        launched = executor.execute(batch)
    with deadline(most_s):
        return launched.wait()


@contextmanager
def deadline(seconds: float) -> Iterator[None]:
    """Ends this process by `HUNG` where the context takes longer, whatever its threads wait for;
    the standard error then has where they do."""
    faulthandler.dump_traceback_later(seconds, file=_STDERR)
    before = signal.setitimer(signal.ITIMER_REAL, seconds + _DUMP_S)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, *before)
        faulthandler.cancel_dump_traceback_later()


@contextmanager
def failures(way: GpuWay) -> Iterator[None]:
    """What goes wrong with kernels in this context becomes GpuWayFailed; too little memory, and
    what a setting is to blame for, stays what it is."""
    try:
        yield
    except (PenstockError, OutOfResources):
        raise
    except Exception as error:
        if "out of memory" in str(error).lower():
            raise
        logger.exception("kernels cannot be compiled or run")
        raise GpuWayFailed(way, first_line(error)) from error
