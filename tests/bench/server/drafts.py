"""`python -m tests.bench.server.drafts MODEL`: output tokens a second with drafts and without.

Two servers of one model, both loaded, are asked in turns; answers are compared too, since they are
to be the same. The cases:

    free      answers drawn at temperature 1, of which little repeats
    hopeless  drawn from ten ids alike, prompts too: drafts are always found, a tenth is right
    quote     greedy answers that are asked to repeat a text: of what a model says twice
    schema    objects by a JSON schema, whose keys repeat
    predicted greedy chat answers, with the answer as `prediction`, of which one word is another

Flags after MODEL go to both servers, such as --quantization int4.
"""

import argparse
import hashlib
import statistics
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from random import Random
from typing import Any

from tests.support.serving import RunningServer, ready

_NAME, _NUM_TOKENS = "model", 96
_TEXT = """\
def area(width, height):
    result = width * height
    print("area", result)
    return result


def volume(width, height, depth):
    result = width * height * depth
    print("volume", result)
    return result
"""
_SCHEMA = {
    "type": "array",
    "minItems": 8,
    "items": {
        "type": "object",
        "properties": {"width": {"type": "integer"}, "height": {"type": "integer"}},
        "required": ["width", "height"],
        "additionalProperties": False,
    },
}
_IDS = list(range(100, 110))
Ask = Callable[[RunningServer, int], str]


def _completion(server: RunningServer, **fields: Any) -> str:
    body = {"model": _NAME, "max_tokens": _NUM_TOKENS, "ignore_eos": True} | fields
    response = server.post("/v1/completions", body, timeout=600)
    response.raise_for_status()
    choice = response.json()["choices"][0]
    return str(choice.get("token_ids") or choice["text"])


def _free(server: RunningServer, number: int) -> str:
    return _completion(server, prompt=f"Number {number}: once upon a time", seed=number)


def _hopeless(server: RunningServer, number: int) -> str:
    random = Random(number)
    prompt = [random.choice(_IDS) for _ in range(1200)]
    fields = {"allowed_token_ids": _IDS, "seed": number, "temperature": 2.0}
    return _completion(server, prompt=prompt, logit_bias={}, return_token_ids=True, **fields)


def _quote(server: RunningServer, number: int) -> str:
    return _completion(server, prompt=f"# {number}\n{_TEXT}# {number}\n{_TEXT[:60]}", temperature=0)


def _schema(server: RunningServer, number: int) -> str:
    form = {"type": "json_schema", "json_schema": {"name": "sizes", "schema": _SCHEMA}}
    fields = {"response_format": form, "seed": number, "ignore_eos": False}
    return _completion(server, prompt=f"# {number}\n{_TEXT}", **fields)


class _Predicted:
    """The answer is asked for once, before it is measured."""

    def __init__(self) -> None:
        self._answers: dict[int, str] = {}

    def __call__(self, server: RunningServer, number: int) -> str:
        prediction: dict[str, Any] = {}
        if number in self._answers:
            words = self._answers[number].split(" ")
            words[len(words) // 2] = "otherwise"
            prediction = {"prediction": {"type": "content", "content": " ".join(words)}}
        content = f"{number}: {_TEXT}"
        body: dict[str, Any] = {"model": _NAME, "max_tokens": _NUM_TOKENS, "temperature": 0}
        body["ignore_eos"] = True
        body["messages"] = [{"role": "user", "content": content}]
        body |= prediction
        response = server.post("/v1/chat/completions", body, timeout=600)
        response.raise_for_status()
        message = response.json()["choices"][0]["message"]
        text = (message.get("reasoning_content") or "") + (message["content"] or "")
        return self._answers.setdefault(number, text)


CASES: dict[str, Ask] = {
    "free": _free,
    "hopeless": _hopeless,
    "quote": _quote,
    "schema": _schema,
    "predicted": _Predicted(),
}


def _tokens_per_s(server: RunningServer, ask: Ask, streams: int, first: int) -> tuple[float, str]:
    """And a digest of the answers."""
    before = server.metric("generated_tokens_total")
    begun_s = time.monotonic()
    with ThreadPoolExecutor(streams) as pool:
        answers = list(pool.map(lambda number: ask(server, number), range(first, first + streams)))
    seconds = time.monotonic() - begun_s
    digest = hashlib.sha256("\0".join(answers).encode()).hexdigest()[:8]
    return (server.metric("generated_tokens_total") - before) / seconds, digest


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model")
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--streams", nargs="+", type=int, default=[1, 8])
    parser.add_argument("--rounds", type=int, default=5)
    options, flags = parser.parse_known_args(argv)
    differ = False
    none = ("--speculative-config", '{"num_speculative_tokens": 0}')
    shared = (options.model, "--served-model-name", _NAME, *flags)
    with ready(RunningServer(*shared, *none), RunningServer(*shared)) as servers:
        print("| case | streams | without | with | ratio | its range | same answers |")
        print("|---|---:|---:|---:|---:|---|---|")
        for name in options.cases:
            for streams in options.streams:
                rates: list[list[float]] = [[], []]
                digests: list[set[str]] = [set(), set()]
                for turn in range(options.rounds + 1):
                    order = (0, 1) if turn % 2 else (1, 0)
                    for which in order:
                        first = 1000 * streams + (turn if name != "predicted" else 0) * streams
                        rate, digest = _tokens_per_s(servers[which], CASES[name], streams, first)
                        digests[which].add(digest)
                        if turn:  # the first warms up
                            rates[which].append(rate)
                plain, drafted = map(statistics.median, rates)
                ratios = sorted(b / a for a, b in zip(*rates, strict=True))
                is_same = digests[0] == digests[1]
                differ |= not is_same
                print(
                    f"| {name} | {streams} | {plain:.1f} | {drafted:.1f} | {drafted / plain:.2f} | "
                    f"{ratios[0]:.2f} to {ratios[-1]:.2f} | {'yes' if is_same else 'NO'} |",
                    flush=True,
                )
        for line in servers[1].get("/metrics").text.splitlines():
            if line.startswith("penstock_spec_decode") and "_per_pos" not in line:
                print(line)
    return int(differ)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
