"""`python -m tests.bench.server.drafts MODEL`: output tokens a second with drafts and without.

The servers are all loaded and asked in turns; what each answers with drafts is compared with what
it answers without. The cases:

    free      answers drawn at temperature 1, of which little repeats
    hopeless  drawn from ten ids alike, prompts too: drafts are always found, a tenth is right
    quote     greedy answers that are asked to repeat a text: of what a model says twice
    schema    objects by a JSON schema, whose keys repeat
    edit      greedy chats on a text, with the answer as `prediction`, of which one word is another;
              only Penstock takes one

With `--peer llama` and `--peer openvino`, which `python -m tests.bench.peers install` installs in
`--into`, MODEL is one of its shapes, and the peers are asked too, without drafts and with theirs:
llama.cpp's ngram-mod and ngram-simple, and OpenVINO's prompt lookup. OpenVINO is asked what its
server takes here: `quote` and `edit`. Flags after MODEL go to Penstock.
"""

import argparse
import asyncio
import contextlib
import hashlib
import os
import shlex
import statistics
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

import httpx

from tests.bench.in_turns.server import ServerSpec, started
from tests.bench.peers.compare import WEIGHTS, commands, file_names, has_bf16, make_file, usable
from tests.chaos.load import events_of
from tests.support.paths import ROOT

_NUM_TOKENS, _READY_S = 96, 1800.0
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
CASES = ("free", "hopeless", "quote", "schema", "edit")
# Of each peer, what its command gets for its own drafts.
PEER_DRAFTS = {
    "llama": {"ngram-mod": "--spec-type ngram-mod", "ngram-simple": "--spec-type ngram-simple"},
    "openvino": {"lookup": "--prompt-lookup 5"},
}
_GREEDY_ALONE = ("openvino",)


@dataclass(slots=True)
class Served:
    """kind: "penstock", or a peer. drafts: what its drafts are called, empty without. answers: to
    `edit`, by number, which are asked for once, before they are measured."""

    kind: str
    drafts: str
    url: str
    model: str
    answers: dict[int, str] = field(default_factory=dict)

    @property
    def name(self) -> str:
        return f"{self.kind}, {self.drafts or 'none'}"


