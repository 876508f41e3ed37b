"""The cases of a comparison: lengths of prompts and outputs, and how many requests at a time."""

import re
from dataclasses import dataclass

from penstock.loadtest.workload.config import PromptFormat, WorkloadConfig
from penstock.scheduler.errors import InvalidConfig

_CASE = re.compile(r"(\d+)x(\d+)@(\d+)((?::\w+=\d+)*)")
_OPTIONS = ("shared", "n")
# Without n: at least this many requests, and this many for each that is in flight.
_MIN_REQUESTS, _REQUESTS_PER_STREAM = 8, 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """name: as it is typed. num_shared: tokens that all prompts begin with, of input_len."""

    name: str
    input_len: int
    output_len: int
    concurrency: int
    num_shared: int
    num_requests: int

    def workload(self, seed: int, prompt_format: PromptFormat) -> WorkloadConfig:
        """Of the requests that are measured, and before them `concurrency` that warm up."""
        return WorkloadConfig(
            seed=seed,
            num_prompts=self.concurrency + self.num_requests,
            prompt_format=prompt_format,
            input_len=self.input_len - self.num_shared,
            random_prefix_len=self.num_shared,
            output_len=self.output_len,
        )


def parse_cases(text: str) -> list[Case]:
    """Cases with commas between them. Raises InvalidConfig."""
    cases = [_parse(each.strip()) for each in text.split(",")]
    names = [case.name for case in cases]
    for name in names:
        if names.count(name) > 1:
            raise InvalidConfig(f"--cases has {name} twice; remove one")
    return cases


def _parse(name: str) -> Case:
    match = _CASE.fullmatch(name)
    if match is None:
        raise InvalidConfig(
            f"--cases {name!r} is not valid; write IN x OUT @ CONCURRENCY, as in 128x64@8, and "
            "perhaps :shared=TOKENS or :n=REQUESTS after it"
        )
    input_len, output_len, concurrency = (int(match[group]) for group in (1, 2, 3))
    options = dict(option.split("=") for option in match[4].split(":")[1:])
    for option in options:
        if option not in _OPTIONS:
            raise InvalidConfig(f"--cases {name}: there is no {option}; choose from shared and n")
    num_shared = int(options.get("shared", 0))
    default = max(_MIN_REQUESTS, _REQUESTS_PER_STREAM * concurrency)
    num_requests = int(options.get("n", default))
    if min(input_len, output_len, concurrency, num_requests) < 1:
        raise InvalidConfig(f"--cases {name}: each number must be at least 1")
    if num_shared >= input_len:
        raise InvalidConfig(
            f"--cases {name}: {num_shared} shared tokens leave none of the {input_len} for the "
            "prompt's own end; share fewer"
        )
    return Case(
        name=name,
        input_len=input_len,
        output_len=output_len,
        concurrency=concurrency,
        num_shared=num_shared,
        num_requests=num_requests,
    )
