"""What drafts cost at few sequences: a table of ESTIMATE.md, from the launches."""

from tests.bench.gpu.launches import Step  # isort: skip: turns the interpreter on

from tests.bench.gpu.assumptions import AT_WORST, EXPECTED
from tests.bench.gpu.goals import LLAMA, QWEN
from tests.bench.gpu.step_times import StepTimes

OPENING = """\
## Steps with drafts

ms of a decode step whose sequences have k drafts each, and of how many tokens it must make for each
sequence to be worth it (its time over that of a step without). Kernels: `_rotate_and_store`, then
`_decode` with k + 1 queries of each sequence, whose keys are read once, then `_combine_queries`
where rows have several pieces: two launches a layer more than without drafts. None of it has run on
a GPU. "Keys once" is the part of decode attention, beside what it would be if each query read all
keys.
"""
_DRAFTS = (1, 3, 7)
_AT = ((LLAMA, 1, 512), (LLAMA, 8, 1024), (LLAMA, 16, 8192), (QWEN, 1, 512), (QWEN, 24, 1024))


def table() -> str:
    heads = [f"{k} draft{'s' * (k > 1)}" for k in _DRAFTS]
    lines = [f"| | none | {' | '.join(heads)} | decode attention of 7: keys once, again |"]
    lines.append("|---" + "|---:" * (len(heads) + 2) + "|")
    for model, batch, context in _AT:
        cells = []
        for k in (0, *_DRAFTS):
            step = Step(decodes=(context,) * batch, drafts=k)
            times = [StepTimes(model, given).us(step) for given in (EXPECTED, AT_WORST)]
            if not k:
                plain = times
                cells.append(f"{times[0] / 1000:.2f} (at worst {times[1] / 1000:.2f})")
                continue
            ratios = [time / before for time, before in zip(times, plain, strict=True)]
            cells.append(f"{times[0] / 1000:.2f}, {ratios[0]:.2f} ({ratios[1]:.2f})")
        once, again = (_attention_ms(model, step) for step in _queries_of(batch, context))
        cells.append(f"{once:.2f}, {again:.2f}")
        lines.append(f"| {model}, {batch} at {context:,} | {' | '.join(cells)} |")
    return "\n".join(lines)


def _queries_of(batch: int, context: int) -> tuple[Step, Step]:
    """As many queries, of rows with drafts and of one row each."""
    num_queries = 1 + _DRAFTS[-1]
    drafted = Step(decodes=(context,) * batch, drafts=_DRAFTS[-1])
    return drafted, Step(decodes=(context,) * (batch * num_queries))


def _attention_ms(model: str, step: Step) -> float:
    kernels = ("_decode", "_combine_queries", "_rotate_and_store")
    launches = StepTimes(model, EXPECTED).launches(step)
    return sum(one.us for one in launches if one.work.name in kernels) / 1000