def body_of(case: str, number: int, served: Served) -> tuple[str, dict[str, Any]] | None:
    """The path and the fields of a request; None for what this server does not take."""
    is_penstock, completions = served.kind == "penstock", "/v1/completions"
    if case in ("free", "hopeless", "schema") and served.kind in _GREEDY_ALONE:
        return None
    if case == "free":
        prompt = f"Number {number}: once upon a time"
        return completions, {"prompt": prompt, "seed": number, "temperature": 1.0}
    if case == "hopeless":
        random = Random(number)
        fields: dict[str, Any] = {"prompt": [random.choice(_IDS) for _ in range(1200)]}
        fields |= {"seed": number, "temperature": 2.0}
        if is_penstock:
            return completions, fields | {"allowed_token_ids": _IDS, "return_token_ids": True}
        return completions, fields | {"logit_bias": {str(each): 100 for each in _IDS}}
    if case == "quote":
        prompt = f"# {number}\n{_TEXT}# {number}\n{_TEXT[:60]}"
        return completions, {"prompt": prompt, "temperature": 0}
    if case == "schema":
        form = {"type": "json_schema", "json_schema": {"name": "sizes", "schema": _SCHEMA}}
        form = {"response_format": form} if is_penstock else {"json_schema": _SCHEMA}
        fields = {"seed": number, "temperature": 1.0, "ignore_eos": False}
        return completions, {"prompt": f"# {number}\n{_TEXT}"} | fields | form
    fields = {"temperature": 0}
    if served.kind in _GREEDY_ALONE:
        return completions, fields | {"prompt": f"{number}: {_TEXT}"}
    fields["messages"] = [{"role": "user", "content": f"{number}: {_TEXT}"}]
    if is_penstock and number in served.answers:
        words = served.answers[number].split(" ")
        words[len(words) // 2] = "otherwise"
        fields["prediction"] = {"type": "content", "content": " ".join(words)}
    return "/v1/chat/completions", fields


def ask(client: httpx.Client, served: Served, case: str, number: int) -> tuple[str, int]:
    """The answer, and how many tokens it has."""
    asked = body_of(case, number, served)
    assert asked is not None
    path, fields = asked
    body = {"model": served.model, "max_tokens": _NUM_TOKENS, "ignore_eos": True, "stream": True}
    body |= {"stream_options": {"include_usage": True}} | fields
    response = client.post(served.url + path, json=body)
    assert response.status_code == 200, f"{served.name}: {response.text[:500]}"
    events = [event for event in events_of(response.text) if event != "[DONE]"]
    errors = [event["error"] for event in events if event.get("error")]
    assert not errors, f"{served.name}: {errors[0]}"
    text, ids = "", list[int]()
    for choice in (choice for event in events for choice in event.get("choices") or ()):
        delta = choice.get("delta") or {}
        text += (choice.get("text") or "") + (delta.get("content") or "")
        text += delta.get("reasoning_content") or ""
        ids += choice.get("token_ids") or []
    (usage,) = [event["usage"] for event in events if event.get("usage")][-1:]
    if case == "edit":
        served.answers.setdefault(number, text)
    return f"{text}{ids}", usage["completion_tokens"]


def tokens_per_s(
    client: httpx.Client, served: Served, case: str, streams: int, first: int
) -> tuple[float, str]:
    """And a digest of the answers."""
    begun_s = time.monotonic()
    with ThreadPoolExecutor(streams) as pool:
        numbers = range(first, first + streams)
        answers = list(pool.map(partial(ask, client, served, case), numbers))
    seconds = time.monotonic() - begun_s
    digest = hashlib.sha256("\0".join(text for text, _ in answers).encode()).hexdigest()[:8]
    return sum(num for _, num in answers) / seconds, digest


def specs(
    options: argparse.Namespace, flags: list[str], peers: list[str]
) -> list[tuple[str, str, ServerSpec]]:
    """Each server's kind, the name of its drafts, and its command; without drafts first."""
    own = f"{sys.executable} -m penstock serve {{model}} --port {{port}} --num-threads {{threads}}"
    if options.weights != "bf16":
        own += f" --quantization {options.weights}"
    own = f"{own} {shlex.join(flags)}"
    found = [
        ("penstock", "", f"{own} --speculative-config '{{\"num_speculative_tokens\": 0}}'"),
        ("penstock", "own", own),
    ]
    if peers:
        files = file_names(options.model, options.into, options.weights)
        cores = sorted(os.sched_getaffinity(0))[: options.threads]
        plain = commands(files, options.into, cores, has_bf16=has_bf16())
        for peer in peers:
            found.append((peer, "", plain[peer]))
            found += [(peer, name, f"{plain[peer]} {m}") for name, m in PEER_DRAFTS[peer].items()]
    return [
        (kind, drafts, ServerSpec(name=f"{kind}-{drafts or 'none'}", command=command))
        for kind, drafts, command in found
    ]


@contextlib.contextmanager
def all_served(
    options: argparse.Namespace, flags: list[str], peers: list[str]
) -> Iterator[list[Served]]:
    model = options.model
    if peers:
        model = str(file_names(options.model, options.into, options.weights).model)
    with contextlib.ExitStack() as stack:
        processes = [
            (kind, drafts, stack.enter_context(started(spec, model=model, threads=options.threads)))
            for kind, drafts, spec in specs(options, flags, peers)
        ]
        yield [
            Served(kind, drafts, each.url, asyncio.run(each.models(_READY_S))[0].id)
            for kind, drafts, each in processes
        ]


def measure(
    client: httpx.Client, servers: list[Served], case: str, streams: int, rounds: int
) -> bool:
    """Prints a row for each server; returns whether Penstock's answers are the same with drafts."""
    able = [each for each in servers if body_of(case, 0, each) is not None]
    rates: list[list[float]] = [[] for _ in able]
    digests: list[set[str]] = [set() for _ in able]
    for turn in range(rounds + 1):
        order = list(enumerate(able))
        for which, served in order[:: (-1) ** turn]:
            first = 1000 * streams + (turn if case != "edit" else 0) * streams
            rate, digest = tokens_per_s(client, served, case, streams, first)
            digests[which].add(digest)
            if turn:  # the first warms up
                rates[which].append(rate)
    is_same = True
    for which, served in enumerate(able):
        plain = next(at for at, each in enumerate(able) if each.kind == served.kind)
        ratios = sorted(b / a for a, b in zip(rates[plain], rates[which], strict=True))
        same = digests[which] == digests[plain]
        is_same &= same or served.kind != "penstock"
        print(
            f"| {case} | {streams} | {served.name} | {statistics.median(rates[which]):.1f} | "
            f"{statistics.median(ratios):.2f} | {ratios[0]:.2f} to {ratios[-1]:.2f} | "
            f"{'yes' if same else 'NO'} |",
            flush=True,
        )
    return is_same


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("model", help="a directory or a name, or with --peer a shape, such as 135m")
    add("--cases", nargs="+", choices=CASES, default=list(CASES))
    add("--streams", nargs="+", type=int, default=[1, 8])
    add("--rounds", type=int, default=5)
    add("--threads", type=int, default=len(os.sched_getaffinity(0)), help="of each server")
    add("--weights", choices=[*WEIGHTS], default="bf16", help="of all servers")
    add("--peer", dest="peers", action="append", choices=[*PEER_DRAFTS], default=[])
    add("--into", type=Path, default=ROOT / "build" / "peers", help="where peers are installed")
    options, flags = parser.parse_known_args(argv)
    options.into = options.into.resolve()
    peers, _ = usable(
        options.peers,
        options.into,
        lambda peer: make_file(peer, options.model, options.into, options.weights),
    )
    is_same = len(peers) == len(options.peers)
    with all_served(options, flags, peers) as servers, httpx.Client(timeout=600) as client:
        print("| case | streams | server, drafts | tok/s | over none | its range | same answers |")
        print("|---|---:|---|---:|---:|---|---|")
        for case in options.cases:
            for streams in options.streams:
                is_same &= measure(client, servers, case, streams, options.rounds)
        for line in client.get(servers[1].url + "/metrics").text.splitlines():
            if line.startswith("penstock_spec_decode") and "_per_pos" not in line:
                print(line)
    return int(not is_same)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
