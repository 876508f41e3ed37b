"""A stream that one server began goes on at another, with the same bytes."""

import contextlib
import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import pytest

from tests.chaos.load import TOOL, events_of, joined
from tests.support.serving import MAX_MODEL_LEN, MODEL, RunningServer, running_server, wait_until

KEY = "a key of routers"
NESTED = "[" * 2000 + "]" * 2000


class Servers(NamedTuple):
    first: RunningServer
    second: RunningServer


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Servers]:
    file = tmp_path_factory.mktemp("keys") / "handover"
    file.write_text(KEY + "\n")
    with (
        # So slow that each token has an event.
        running_server("--scripted-step-ms", "2") as first,
        running_server("--handover-key-file", str(file)) as second,
    ):
        yield Servers(first, second)


PLAIN: dict[str, Any] = {"model": MODEL, "max_tokens": 40, "seed": 5, "temperature": 1.0}
STREAM = {"stream": True, "stream_options": {"include_usage": True}, "return_token_ids": True}
COMPLETION = PLAIN | STREAM | {"prompt": "Once upon a time"}
CHAT = PLAIN | STREAM | {"messages": [{"role": "user", "content": "Who are you?"}]}
COMPLETIONS, CHATS = "/v1/completions", "/v1/chat/completions"
KINDS = {
    "greedy": (COMPLETIONS, COMPLETION | {"temperature": 0, "seed": None}),
    "n = 3": (COMPLETIONS, COMPLETION | {"n": 3}),
    "penalties": (COMPLETIONS, COMPLETION | {"frequency_penalty": 0.7, "min_tokens": 30}),
    "logprobs": (COMPLETIONS, COMPLETION | {"logprobs": 2}),
    "stop strings": (COMPLETIONS, COMPLETION | {"stop": ["zq", "\n\n\n\n"]}),
    "regex": (COMPLETIONS, COMPLETION | {"guided_regex": "[a-z ]{40}[0-9]+"}),
    "echo": (COMPLETIONS, COMPLETION | {"echo": True}),
    "chat": (CHATS, CHAT),
    "chat logprobs": (CHATS, CHAT | {"logprobs": True, "top_logprobs": 1}),
    "tools": (
        CHATS,
        CHAT | {"tools": [{"type": "function", "function": TOOL}], "tool_choice": "required"},
    ),
}


def begin(server: RunningServer, path: str, body: Any, num_events: int) -> list[Any]:
    """Reads so many events, and leaves."""
    events: list[Any] = []
    with httpx.stream("POST", server.url + path, json=body, timeout=60) as response:
        for line in response.iter_lines():
            if line.startswith("data: ") and len(events) < num_events:
                events.append(json.loads(line[6:]))
            if len(events) == num_events:
                break
    return events


def answers_in(events: list[Any], num_answers: int) -> list[dict[str, Any]]:
    answers: list[dict[str, Any]] = [
        {"index": index, "token_ids": [], "finish_reason": None} for index in range(num_answers)
    ]
    for event in events:
        for choice in event["choices"]:
            answer = answers[choice["index"]]
            answer["token_ids"] += choice.get("token_ids") or []
            answer["finish_reason"] = choice["finish_reason"] or answer["finish_reason"]
    return answers


def resume(server: RunningServer, handed: Any, key: str = KEY) -> httpx.Response:
    return server.post("/internal/resume", handed, headers={"x-penstock-handover-key": key})


@pytest.mark.parametrize("num_events", [1, 7, 19])
@pytest.mark.parametrize("kind", KINDS)
def test_a_stream_goes_on_at_another_server_where_it_stopped(
    servers: Servers, kind: str, num_events: int
) -> None:
    path, body = KINDS[kind]
    whole = events_of(servers.first.post(path, body).text)
    # On a busy machine an event has several tokens: at least the last of the first to end is left.
    ends = (i for i, e in enumerate(whole) for c in e["choices"] if c["finish_reason"])
    tokens = [i for i in range(next(ends) + 1) for c in whole[i]["choices"] if c.get("token_ids")]
    begun = whole[: min(num_events, tokens[-1])]
    answers = answers_in(begun, body.get("n", 1))
    reply = resume(servers.second, {"path": path, "body": body, "answers": answers})
    assert reply.status_code == 200, reply.text
    assert list(joined(begun + events_of(reply.text))) == list(joined(whole))


def test_a_router_leaves_one_server_in_a_stream_and_goes_on_at_another(servers: Servers) -> None:
    body = COMPLETION | {"max_tokens": 400, "ignore_eos": True}
    whole = events_of(servers.second.post(COMPLETIONS, body).text)
    begun = begin(servers.first, COMPLETIONS, body, 3)
    handed = {"path": COMPLETIONS, "body": body, "answers": answers_in(begun, 1)}
    rest = events_of(resume(servers.second, handed).text)
    assert list(joined(begun + rest)) == list(joined(whole))


