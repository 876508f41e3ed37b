"""`python -m tests.bench.server.demo_draft`: the demo model's answers with its draft and without.

Two servers, one without drafts, are asked the questions of the demo model's corpus in turns, one at
a time, several times each; of each question the shortest time counts, as on a machine that does
something else besides. Each request has a cache salt of its own, so that no earlier answer is a
source of drafts. Answers are compared. Flags go to both servers.
"""

import argparse
import sys
import time
from typing import Any

from tests.demo_model.training.corpus import documents
from tests.demo_model.training.train import HELD_OUT_SEED_OFFSET
from tests.support.paths import DEMO_MODEL
from tests.support.serving import RunningServer, ready

WAYS: dict[str, dict[str, float]] = {
    "as served": {},
    "greedy": {"temperature": 0.0},
    "temperature 1": {"temperature": 1.0, "top_p": 1.0},
}
_NAME, _NO_DRAFTS = "model", '{"num_speculative_tokens": 0}'
_COUNTS = ("drafts", "draft_tokens", "accepted_tokens")
# A shorter answer is of the prompt's step more than of drafts.
_MIN_CHARACTERS = 80


def question(number: int) -> list[dict[str, str]]:
    """A conversation up to its last answer, which the model has not learned from."""
    source = documents(HELD_OUT_SEED_OFFSET + number)
    found = next(
        each.messages
        for each in source
        if each.messages and len(each.messages[-1].content) >= _MIN_CHARACTERS
    )
    return [{"role": each.role, "content": each.content} for each in found[:-1]]


def asked(server: RunningServer, number: int, salt: str, **fields: float) -> tuple[float, Any]:
    """How long the answer took, and it."""
    body = {"model": _NAME, "messages": question(number), "seed": number, "max_tokens": 200}
    begun_s = time.perf_counter()
    response = server.post("/v1/chat/completions", body | {"cache_salt": salt} | fields)
    took_s = time.perf_counter() - begun_s
    response.raise_for_status()
    found = response.json()
    return took_s, (found["choices"][0]["message"]["content"], found["usage"]["completion_tokens"])


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--questions", type=int, default=12)
    parser.add_argument("--rounds", type=int, default=5)
    options, flags = parser.parse_known_args(argv)
    shared = (str(DEMO_MODEL), "--served-model-name", _NAME, *flags)
    plain = RunningServer(*shared, "--speculative-config", _NO_DRAFTS)
    with ready(plain, RunningServer(*shared)) as servers:
        print("| answers | tokens/s without | with | ratio | accepted | tokens a drafted step |")
        print("|---|---:|---:|---:|---:|---:|")
        for way, fields in WAYS.items():
            before = _counts(servers[1])
            best: dict[tuple[int, int], float] = {}
            answers: dict[tuple[int, int], Any] = {}
            for turn in range(options.rounds):
                for number in range(options.questions):
                    for which in (0, 1) if (turn + number) % 2 else (1, 0):
                        salt = f"{way} {turn} {number}"
                        took_s, answer = asked(servers[which], number, salt, **fields)
                        key = number, which
                        best[key] = min(best.get(key, took_s), took_s)
                        assert answers.setdefault(key, answer) == answer, (key, way)
            numbers = range(options.questions)
            assert all(answers[n, 0] == answers[n, 1] for n in numbers), f"{way}: answers differ"
            tokens = sum(answers[n, 0][1] for n in numbers)
            rates = [tokens / sum(best[n, which] for n in numbers) for which in (0, 1)]
            rows, drafts, accepted = (
                now - earlier for now, earlier in zip(_counts(servers[1]), before, strict=True)
            )
            print(
                f"| {way} | {rates[0]:.0f} | {rates[1]:.0f} | {rates[1] / rates[0]:.2f} | "
                f"{accepted / max(1, drafts):.0%} of {drafts:.0f} | "
                f"{1 + accepted / max(1, rows):.2f} |",
                flush=True,
            )
    return 0


def _counts(server: RunningServer) -> list[float]:
    """Of the draft model's."""
    return [server.metric(f'spec_decode_{name}_total{{source="model"}}') for name in _COUNTS]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
