"""`python -m tests.bench.gpu.estimate`: what each goal should measure on an H200, line by line.

ESTIMATE.md keeps the text (`--write`), and a test fails where it is stale. What a device has
measured stands beside it. What each launch has to do comes from the launch code
(`tests.bench.gpu.work`); how fast a device does it is assumed (`tests.bench.gpu.assumptions`).
"""

from tests.bench.gpu.launches import Step  # isort: skip: turns the interpreter on

import json
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields
from enum import Enum
from pathlib import Path

from penstock.scheduler.config import SchedulerConfig
from penstock.scheduler.types import Request, RequestId, SamplingParams
from tests.bench.engine.offline import FULL, requests_of
from tests.bench.gpu import drafted, early_starts, under_load
from tests.bench.gpu.assumptions import AT_WORST, EXPECTED, SOURCES, Assumptions, Early, Timed
from tests.bench.gpu.goals import (
    GOALS,
    H100,
    LLAMA,
    MIXTURE,
    QWEN,
    SMALL,
    Goal,
    Row,
    shown,
    sign,
    with_shares,
)
from tests.bench.gpu.others import FRAMEWORKS, MEASURED, YARDSTICK
from tests.bench.gpu.step_times import (
    STEPS_SINCE,
    Count,
    StepTimes,
    all_of,
    of_matrix,
    of_memory,
    served,
)
from tests.support.compile_kernels import QUANTIZED

FILE = Path(__file__).with_name("ESTIMATE.md")
# The last rows of the suite that a device has printed for each goal.
MEASUREMENTS = Path(__file__).with_name("measured_h200.jsonl")


@dataclass(frozen=True)
class Estimate:
    """In the unit of its goal; the second is at worst. of_memory, of_matrix: the shares of the
    expected time that are the memory's and the matrix units'."""

    goal: Goal
    expected: float | None
    at_worst: float | None
    why_not: str = ""
    of_memory: float = 0.0
    of_matrix: float = 0.0

    @property
    def word(self) -> str:
        if self.expected is None or self.at_worst is None:
            return self.why_not
        met = [self.goal.is_met_by(value) for value in (self.expected, self.at_worst)]
        return "met" if all(met) else "met as expected, not at worst" if met[0] else "NOT MET"


@dataclass(frozen=True)
class Time:
    """us: how many a step or a run takes. figure: the goal's, of these microseconds."""

    us: Callable[[Assumptions, Count], float]
    figure: Callable[[float], float]

    def estimate(self, goal: Goal) -> Estimate:
        us = self.us(EXPECTED, all_of)
        return Estimate(
            goal,
            self.figure(us),
            self.figure(self.us(AT_WORST, all_of)),
            of_memory=self.us(EXPECTED, of_memory) / us,
            of_matrix=self.us(EXPECTED, of_matrix) / us,
        )


def _step_us(model: str, step: Step) -> Callable[[Assumptions, Count], float]:
    return lambda given, count: StepTimes(model, given, count=count).us(step)


def _run_us(
    model: str, requests: list[Request], max_batched_tokens: int
) -> Callable[[Assumptions, Count], float]:
    # Of all steps, those of few rows are a small part, and room takes 0.2 % from them.
    early = Early.ALL

    def us(given: Assumptions, count: Count) -> float:
        times = StepTimes(model, given, count=count, early=early)
        return 1e6 * served(times, requests, max_batched_tokens)[0]

    return us


def _tpot(model: str, batch: int, context: int) -> Time:
    return Time(_step_us(model, _decode(batch, context)), lambda us: us / 1e3)


def _rate(model: str, batch: int, context: int) -> Time:
    return Time(_step_us(model, _decode(batch, context)), lambda us: batch / us * 1e6)


def _decode(batch: int, context: int) -> Step:
    return Step(decodes=(context + STEPS_SINCE,) * batch)


def _share_of_copy(model: str, batch: int, context: int) -> Callable[[Assumptions], float]:
    def share(given: Assumptions) -> float:
        found = StepTimes(model, given).launches(_decode(batch, context))
        num_bytes = sum(one.work.memory_bytes for one in found)
        return 100 * num_bytes / (sum(one.us for one in found) / 1e6) / given.copy

    return share


def _offline(model: str) -> Time:
    requests = requests_of(FULL, 1000)
    num_tokens = sum(request.sampling.max_tokens for request in requests)
    us = _run_us(model, requests, FULL.max_batched_tokens)
    return Time(us, lambda us: num_tokens / us * 1e6)


