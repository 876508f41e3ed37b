"""`python -m tests.bench.drafts_lookup`: what looking for drafts costs a request in a step.

For each case and number of streams, microseconds of processor time of `Drafter.propose` and of what
judges its drafts, for each request of a step. Every round has the same steps, and of each the least
counts, since others only make it longer.
The cases:

    none      the answer repeats nothing, so that no draft is ever found
    hopeless  drawn from ten ids alike: drafts are always found, and a tenth is right
    quote     it repeats its prompt, and drafts are right
    earlier   it repeats what was answered before

A draft costs a tenth of a step, and less where there are many, so that what is likely is taken.
With `--beside DIR`, another checkout, its drafter and this one take turns on the same tokens.
"""

import argparse
import gc
import sys
import time
from collections.abc import Iterator
from importlib import import_module
from itertools import count
from pathlib import Path
from random import Random
from statistics import fmean
from types import ModuleType
from typing import Any

import msgspec

from penstock.scheduler.cache.sequence import Sequence
from penstock.scheduler.types import Request, RequestId, SamplingParams

# Of each request and step, at any of these numbers of streams.
LIMIT_US = 20.0
STREAMS = (1, 8, 32)
_PACKAGE = "penstock.scheduler.drafts"
_MODULES = ("acceptance", "prices", "sources", "drafter")
_PROMPT = 600
_STEP_S = 0.01
_WARM_UP = 100  # steps that are not counted


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0])
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--streams", nargs="+", type=int, default=list(STREAMS))
    parser.add_argument("--num-steps", type=int, default=150)
    parser.add_argument("--num-rounds", type=int, default=7)
    parser.add_argument("--beside", type=Path, metavar="DIR", help="another checkout")
    args = parser.parse_args(argv)
    versions = {"here": {name: import_module(f"{_PACKAGE}.{name}") for name in _MODULES}}
    if args.beside is not None:
        versions["beside"] = loaded_from(args.beside)
    print("| case | streams | " + " | ".join(f"{each}, us" for each in versions) + " |")
    print("|---|---:|" + "---:|" * len(versions))
    worst, rows = 0.0, []
    for case in args.cases:
        for streams in args.streams:
            steps: dict[str, list[float]] = {}
            for number in range(args.num_rounds):
                for name in list(versions)[:: (-1) ** number]:
                    spent = seconds(versions[name], case, streams, args.num_steps)
                    steps[name] = list(map(min, steps.get(name, spent), spent))
            least = {name: 1e6 * fmean(each) / streams for name, each in steps.items()}
            worst = max(worst, least["here"])
            rows.append({"case": case, "streams": streams} | least)
            shown = " | ".join(f"{each:.1f}" for each in least.values())
            print(f"| {case} | {streams} | {shown} |", flush=True)
    summary = {"limit_us": LIMIT_US, "worst_us": worst, "meets_limit": worst <= LIMIT_US}
    print(msgspec.json.encode(summary | {"rows": rows}).decode(), flush=True)
    return 0


def loaded_from(checkout: Path) -> dict[str, ModuleType]:
    """The modules of another checkout, beside those of this one, under the same names."""
    own = {name: sys.modules.pop(name) for name in list(sys.modules) if name.startswith(_PACKAGE)}
    package = ModuleType(_PACKAGE)
    package.__path__ = [str(checkout / "scheduler" / "drafts")]
    sys.modules[_PACKAGE] = package
    try:
        return {name: import_module(f"{_PACKAGE}.{name}") for name in _MODULES}
    finally:
        for name in [name for name in sys.modules if name.startswith(_PACKAGE)]:
            del sys.modules[name]
        sys.modules.update(own)


def seconds(modules: dict[str, ModuleType], case: str, streams: int, num_steps: int) -> list[float]:
    """Of each step, after some that are not counted."""
    sources, price = modules["sources"], modules["prices"].Price
    drafter = modules["drafter"].Drafter(
        [sources.Prediction(), sources.OwnText(), sources.FinishedAnswers()], 8
    )
    drafter._prices.of = lambda num, _: price(_STEP_S, min(0.1, 0.4 / num) * _STEP_S)
    answers = [CASES[case](Random(number), drafter) for number in range(streams)]
    sequences = [sequence for sequence, _ in answers]
    limits, spent = [8] * streams, list[float]()
    clock_s = min(-time.thread_time() + time.thread_time() for _ in range(100))
    gc.collect()
    gc.disable()
    try:
        for step in range(num_steps + _WARM_UP):
            begun_s = time.thread_time()
            drafts = drafter.propose(sequences, limits, 1000)
            proposed_s = time.thread_time()
            new = [_tokens(answer, each) for (_, answer), each in zip(answers, drafts, strict=True)]
            judging_s = time.thread_time()
            for sequence, each, token_ids in zip(sequences, drafts, new, strict=True):
                if each:
                    drafter.judge(sequence, len(token_ids) - 1)
            if step >= _WARM_UP:
                judged_s = time.thread_time()
                spent.append(judged_s - judging_s + proposed_s - begun_s - 2 * clock_s)
            for sequence, token_ids in zip(sequences, new, strict=True):
                sequence.token_ids += token_ids
                sequence.num_computed = len(sequence.token_ids) - 1
    finally:
        gc.enable()
    return spent


def _tokens(answer: Iterator[int], drafts: tuple[int, ...]) -> list[int]:
    """A token, and one more for each draft that is right."""
    token_ids = [next(answer)]
    for draft in drafts:
        if token_ids[-1] != draft:
            break
        token_ids.append(next(answer))
    return token_ids


# Each case: a sequence whose prompt has been computed, and the answer, without an end.
Answer = tuple[Sequence, Iterator[int]]


def _sequence(prompt: list[int]) -> Sequence:
    request = Request(
        id=RequestId("a"),
        prompt_token_ids=tuple(prompt),
        sampling=SamplingParams(max_tokens=100_000),
        arrival_s=0.0,
    )
    return Sequence(request, 0, 0, 200_000)


def _none(random: Random, drafter: Any) -> Answer:
    ids = (random.randrange(10, 100_000) for _ in count())
    return _sequence([next(ids) for _ in range(_PROMPT)]), ids


def _hopeless(random: Random, drafter: Any) -> Answer:
    ids = (random.randrange(100, 110) for _ in count())
    return _sequence([next(ids) for _ in range(2 * _PROMPT)]), ids


def _quote(random: Random, drafter: Any) -> Answer:
    prompt = [random.randrange(10, 100_000) for _ in range(_PROMPT)]
    return _sequence([*prompt, *prompt[:5]]), (prompt[at % _PROMPT] for at in count(5))


def _earlier(random: Random, drafter: Any) -> Answer:
    answer = [random.randrange(10, 100_000) for _ in range(_PROMPT)]
    before = _sequence([1])
    before.token_ids += answer * 2
    drafter.end(before)
    return _sequence([1, *answer[:5]]), (answer[at % _PROMPT] for at in count(5))


CASES = {"none": _none, "hopeless": _hopeless, "quote": _quote, "earlier": _earlier}


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
