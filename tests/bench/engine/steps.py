"""Decode steps by batch and context, and the time to a first token, through `CudaExecutor`.

The pool has the keys and values of a prompt in every block: zeros would be read faster.
"""

import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from enum import StrEnum

import torch
from torch.profiler import ProfilerActivity, profile

from penstock.engine.config import AttentionBackend, Quantization, SpeculativeConfig
from penstock.engine.executors.cuda.executor import CudaExecutor
from penstock.engine.kernels.launch import overlap, overlapped
from penstock.engine.loading import prefill
from tests.bench.engine.driver import Driver
from tests.bench.engine.executors import build_executor
from tests.bench.engine.models import model_dir
from tests.bench.engine.timing import report

_PROFILED_STEPS = 2
_DRAFTS = (1, 3, 7)


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """num_steps: timed of each point, after warm_steps. first_prompt: tokens before a first one.
    prompts: of PREFILL, each in one chunk. goals: the batch and the context of each point that a
    goal names.

    overlap_batches: at which decoding is timed again with kernels that start one by one.
    """

    batches: tuple[int, ...]
    contexts: tuple[int, ...]
    goals: tuple[tuple[int, int], ...]
    profiled_batches: tuple[int, ...]
    overlap_batches: tuple[int, ...]
    coded_batches: tuple[int, ...]
    warm_steps: int
    num_steps: int
    max_batched_tokens: int
    first_prompt: int
    first_repeats: int
    prompts: tuple[int, ...]
    drafted_batches: tuple[int, ...]


FULL = Sizes(
    batches=(1, 2, 4, 8, 16, 32, 64, 128, 256, 512),
    contexts=(512, 1024, 2048, 8192),
    goals=((1, 512), (256, 1024)),
    profiled_batches=(1, 64),
    overlap_batches=(1, 8, 64),
    coded_batches=(1, 16, 64, 256),
    warm_steps=6,
    num_steps=40,
    max_batched_tokens=8192,
    first_prompt=1024,
    first_repeats=20,
    prompts=(1024, 8192),
    drafted_batches=(1, 4, 16),
)
TINY = Sizes(
    batches=(2, 5),
    contexts=(150,),
    goals=((2, 150),),
    profiled_batches=(1,),
    overlap_batches=(1,),
    coded_batches=(1,),
    warm_steps=2,
    num_steps=2,
    max_batched_tokens=32,
    first_prompt=8,
    first_repeats=1,
    prompts=(8, 24),
    drafted_batches=(2,),
)


class Points(StrEnum):
    """What is measured. GOALS: the points of the table of goals, and the time to a first token.
    CODES: one context at batches that take each path through a layer of codes. PREFILL: the times
    to a first token of longer prompts too, and what computed their attention. DRAFTS: steps in
    which each sequence has drafts, and whether these are accepted where they are right."""

    GOALS = "goals"
    SWEEP = "sweep"
    OVERLAP = "overlap"
    CODES = "codes"
    PREFILL = "prefill"
    DRAFTS = "drafts"


def measure_steps(
    model: str,
    tiny: bool,
    points: Points,
    enforce_eager: bool,
    quantization: Quantization | None = None,
    attention_backend: AttentionBackend = AttentionBackend.AUTO,
) -> None:
    sizes = TINY if tiny else FULL
    at = [(batch, context) for context in sizes.contexts for batch in sizes.batches]
    if points is Points.GOALS:
        at = list(sizes.goals)
    elif points is Points.CODES:
        at = [(batch, sizes.contexts[0]) for batch in sizes.coded_batches]
    elif points is Points.OVERLAP:
        at = [(batch, sizes.contexts[0]) for batch in sizes.overlap_batches]
    elif points is Points.PREFILL:
        at = [(1, max(sizes.prompts))]
    elif points is Points.DRAFTS:
        at = [(batch, sizes.contexts[0]) for batch in sizes.drafted_batches]
    room = sizes.warm_steps + sizes.num_steps + 1
    if points is Points.DRAFTS:
        room += 2 * max(_DRAFTS) + 4
    start = time.perf_counter()
    with model_dir(model, tiny) as directory, _prefill_log() as lines:
        executor = build_executor(
            directory,
            max_model_len=max(sizes.first_prompt, *(context for _, context in at)) + room,
            max_num_seqs=max(batch for batch, _ in at),
            max_num_batched_tokens=sizes.max_batched_tokens,
            enforce_eager=enforce_eager,
            quantization=quantization,
            attention_backend=attention_backend,
            speculative=SpeculativeConfig() if points is Points.DRAFTS else None,
        )
    info = executor.info
    report(
        part="load",
        model=model,
        seconds=time.perf_counter() - start,
        phases=info.load_seconds,
        num_blocks=info.num_blocks,
        block_size=info.block_size,
        weight_bytes=info.weight_bytes,
        overlaps=overlapped()["PDL"],
        graphs=not enforce_eager,
    )
    driver = Driver(executor)
    driver.fill(sizes.max_batched_tokens)
    if points is Points.OVERLAP:
        _compare_overlap(executor, driver, model, sizes)
        return
    if points is Points.DRAFTS:
        for batch, context in at:
            _measure_drafts(driver, model, batch, context, sizes)
        return
    if points is Points.PREFILL:
        for prompt in sizes.prompts:
            ms = 1e3 * driver.seconds_to_first_token(prompt, sizes.first_repeats)
            of = {"model": model, "prompt": prompt, "attention_backend": attention_backend}
            report(part="prefill ttft", **of, chosen=lines, ttft_ms=ms)
        return
    if points is Points.GOALS:
        _measure_first_token(driver, model, sizes)
    for batch, context in at:
        _measure_decode(driver, model, batch, context, sizes)
    if points in (Points.GOALS, Points.CODES):
        return
    # At the end: the profiler slows launches for as long as the process lives.
    for batch in sizes.profiled_batches:
        driver.begin(batch, sizes.contexts[0], room)
        driver.decode(sizes.warm_steps)
        launches = _count_launches(driver)
        report(part="launches", model=model, batch=batch, kernels_per_step=launches)