def _http() -> Time:
    """The device's part alone: the server's is to be hidden behind it."""
    sampling = SamplingParams(max_tokens=1024)
    prompts = (tuple(range(3 + index, 131 + index)) for index in range(256))
    requests = [
        Request(id=RequestId(str(i)), prompt_token_ids=ids, sampling=sampling, arrival_s=0.0)
        for i, ids in enumerate(prompts)
    ]
    us = _run_us(QWEN, requests, SchedulerConfig().max_step_tokens)
    return Time(us, lambda us: 256 * 1024 / us * 1e6)


def _attention(step: Step, given: Assumptions) -> Timed:
    """Of one layer, as the kernel's own benchmark times it."""
    kernel = "_prefill" if step.chunks else "_decode"
    found = StepTimes(LLAMA, given).launches(step)
    return next(one for one in found if one.work.name == kernel)


def _attention_share(given: Assumptions) -> float:
    ours = _attention(MEASURED[YARDSTICK][0], given)
    return 100 * ours.work.memory_bytes / (ours.us / 1e6) / given.copy


def _flash_attention_over_ours(given: Assumptions) -> float:
    return given.flash_attention / _attention(MEASURED[YARDSTICK][0], given).us


_BY_GOAL: tuple[Time | Callable[[Assumptions], float] | str, ...] = (
    _tpot(LLAMA, 1, 512),
    _share_of_copy(LLAMA, 1, 512),
    _tpot(SMALL, 1, 512),
    _rate(LLAMA, 256, 1024),
    _offline(SMALL),
    _offline(LLAMA),
    _http(),
    "no estimate: the host's work, not the device's",
    Time(_step_us(LLAMA, Step(chunks=((1024, 0),))), lambda us: us / 1e3),
    _attention_share,
    _flash_attention_over_ours,
    "no estimate: reading files and starting processes",
)


def estimates() -> Iterator[Estimate]:
    for goal, way in zip(GOALS, _BY_GOAL, strict=True):
        if isinstance(way, str):
            yield Estimate(goal, None, None, way)
        elif isinstance(way, Time):
            yield way.estimate(goal)
        else:
            yield Estimate(goal, way(EXPECTED), way(AT_WORST))


# The steps whose launches are listed one by one.
_STEPS: dict[str, tuple[str, Step]] = {
    f"{LLAMA}, batch 1, context 512": (LLAMA, _decode(1, 512)),
    f"{SMALL}, batch 1, context 512": (SMALL, _decode(1, 512)),
    f"{LLAMA}, batch 16, context 1,024": (LLAMA, _decode(16, 1024)),
    f"{LLAMA}, batch 256, context 1,024": (LLAMA, _decode(256, 1024)),
    f"{SMALL}, batch 256, context 640": (SMALL, Step(decodes=(640,) * 256)),
    f"{QWEN}, batch 256, context 640": (QWEN, Step(decodes=(640,) * 256)),
    f"{QWEN}, 255 decodes at 640 and a chunk of 128, as one graph": (
        QWEN, Step(decodes=(640,) * 255, chunks=((128, 0),), graph=384),
    ),
    f"{LLAMA}, one chunk of 1,024": (LLAMA, Step(chunks=((1024, 0),))),
    f"{MIXTURE}, batch 1, context 512": (MIXTURE, _decode(1, 512)),
    f"{MIXTURE}, batch 64, context 1,024": (MIXTURE, _decode(64, 1024)),
    f"{MIXTURE}, one chunk of 1,024": (MIXTURE, Step(chunks=((1024, 0),))),
}  # fmt: skip


