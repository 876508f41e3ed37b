"""The cases of a comparison: lengths of prompts and outputs, and how many requests at a time.

A case with turns is of conversations: each turn sends all that was said before and `input_len` new
tokens. A request of its workload is what one turn adds.
"""

import re
from dataclasses import dataclass
from typing import TypeAlias

from penstock.loadtest.workload.config import PromptFormat, WorkloadConfig
from penstock.loadtest.workload.workload import TimedRequest
from penstock.scheduler.errors import InvalidConfig

# What each turn of each conversation adds.
Conversations: TypeAlias = list[list[TimedRequest]]

_CASE = re.compile(r"(\d+)x(\d+)@(\d+)((?::\w+=\d+)*)")
_OPTIONS = ("shared", "turns", "n")
# Without n: at least this many requests, and this many for each that is in flight. Conversations
# have a request for each turn.
_MIN_REQUESTS, _REQUESTS_PER_STREAM = 8, 2
_WARM_UP_TURNS = 2  # the second finds the first in the prefix cache


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """name: as it is typed. num_shared: tokens that all prompts begin with, of input_len.

    num_turns: of a conversation; 1 where requests are alone. num_requests: conversations, if so.
    """

    name: str
    input_len: int
    output_len: int
    concurrency: int
    num_shared: int
    num_turns: int
    num_requests: int

    @property
    def num_output_tokens(self) -> int:
        """Of all that is measured."""
        return self.num_requests * self.num_turns * self.output_len

    def workload(self, seed: int, prompt_format: PromptFormat) -> WorkloadConfig:
        """Of the requests that are measured, and before them `concurrency` that warm up."""
        return WorkloadConfig(
            seed=seed,
            num_prompts=(self.concurrency + self.num_requests) * self.num_turns,
            prompt_format=prompt_format,
            input_len=self.input_len - self.num_shared,
            random_prefix_len=self.num_shared,
            output_len=self.output_len,
        )

    def conversations(self, requests: list[TimedRequest]) -> tuple[Conversations, Conversations]:
        """Those that warm up, and those that are measured. requests: of the workload."""
        num = self.num_turns
        each = [requests[first : first + num] for first in range(0, len(requests), num)]
        warm_up = [turns[:_WARM_UP_TURNS] for turns in each[: self.concurrency]]
        return warm_up, each[self.concurrency :]


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
            "perhaps :shared=TOKENS, :turns=TURNS or :n=REQUESTS after it"
        )
    input_len, output_len, concurrency = (int(match[group]) for group in (1, 2, 3))
    options = dict(option.split("=") for option in match[4].split(":")[1:])
    for option in options:
        if option not in _OPTIONS:
            raise InvalidConfig(
                f"--cases {name}: there is no {option}; choose from {', '.join(_OPTIONS)}"
            )
    num_shared, num_turns = int(options.get("shared", 0)), int(options.get("turns", 1))
    default = _REQUESTS_PER_STREAM * concurrency
    if num_turns == 1:
        default = max(_MIN_REQUESTS, default)
    num_requests = int(options.get("n", default))
    if min(input_len, output_len, concurrency, num_turns, num_requests) < 1:
        raise InvalidConfig(f"--cases {name}: each number must be at least 1")
    if num_shared >= input_len:
        raise InvalidConfig(
            f"--cases {name}: {num_shared} shared tokens leave none of the {input_len} for the "
            "prompt's own end; share fewer"
        )
    if num_shared and num_turns > 1:
        raise InvalidConfig(f"--cases {name}: turns cannot be combined with shared; remove one")
    return Case(
        name=name,
        input_len=input_len,
        output_len=output_len,
        concurrency=concurrency,
        num_shared=num_shared,
        num_turns=num_turns,
        num_requests=num_requests,
    )