@contextmanager
def _prefill_log() -> Iterator[list[str]]:
    """Gives what a start in this context logs of its choice."""
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    prefill.logger.addHandler(handler)
    prefill.logger.setLevel(logging.INFO)
    try:
        yield lines
    finally:
        prefill.logger.removeHandler(handler)


def _measure_first_token(driver: Driver, model: str, sizes: Sizes) -> None:
    first = driver.seconds_to_first_token(sizes.first_prompt, sizes.first_repeats)
    report(part="ttft", model=model, prompt=sizes.first_prompt, ttft_ms=first * 1e3)


def _measure_decode(driver: Driver, model: str, batch: int, context: int, sizes: Sizes) -> None:
    info = driver.info
    room = sizes.warm_steps + sizes.num_steps + 1
    at: dict[str, object] = {"part": "decode", "model": model, "batch": batch, "context": context}
    if info.quantization is not None:  # no row of the table of goals
        at |= {"part": "coded decode", "codes": info.quantization.method}
    needed = batch * -(-(context + room) // info.block_size)
    if needed > info.num_blocks:
        reason = f"takes {needed} blocks of the pool's {info.num_blocks}"
        report(**at, skipped=reason)
        return
    driver.begin(batch, context, room)
    driver.decode(sizes.warm_steps)
    times = driver.decode(sizes.num_steps)
    mean_context = context + sizes.warm_steps + (sizes.num_steps + 1) / 2
    step_bytes = info.weight_bytes + info.kv_bytes_per_token * batch * mean_context
    report(
        **at,
        tpot_ms=times.step_s * 1e3,
        tokens_per_s=batch / times.step_s,
        bytes_per_s=step_bytes / times.step_s,
        host_ms=times.host_s * 1e3,
        waited_ms=times.waited_s * 1e3,
        late_steps_ratio=times.late_ratio,
    )


def _measure_drafts(driver: Driver, model: str, batch: int, context: int, sizes: Sizes) -> None:
    """A wrong kernel accepts nothing that is right; rounding may change an id in twenty."""
    at: dict[str, object] = {"model": model, "batch": batch, "context": context}
    room = sizes.warm_steps + sizes.num_steps + 1 + max(_DRAFTS)
    for num_drafts in (0, *_DRAFTS):
        driver.begin(batch, context, room)
        driver.decode(sizes.warm_steps, num_drafts)
        times = driver.decode(sizes.num_steps, num_drafts)
        report(
            part="drafts",
            **at,
            drafts=num_drafts,
            step_ms=times.step_s * 1e3,
            host_ms=times.host_s * 1e3,
        )
    for num_drafts in _DRAFTS:
        same, right, wrong = driver.accepted(batch, context, num_drafts)
        report(
            part="drafts accepted",
            **at,
            drafts=num_drafts,
            same_first=same,
            of_right=right,
            of_wrong=wrong,
            is_right=same >= 0.75 and right >= 0.5 and wrong == 0,
        )


def _compare_overlap(executor: CudaExecutor, driver: Driver, model: str, sizes: Sizes) -> None:
    """What `penstock.engine.kernels.launch` gains. Leaves graphs of kernels that start one by
    one."""
    context, room = sizes.contexts[0], sizes.warm_steps + sizes.num_steps + 1

    def step_ms(batch: int) -> float:
        driver.begin(batch, context, room)
        driver.decode(sizes.warm_steps)
        return driver.decode(sizes.num_steps).step_s * 1e3

    before = {batch: step_ms(batch) for batch in sizes.overlap_batches}
    with overlap(False):
        executor.capture()
        for batch, tpot_ms in before.items():
            report(
                part="overlap",
                model=model,
                batch=batch,
                context=context,
                tpot_ms=tpot_ms,
                one_by_one_ms=step_ms(batch),
            )


def _count_launches(driver: Driver) -> int | None:
    """Kernels of a step, with those in its graph; None where the profiler sees no device."""
    on_gpu = torch.cuda.is_available()
    activity = ProfilerActivity.CUDA if on_gpu else ProfilerActivity.CPU
    with profile(activities=[activity]) as profiled:
        driver.decode(_PROFILED_STEPS)
    kernels = [
        event
        for event in profiled.events() or ()
        if str(event.device_type).endswith("CUDA")
        and not event.name.startswith(("Memcpy", "Memset"))
    ]
    return len(kernels) // _PROFILED_STEPS or None