def _steps_table(title: str) -> str:
    model, step = _STEPS[title]
    both = [StepTimes(model, given).launches(step) for given in (EXPECTED, AT_WORST)]
    sums: dict[str, list[float]] = {}
    for expected, at_worst in zip(*both, strict=True):
        work = expected.work
        more = 1, work.memory_bytes / 1e6, expected.us, at_worst.us, expected.gap
        line = sums.setdefault(work.name, [0.0] * 7)
        line[:] = map(sum, zip(line, (*more, expected.early, work.programs), strict=True))
    heads = ["launch", "times", "MB of memory", "us", "us at worst", "of us, before it", "early"]
    lines = [f"### {title}", "", f"| {' | '.join(heads)} |", "|---" + "|---:" * 6 + "|"]
    for name, (count, size, us, worst, gap, early, programs) in sums.items():
        cells = f"{count:.0f} | {size:,.1f} | {us:,.1f} | {worst:,.1f} | {gap:,.1f}"
        share = f"{early / programs:.0%}" if programs else ""
        lines.append(f"| {name} | {cells} | {share} |")
    count, size, us, worst, gap, *_ = map(sum, zip(*sums.values(), strict=True))
    cells = f"{count:.0f} | {size:,.1f} | {us:,.0f} | {worst:,.0f} | {gap:,.0f}"
    lines.append(f"| **together** | {cells} | |")
    return "\n".join(lines)


def _others_table() -> str:
    lines = [f"| attention | ours | at worst | {' | '.join(FRAMEWORKS)} |"]
    lines.append("|---|---:|---:|---:|---:|---:|")
    for what, (step, others) in MEASURED.items():
        ours = [_attention(step, given).us for given in (EXPECTED, AT_WORST)]
        lines.append(f"| {what} | {' | '.join(f'{us:.1f}' for us in (*ours, *others))} |")
    return "\n".join(lines)


_CHUNK = 2048
_FIRST_TOKENS: dict[str, list[Step]] = {
    "1,024 in one chunk": [Step(chunks=((1024, 0),))],
    "8,192 in one chunk": [Step(chunks=((8192, 0),))],
    f"8,192 in chunks of {_CHUNK:,}": [
        Step(chunks=((_CHUNK, before),)) for before in range(0, 8192, _CHUNK)
    ],
}


def _first_token_table() -> str:
    """With our prefill, and with vLLM's FlashAttention 3: as it was measured, else at the rate of
    8,192."""
    lines = [
        "| prompt | ours | at worst | FlashAttention 3 | at worst |",
        "|---|---:|---:|---:|---:|",
    ]
    known = {step: others[FRAMEWORKS.index("vLLM")] for step, others in MEASURED.values()}
    whole = Step(chunks=((8192, 0),))

    def flash_us(one: Timed, step: Step, given: Assumptions) -> float:
        if one.work.name != "_prefill":
            return one.us
        return known.get(step, known[whole] * one.work.flops / _attention(whole, given).work.flops)

    for what, steps in _FIRST_TOKENS.items():
        cells = []
        for given in (EXPECTED, AT_WORST):
            all_of = [
                (one, step) for step in steps for one in StepTimes(LLAMA, given).launches(step)
            ]
            cells.append(sum(one.us for one, _ in all_of) / 1e3)
            cells.append(sum(flash_us(one, step, given) for one, step in all_of) / 1e3)
        ours, flash, worst, flash_at_worst = cells
        shown = (ours, worst, flash, flash_at_worst)
        lines.append(f"| {what} | {' | '.join(f'{ms:.1f}' for ms in shown)} |")
    return "\n".join(lines)


_BATCHES = (1, 16, 64, 256)


def _codes_table() -> str:
    """Times of a decode step, and how many times as fast it is as in bfloat16."""
    shown = " | ".join(f"batch {batch}" for batch in _BATCHES)
    lines = [f"| weights | {shown} |", "|---" + "|---:" * len(_BATCHES) + "|"]
    plain = [_step_ms(batch, None) for batch in _BATCHES]
    for codes in (None, *QUANTIZED):
        cells = []
        for batch, bf16 in zip(_BATCHES, plain, strict=True):
            times = _step_ms(batch, codes)
            ratios = [of_bf16 / ms for of_bf16, ms in zip(bf16, times, strict=True)]
            worst = f"at worst {times[1]:.2f} ms, {ratios[1]:.2f}"
            cells.append(f"{times[0]:.2f} ms, {ratios[0]:.2f} ({worst})")
        lines.append(f"| {codes or 'bfloat16'} | {' | '.join(cells)} |")
    return "\n".join(lines)


def _step_ms(batch: int, codes: str | None) -> list[float]:
    """As expected, and at worst."""
    step = _decode(batch, 512)
    both = (StepTimes(QWEN, given, codes=codes) for given in (EXPECTED, AT_WORST))
    return [times.us(step) / 1e3 for times in both]


