"""What goes over the wire, byte for byte where it matters: events, order, headers, stop strings."""

import json
from typing import Any

import httpx
import pytest
from tokenizers import Tokenizer

from penstock.server.output.detokenizer import Vocabulary
from tests.support.paths import ROOT
from tests.support.serving import MODEL, RunningServer, running_server

DEMO_TOKENIZER = ROOT / "engine" / "hub" / "demo_model" / "tokenizer.json"
PATHS = ["/v1/completions", "/v1/chat/completions"]


@pytest.fixture(scope="module")
def server(scripted_server: RunningServer) -> RunningServer:
    return scripted_server


def body_for(path: str, **fields: Any) -> dict[str, Any]:
    prompt = {"prompt": "Once"}
    if "chat" in path:
        prompt = {"messages": [{"role": "user", "content": "Who are you?"}]}  # type: ignore[dict-item]
    return {"model": MODEL, "max_tokens": 12, "seed": 1} | prompt | fields


def stream(server: RunningServer, path: str, **fields: Any) -> tuple[httpx.Response, list[str]]:
    """The response, and the data of each event."""
    response = server.post(path, body_for(path, stream=True, **fields))
    assert response.text.endswith("\n\n")
    events = response.text.removesuffix("\n\n").split("\n\n")
    assert all(event.startswith("data: ") for event in events)
    return response, [event.removeprefix("data: ") for event in events]


def text_of(choice: dict[str, Any]) -> str:
    """Of a plain choice or of a chunk's, of either endpoint."""
    if "text" in choice:
        return str(choice["text"])
    return (choice.get("message") or choice["delta"]).get("content") or ""


