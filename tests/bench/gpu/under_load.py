"""What would make 256 sequences faster: a table of ESTIMATE.md.

Rows of what the server has come from its launches. The others are arithmetic on the work of those,
because no kernel does it yet.
"""

from tests.bench.gpu.launches import Step  # isort: skip: turns the interpreter on

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch

from tests.bench.gpu.assumptions import AT_WORST, EXPECTED, issue_us, timed
from tests.bench.gpu.goals import LLAMA, QWEN
from tests.bench.gpu.step_times import STEPS_SINCE, StepTimes
from tests.bench.gpu.work import Work

OPENING = """\
## 256 sequences, and what would make them faster

Tokens/s of decode steps, as expected, and how many times as many as with weights, keys and values
in bfloat16; at worst in brackets. Of vLLM no figure of an H200 is published. vLLM 0.30.0 serves
Qwen3-8B in bfloat16 on one H100 SXM at 13,567 tokens/s (256 streams of 128 tokens in and 1,024 out,
a mean context of 640; tgarg01/silybench-data on GitHub, 2026-09-24); 4.8/3.35 times that, by the
datasheets' memories, is 19,439, and 1.25 times that 24,299.

- FP8 keys and values (`--kv-cache-dtype fp8`), FP8 weights and products (`--quantization fp8`), and
  both: from the launches. Half of the bytes help only as far as instructions allow, which are
  counted in resources.json; a decode in FP8 is bound by them where the last column says so.
- Shared prefix: a block that all sequences share is read once, not 256 times (cascade attention).
  No kernel does it: the bytes of the decodes are less by those of 512 shared tokens, and each layer
  has a launch more, of 256 rows by 512 keys on the matrix units at the rate of our prefill
  attention, which writes partial results.
- Drafts: each step verifies k tokens of each sequence, each of which is accepted as often as
  stated, so that it makes (1 - a^(k+1)) / (1 - a). Steps of so many tokens have none (up to 192
  tokens have, see below). Products and norms have k + 1 rows for each sequence; drafts cost
  nothing, as those found in the prompt. Keys are read once for all rows of a sequence; "read again"
  is as if each row were a sequence.
"""
_BATCH = 256
_SHARED = 512
# Models and contexts.
_AT = ((LLAMA, 1024), (QWEN, 1024), (QWEN, 640))
_FP8 = torch.float8_e4m3fn
Change = Callable[[list[Work]], list[Work]]


def _same(works: list[Work]) -> list[Work]:
    return works


@dataclass(frozen=True, kw_only=True)
class _Way:
    """codes: of weights. change: of the work that is launched. tokens: of a step, by sequence."""

    name: str
    codes: str | None = None
    kv_dtype: torch.dtype = torch.bfloat16
    change: Change = _same
    tokens: float = 1.0

    def works(self, model: str, context: int) -> list[Work]:
        times = StepTimes(model, EXPECTED, codes=self.codes, kv_dtype=self.kv_dtype)
        step = Step(decodes=(context + STEPS_SINCE,) * _BATCH)
        return self.change(times.works(step))

    def rates(self, model: str, context: int) -> list[float]:
        """Tokens a second, as expected and at worst."""
        works = self.works(model, context)
        us = (sum(one.us for one in timed(works, given)) for given in (EXPECTED, AT_WORST))
        return [_BATCH * self.tokens / each * 1e6 for each in us]

    def is_bound_by_instructions(self, model: str, context: int) -> bool:
        """Its decode attention."""
        found = timed(self.works(model, context), EXPECTED)
        decode = next(one for one in found if one.work.name == "_decode")
        return issue_us(decode.work, EXPECTED) > decode.memory_us


def with_shared_prefix(works: list[Work], shared: int = _SHARED) -> list[Work]:
    """As if each sequence of the step had this many tokens in common with all others."""
    found = []
    for work in works:
        if work.name != "_decode":
            found.append(work)
            continue
        own = 1 - _BATCH * shared / work.num_keys
        found += [
            Work(
                name="shared prefix", programs=0, fit=0, busy=0,
                memory_bytes=int(work.memory_bytes * shared / work.num_keys),
                # Of each row a sum in float32, which the decode reads again.
                cached_bytes=2 * 4 * _BATCH * work.query_size,
                flops=4.0 * _BATCH * shared * work.query_size,
            ),
            replace(work, memory_bytes=int(own * work.memory_bytes), issued=own * work.issued),
        ]  # fmt: skip
    return found


def with_drafts(works: list[Work], rows: int, *, reads_again: bool = False) -> list[Work]:
    """As if each sequence had so many rows."""
    found = []
    for work in works:
        outer: dict[str, Any] = {
            "programs": rows * work.programs,
            "busy": rows * work.busy,
            "cached_bytes": rows * work.cached_bytes,
            "product": (rows * work.product[0], *work.product[1:]),
        }
        if work.name == "_decode":
            times = rows if reads_again else 1
            again: dict[str, Any] = {
                "memory_bytes": times * work.memory_bytes,
                "issued": times * work.issued,
            }
            found.append(replace(work, cached_bytes=rows * work.cached_bytes, **again))
        elif work.room is not None:
            found.append(replace(work, memory_bytes=rows * work.memory_bytes, **outer))
        else:  # of torch: weights are read once
            found.append(replace(work, **outer))
    return found


def _drafts(k: int, accepted: float) -> list[_Way]:
    tokens = (1 - accepted ** (k + 1)) / (1 - accepted)
    name = f"{k} drafts, of which {accepted:.0%} are accepted"
    return [
        _Way(name=name, change=lambda works: with_drafts(works, k + 1), tokens=tokens),
        _Way(
            name=f"{name}, keys read again",
            change=lambda works: with_drafts(works, k + 1, reads_again=True),
            tokens=tokens,
        ),
    ]


_PLAIN = _Way(name="bfloat16")
_WAYS = (
    _PLAIN,
    _Way(name="FP8 keys and values", kv_dtype=_FP8),
    _Way(name="FP8 weights", codes="fp8"),
    _Way(name="both in FP8", codes="fp8", kv_dtype=_FP8),
    _Way(name="512 tokens in common", change=with_shared_prefix),
    *(way for k in (2, 4) for accepted in (0.6, 0.8) for way in _drafts(k, accepted)),
)


def table() -> str:
    heads = [f"{model}, context {context:,}" for model, context in _AT]
    lines = [f"| | {' | '.join(heads)} | attention is bound by instructions |"]
    lines.append("|---" + "|---:" * len(_AT) + "|---|")
    plain = [_PLAIN.rates(*at) for at in _AT]
    for way in _WAYS:
        cells = []
        for at, before in zip(_AT, plain, strict=True):
            rates = way.rates(*at)
            ratios = [rate / of_plain for rate, of_plain in zip(rates, before, strict=True)]
            worst = f"{rates[1]:,.0f}, {ratios[1]:.2f}"
            cells.append(f"{rates[0]:,.0f}, {ratios[0]:.2f} ({worst})")
        bound = any(way.is_bound_by_instructions(*at) for at in _AT)
        lines.append(f"| {way.name} | {' | '.join(cells)} | {'yes' if bound else ''} |")
    return "\n".join(lines)