def test_all_streams_of_a_killed_server_go_on_at_one_that_is_busy(servers: Servers) -> None:
    """Four run at a time: some have ended, some are in the middle, and some have no token yet,
    which are handed over too."""
    bodies = [COMPLETION | {"seed": seed, "max_tokens": 100} for seed in range(12)]
    flags = ("--scripted-step-ms", "20", "--max-num-seqs", "4")
    with running_server(*flags) as killed, ThreadPoolExecutor(24) as threads:
        reading = [threads.submit(read, killed, body) for body in bodies]
        wait_until(lambda: killed.metric("generated_tokens_total") > 420)
        killed.process.kill()
        own = [threads.submit(read, servers.second, body) for body in bodies]
        begun = [each.result() for each in reading]
        cut = [i for i, events in enumerate(begun) if events[-1:] != ["[DONE]"]]
        assert len(cut) < 12 and 0 < sum(bool(begun[i]) for i in cut) < len(cut)
        rests = threads.map(lambda i: go_on(servers, bodies[i], begun[i]), cut)
        for i, rest in zip(cut, rests, strict=True):
            begun[i] += rest
    wholes = [each.result() for each in own]
    assert [list(joined(each)) for each in begun] == [list(joined(each)) for each in wholes]


def read(server: RunningServer, body: Any) -> list[Any]:
    """The events of a stream to its end, or to that of the server."""
    lines: list[str] = []
    with (
        contextlib.suppress(httpx.TransportError),
        httpx.stream("POST", server.url + COMPLETIONS, json=body, timeout=60) as response,
    ):
        for line in response.iter_lines():
            lines.append(line)  # noqa: PERF402  # what came before the end is kept
    return events_of("\n".join(lines))


def go_on(servers: Servers, body: Any, begun: list[Any]) -> list[Any]:
    handed = {"path": COMPLETIONS, "body": body, "answers": answers_in(begun, 1)}
    return events_of(resume(servers.second, handed).text)


def test_an_answer_that_has_ended_stays_so(servers: Servers) -> None:
    body = COMPLETION | {"n": 2}
    whole = events_of(servers.first.post(COMPLETIONS, body).text)
    of_first = [e for e in whole[:-1] for c in e["choices"] if c["index"] == 0]
    answers = answers_in(of_first, 2)
    assert answers[0]["finish_reason"] and not answers[1]["token_ids"]
    handed = {"path": COMPLETIONS, "body": body, "answers": answers}
    rest = events_of(resume(servers.second, handed).text)
    assert not any(c["index"] == 0 for e in rest[:-1] for c in e["choices"])
    assert list(joined(of_first + rest)) == list(joined(whole))


def test_nobody_resumes_without_the_key(servers: Servers) -> None:
    handed = {"path": COMPLETIONS, "body": COMPLETION, "answers": [{"index": 0}]}
    assert resume(servers.first, handed).status_code == 404  # it has no key
    for key in ("", "another"):
        refused = resume(servers.second, handed, key)
        assert refused.status_code == 401
        assert "x-penstock-handover-key" in refused.json()["error"]["message"]
    for header in ("authorization", "x-api-key", "x-penstock-admin-key"):
        headers = {header: f"Bearer {KEY}" if header == "authorization" else KEY}
        assert servers.second.post("/internal/resume", handed, headers=headers).status_code == 401
    assert resume(servers.second, handed).status_code == 200


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"path": "/v1/embeddings"}, "path must be one of"),
        ({"body": COMPLETION | {"stream": False, "stream_options": None}}, "only a stream"),
        ({"body": COMPLETION | {"seed": None}}, "give every request a seed"),
        ({"body": COMPLETION | {"prompt": ["a", "b"]}}, "index from 0 to 1"),
        ({"answers": []}, "index from 0 to 0"),
        ({"answers": [{"index": 0}, {"index": 0}]}, "index from 0 to 0"),
        ({"answers": [{"index": 0, "token_ids": [-1]}]}, "at least 0 and below"),
        ({"answers": [{"index": 0, "token_ids": [5] * 40}]}, "give its finish_reason"),
        ({"answers": [{"index": 0, "finish_reason": "stop"}]}, "all answers have ended"),
        ({"answers": [{"index": "0"}]}, "not a request with its answers"),
        (
            {
                "body": COMPLETION | {"n": 2},
                "answers": [
                    {"index": 0, "token_ids": [5] * (MAX_MODEL_LEN + 1), "finish_reason": "stop"},
                    {"index": 1},
                ],
            },
            f"at most {MAX_MODEL_LEN} token_ids",
        ),
    ],
)
def test_what_cannot_be_resumed_is_refused_with_what_to_change(
    servers: Servers, change: Any, words: str
) -> None:
    handed = {"path": COMPLETIONS, "body": COMPLETION, "answers": [{"index": 0}]} | change
    reply = resume(servers.second, handed)
    assert reply.status_code == 400, reply.text
    assert words in reply.json()["error"]["message"]


def test_a_body_that_is_nested_too_deeply_is_refused(servers: Servers) -> None:
    body = f'{{"path": "{COMPLETIONS}", "answers": [], "body": {{"a": {NESTED}}}}}'
    headers = {"x-penstock-handover-key": KEY}
    reply = httpx.post(f"{servers.second.url}/internal/resume", content=body, headers=headers)
    assert reply.status_code == 400, reply.text


def test_a_key_file_with_several_keys_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text("one\ntwo\n")
    server = RunningServer("--handover-key-file", str(file))
    code, errors = server.exit_code()
    assert code == 2 and "has 2 keys; write one" in errors
