"""Requests that are sampled in many ways, and their answers, to be compared to the last bit."""

from dataclasses import replace
from typing import Any

from llguidance import LLMatcher

from penstock.scheduler.types import Request, RequestOutput, SamplingParams, TokenLogprobs
from tests.support.drafting import Oracle
from tests.support.scheduling import make_request
from tests.support.stepping import ids_of

PROMPTS = [[1, 403, 407, 261], [1, 410, 411, 412, 413, 414], [1, 300] * 12, list(range(1, 40))]
WAYS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "logprobs": {"temperature": 0.0, "num_logprobs": 3},
    "drawn": {"temperature": 0.9, "top_p": 0.95, "top_k": 40, "num_logprobs": 1},
    "penalties": {
        "temperature": 0.7,
        "repetition_penalty": 1.3,
        "presence_penalty": 0.4,
        "frequency_penalty": 0.3,
        "num_logprobs": 0,
    },
    "banned": {"temperature": 0.8, "min_tokens": 20, "bad_words": ((403, 407), (261,))},
    "biased": {"temperature": 0.8, "logit_bias": ((300, 4.0), (12, -9.0)), "min_p": 0.02},
    "grammar": {"temperature": 1.0, "grammar": LLMatcher.grammar_from_regex("[a-f ]{9,60}")},
}


def requests_of(way: dict[str, Any], n: int = 1) -> list[Request]:
    sampling = SamplingParams(max_tokens=60, stop_token_ids=(2,), seed=11, **way)
    return [
        replace(make_request(str(i), prompt), sampling=sampling, n=n)
        for i, prompt in enumerate(PROMPTS)
    ]


Answers = dict[tuple[tuple[int, ...], int], tuple[list[int], list[TokenLogprobs], Any]]


def answers_of(requests: list[Request], outputs: list[list[RequestOutput]]) -> Answers:
    found: Answers = {}
    for request, of_request in zip(requests, outputs, strict=True):
        for index in range(request.n):
            own = [output for output in of_request if output.index == index]
            logprobs = [each for output in own for each in output.logprobs or ()]
            finish = own[-1].finish
            assert finish is not None
            reason = finish.reason, finish.stop_token_id
            found[request.prompt_token_ids, index] = ids_of(own), logprobs, reason
    return found


def oracle_of(requests: list[Request], answers: Answers, share: float) -> Oracle:
    oracle = Oracle(share)
    for request in requests:
        prompt = request.prompt_token_ids
        oracle.learn(request, [answers[prompt, index][0] for index in range(request.n)])
    return oracle