def test_a_chat_stream_has_role_then_content_then_finish_then_usage_then_done(
    server: RunningServer,
) -> None:
    _, events = stream(server, PATHS[1], stream_options={"include_usage": True})
    assert events[-1] == "[DONE]"
    chunks = [json.loads(event) for event in events[:-1]]
    first, *contents, finish, usage = chunks
    assert first["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert all(chunk["choices"][0]["delta"]["content"] for chunk in contents)
    assert finish["choices"][0]["delta"] == {}
    reasons = [chunk["choices"][0]["finish_reason"] for chunk in chunks[:-1]]
    assert reasons == [None] * (len(reasons) - 1) + ["length"]
    assert usage["choices"] == [] and usage["usage"]["completion_tokens"] == 12
    assert all(chunk["usage"] is None for chunk in chunks[:-1])


@pytest.mark.parametrize("path", PATHS)
def test_id_time_model_and_fingerprint_stay_the_same_over_a_stream(
    server: RunningServer, path: str
) -> None:
    _, events = stream(server, path, n=2)
    chunks = [json.loads(event) for event in events[:-1]]
    names = ("id", "object", "created", "model", "system_fingerprint")
    assert len({tuple(chunk[name] for name in names) for chunk in chunks}) == 1
    assert all("usage" not in chunk for chunk in chunks)


@pytest.mark.parametrize("path", PATHS)
def test_the_parts_of_each_choice_join_to_the_plain_choice(
    server: RunningServer, path: str
) -> None:
    plain = server.post(path, body_for(path, n=3)).json()
    _, events = stream(server, path, n=3)
    texts = ["", "", ""]
    for event in events[:-1]:
        choice = json.loads(event)["choices"][0]
        texts[choice["index"]] += text_of(choice)
    assert texts == [text_of(choice) for choice in plain["choices"]]


def test_a_completion_stream_has_no_opening_chunk(server: RunningServer) -> None:
    _, events = stream(server, PATHS[0])
    assert json.loads(events[0])["choices"][0]["text"]


def test_a_streams_headers_turn_off_buffering_and_caching_in_proxies(server: RunningServer) -> None:
    response, _ = stream(server, PATHS[0])
    assert response.headers["content-type"] == "text/event-stream; charset=utf-8"
    assert response.headers["cache-control"] == "no-cache"
    assert response.headers["x-accel-buffering"] == "no"


@pytest.mark.parametrize("is_stream", [False, True])
def test_a_stop_string_ends_the_answer_before_it(server: RunningServer, is_stream: bool) -> None:
    whole = server.complete(max_tokens=30).json()["choices"][0]["text"]
    stop = whole[8:13]  # across tokens, as they are two or three characters long
    expected = whole[: whole.index(stop)]
    for extra, text in (({}, expected), ({"include_stop_str_in_output": True}, expected + stop)):
        fields = {"max_tokens": 30, "stop": ["never there", stop], **extra}
        if is_stream:
            _, events = stream(server, PATHS[0], **fields)
            choices = [json.loads(event)["choices"][0] for event in events[:-1]]
            assert choices[-1]["finish_reason"] == "stop"
            assert "".join(choice["text"] for choice in choices) == text
        else:
            choice = server.complete(**fields).json()["choices"][0]
            assert (choice["text"], choice["finish_reason"]) == (text, "stop")


def test_tokens_after_a_stop_string_are_not_counted(server: RunningServer) -> None:
    whole = server.complete(max_tokens=30, logprobs=0).json()["choices"][0]
    tokens = whole["logprobs"]["tokens"]
    stop = "".join(tokens[3:5])
    answer = server.complete(max_tokens=30, stop=stop, logprobs=0).json()
    assert answer["usage"]["completion_tokens"] == 5
    assert answer["choices"][0]["logprobs"]["tokens"] == tokens[:3]


def test_a_stop_string_ends_one_choice_and_not_its_siblings(server: RunningServer) -> None:
    texts = [c["text"] for c in server.complete(n=3, max_tokens=40).json()["choices"]]
    stop = texts[1][5:14]
    choices = server.complete(n=3, max_tokens=40, stop=stop).json()["choices"]
    assert choices[1]["finish_reason"] == "stop" and choices[1]["text"] == texts[1][:5]
    for i in (0, 2):
        assert (choices[i]["text"], choices[i]["finish_reason"]) == (texts[i], "length")


def test_a_stop_token_id_ends_the_answer_and_is_not_shown(server: RunningServer) -> None:
    entries = server.chat(logprobs=True).json()["choices"][0]["logprobs"]["content"]
    vocabulary = Vocabulary(Tokenizer.from_file(str(DEMO_TOKENIZER)))
    ids = {vocabulary.spelling(token_id): token_id for token_id in vocabulary.pieces}
    third = ids[bytes(entries[2]["bytes"])]
    answer = server.chat(stop_token_ids=[third], logprobs=True).json()
    assert answer["choices"][0]["finish_reason"] == "stop"
    assert answer["choices"][0]["logprobs"]["content"] == entries[:2]
    assert answer["usage"]["completion_tokens"] == 3


def test_a_repeated_prompt_reports_its_cached_tokens(server: RunningServer) -> None:
    prompt = list(range(100, 164))
    fresh, again = (server.complete(prompt=prompt).json()["usage"] for _ in range(2))
    assert fresh["prompt_tokens_details"]["cached_tokens"] == 0
    assert again["prompt_tokens_details"]["cached_tokens"] == 48
    other = server.complete(prompt=prompt, cache_salt="mine").json()["usage"]
    assert other["prompt_tokens_details"]["cached_tokens"] == 0


def test_one_keys_cache_is_not_anothers(server: RunningServer) -> None:
    body = body_for(PATHS[0], prompt=list(range(200, 264)))
    cached = []
    for key in ("a", "a", "b"):
        headers = {"Authorization": f"Bearer {key}"}
        usage = server.post(PATHS[0], body, headers=headers).json()["usage"]
        cached.append(usage["prompt_tokens_details"]["cached_tokens"])
    assert cached == [0, 48, 0]


def test_a_request_id_is_taken_or_made_on_every_response(server: RunningServer) -> None:
    given = server.get("/health", headers={"x-request-id": "mine-1"})
    assert given.headers["x-request-id"] == "mine-1"
    for response in (server.get("/nowhere"), server.complete(), server.complete(n=0)):
        assert response.headers["x-request-id"].startswith("req-")
        assert int(response.headers["openai-processing-ms"]) >= 0


def test_a_streamed_comment_keeps_a_silent_stream_alive() -> None:
    with running_server("--max-num-seqs", "1", "--sse-ping-interval", "0.05") as server:
        hog = body_for(PATHS[0], max_tokens=50_000, stream=True)
        waiting = body_for(PATHS[0], stream=True)
        with (
            httpx.stream("POST", server.url + PATHS[0], json=hog) as first,
            httpx.stream("POST", server.url + PATHS[0], json=waiting) as second,
        ):
            running, silent = first.iter_raw(), second.iter_raw()
            next(running)
            assert next(silent) == b": ping\n\n"


def test_metrics_agree_with_the_requests(server: RunningServer) -> None:
    names = ("prompt_tokens_total", "generated_tokens_total", 'requests_total{outcome="length"}')
    before = [server.metric(name) for name in names]
    answer = server.complete(n=2, max_tokens=10).json()
    after = [server.metric(name) for name in names]
    assert [b - a for a, b in zip(before, after, strict=True)] == [
        answer["usage"]["prompt_tokens"],
        20,
        1,
    ]
    assert server.metric("time_to_first_token_seconds_count") > 0
    assert server.metric('step_time_seconds_count{class="decode"}') > 0


def test_metrics_name_no_utilization_of_an_unknown_peak(server: RunningServer) -> None:
    text = server.get("/metrics").text
    assert "penstock_model_bandwidth_utilization_ratio{" not in text
    assert 'penstock_model_info{architecture="scripted"' in text