_CODES = """\
## Weights of 8 and 4 bits

A decode step of Qwen3-8B at context 512, and how many times as fast it is as with bfloat16 weights.
Wanted: 1.6 with int8 and 2.3 with int4 at batch 1; 1.2 at batch 64. int8, int4 and fp8 are what
`--quantization` makes; int4 in groups of 128, with a plain output layer, what most checkpoints
have. The estimate rests on the bytes, the instructions in the loop that the compiler made
(`issue_share`), the cache's rate for x, and from 17 rows on the matrix units (`tile_share`): up to
512 rows are tiles; FP8 has products of its own, of which others' measurements are known. It says
what is next: at batch 1, fewer instructions for levels; at 64, fewer to bring
codes in the order that the matrix units take.
"""
_OPENING = """\
# What each goal should measure on an H200

Made by `python -m tests.bench.gpu.estimate --write` from the launch code, the models' configs
and the assumptions below; a test fails where it is stale. Measured: what the suite has found last
on an H200, some of it before the launch code became what it is; loadtest/LOG.md says when. A
measurement that misses its line says which assumption, or which kernel, to look at. memory, matrix:
the shares of the expected time that are the memory's and the matrix units', by which goals.py makes
the goals of another device; of an H100 SXM with a supposed copy of 3.0 TB/s they are shown.
"""
_OTHERS = """\
## Attention beside what others measured

us of one layer on an H200, with 32 query heads, 8 of keys and values, size 128; others.py says
whence. SGLang and vLLM run FlashAttention 3. Where ours is below all of them, doubt ours first.
"""
_FIRST_TOKEN = f"""\
## Prompts with FlashAttention 3

ms of the device for Llama-3.1-8B's first token on an H200, with our prefill attention and with
FlashAttention 3's, which a server takes where it is installed: vLLM's time above, and of chunks of
{_CHUNK:,} what their pairs of a query and a key take at its rate of 8,192. The suite's part
`prefill-steps` measures both.
"""


_LAUNCHES = """\
## Steps

of us, before it: what lies between the launch before and this one, of its us. early: of its
programs, those that waited already when the launch before ended.
"""


def _measurements() -> list[Row]:
    rows = [json.loads(line) for line in MEASUREMENTS.read_text(encoding="utf-8").splitlines()]
    (device,) = (row for row in rows if row["part"] == "device")
    return [with_shares(row, device) for row in rows]


def text() -> str:
    heads = ["goal", "wanted", f"of an {H100.name}", "expected", "at worst", "", "memory", "matrix"]
    lines = [f"| {' | '.join(heads)} | measured |", "|---|---:|---:|---:|---:|---|---:|---:|---:|"]
    measured = _measurements()
    for one in estimates():
        goal = one.goal
        cells = [goal.what, f"{sign(goal)} {goal.wanted:,g} {goal.unit}"]
        cells += [shown(goal, x) for x in (goal.on(H100).wanted, one.expected, one.at_worst)]
        cells += [one.word, f"{one.of_memory:.2f}", f"{one.of_matrix:.2f}"]
        lines.append(f"| {' | '.join(cells)} | {shown(goal, goal.measured(measured))} |")
    given = ["| assumption | expected | at worst | what it is, and its source |"]
    given.append("|---|---:|---:|---|")
    for field in fields(Assumptions):
        both = " | ".join(_text(getattr(which, field.name)) for which in (EXPECTED, AT_WORST))
        given.append(f"| {field.name} | {both} | {SOURCES[field.name]} |")
    parts = [_OPENING.rstrip(), "\n".join(lines), "## Assumptions", "\n".join(given)]
    parts += [
        _OTHERS.rstrip(),
        _others_table(),
        early_starts.OPENING.rstrip(),
        early_starts.table(measured),
        _FIRST_TOKEN.rstrip(),
        _first_token_table(),
        under_load.OPENING.rstrip(),
        under_load.table(),
        drafted.OPENING.rstrip(),
        drafted.table(),
        _CODES.rstrip(),
        _codes_table(),
        _LAUNCHES.rstrip(),
        *map(_steps_table, _STEPS),
    ]
    return "\n\n".join(parts) + "\n"


def _text(value: object) -> str:
    if isinstance(value, Enum):
        return str(value.value)
    return f"{value:g}" if isinstance(value, float) else str(value)


if __name__ == "__main__":
    if "--write" in sys.argv:
        FILE.write_text(text(), encoding="utf-8")
    else:
        print(text(), end="")
