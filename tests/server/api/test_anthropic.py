"""Anthropic's `/v1/messages` with Anthropic's own client and its strict validation."""

import itertools
import json
import signal
from collections.abc import Iterator
from typing import Any

import anthropic
import httpx
import pytest

from penstock.server.api.anthropic.writer import MessageWriter
from penstock.server.errors import InvalidRequest
from penstock.server.output.delta import OutputDelta, Usage
from penstock.server.output.parts import CallArguments, CallStart, Part, ReasoningPart, TextPart
from penstock.server.protocol.anthropic import MessagesRequest, chat_request
from tests.support.serving import MODEL, RunningServer, running_server, wait_until

PATH = "/v1/messages"
USER = {"role": "user", "content": "Who are you?"}


@pytest.fixture(scope="module")
def server(scripted_server: RunningServer) -> RunningServer:
    return scripted_server


def client_of(server: RunningServer, api_key: str = "x") -> anthropic.Anthropic:
    return anthropic.Anthropic(
        base_url=server.url, api_key=api_key, max_retries=0, _strict_response_validation=True
    )


@pytest.fixture(scope="module")
def client(server: RunningServer) -> Iterator[anthropic.Anthropic]:
    with client_of(server) as client:
        yield client


def ask(client: anthropic.Anthropic, **fields: Any) -> Any:
    options: dict[str, Any] = {"model": MODEL, "messages": [USER], "max_tokens": 12} | fields
    return client.messages.create(**options, extra_body={"seed": 3})


def test_a_plain_message_passes_the_clients_strict_validation(
    client: anthropic.Anthropic,
) -> None:
    message = ask(client, system="Be kind.")
    assert (message.role, message.stop_reason) == ("assistant", "max_tokens")
    assert message.content[0].text
    assert message.usage.output_tokens == 12 and message.usage.input_tokens > 0


def test_the_stream_has_every_event_in_order(client: anthropic.Anthropic) -> None:
    plain = ask(client)
    events = list(ask(client, stream=True))
    kinds = [kind for kind, _ in itertools.groupby(event.type for event in events)]
    assert kinds == [  # the client keeps the ping to itself
        "message_start",
        "content_block_start",
        "content_block_delta",
        "content_block_stop",
        "message_delta",
        "message_stop",
    ]
    assert "".join(e.delta.text for e in events if e.type == "content_block_delta") == (
        plain.content[0].text
    )
    assert events[-2].delta.stop_reason == "max_tokens"
    assert events[-2].usage.output_tokens == 12


def test_a_ping_follows_the_start_of_the_first_block(server: RunningServer) -> None:
    body = {"model": MODEL, "messages": [USER], "max_tokens": 4, "stream": True}
    events = server.post(PATH, body).text.removesuffix("\n\n").split("\n\n")
    names = [event.split("\n")[0].removeprefix("event: ") for event in events]
    assert names[:4] == ["message_start", "content_block_start", "ping", "content_block_delta"]


def test_the_stream_helper_of_the_client_accumulates_a_whole_message(
    client: anthropic.Anthropic,
) -> None:
    options: dict[str, Any] = {"model": MODEL, "messages": [USER], "max_tokens": 12}
    with client.messages.stream(**options, extra_body={"seed": 3}) as stream:
        final = stream.get_final_message()
    plain = ask(client)
    assert final.content[0].text == plain.content[0].text  # type: ignore[union-attr]
    assert final.stop_reason == "max_tokens"
    assert final.usage.output_tokens == 12


def test_the_stop_sequence_that_ended_the_message_is_reported(client: anthropic.Anthropic) -> None:
    text = ask(client).content[0].text
    stop = text[6:10]
    for stream in (False, True):
        answer = ask(client, stop_sequences=["nowhere to be found", stop], stream=stream)
        end = list(answer)[-2].delta if stream else answer
        assert (end.stop_reason, end.stop_sequence) == ("stop_sequence", stop)
    assert ask(client, stop_sequences=[stop]).content[0].text == text[: text.index(stop)]


def test_system_and_text_blocks_read_as_one_text(client: anthropic.Anthropic) -> None:
    parts = [{"type": "text", "text": "Who are "}, {"type": "text", "text": "you?"}]
    cached = {"type": "text", "text": "Be kind.", "cache_control": {"type": "ephemeral"}}
    in_blocks = ask(client, messages=[{"role": "user", "content": parts}], system=[cached])
    assert in_blocks.content[0].text == ask(client, system="Be kind.").content[0].text


def test_tokens_are_counted_as_a_message_would_count_them(client: anthropic.Anthropic) -> None:
    counted = client.messages.count_tokens(model=MODEL, messages=[USER], system="Be kind.")  # type: ignore[list-item]
    usage = ask(client, system="Be kind.").usage
    assert counted.input_tokens == usage.input_tokens + usage.cache_read_input_tokens


def test_thinking_reaches_the_chat_template() -> None:
    body = {"model": MODEL, "max_tokens": 4, "messages": [USER], "thinking": {"type": "disabled"}}
    chat = chat_request(MessagesRequest.parse(json.dumps(body).encode()), thinks=True)
    assert chat.chat_template_kwargs == {"enable_thinking": False}


def test_a_reasoning_budget_reaches_only_a_model_that_reasons() -> None:
    thinking = {"type": "adaptive", "budget_tokens": 1024}
    body = {"model": MODEL, "max_tokens": 4, "messages": [USER], "thinking": thinking}
    fields = MessagesRequest.parse(json.dumps(body).encode())
    assert chat_request(fields, thinks=True).answer_rules.thinking_budget == 1024
    assert chat_request(fields, thinks=False).answer_rules.thinking_budget is None


def test_a_budget_for_disabled_reasoning_is_refused() -> None:
    thinking = {"type": "disabled", "budget_tokens": 1024}
    body = {"model": MODEL, "max_tokens": 4, "messages": [USER], "thinking": thinking}
    with pytest.raises(InvalidRequest, match=r"thinking\.budget_tokens"):
        MessagesRequest.parse(json.dumps(body).encode())


def test_what_came_from_the_cache_is_counted_apart(client: anthropic.Anthropic) -> None:
    long = [{"role": "user", "content": "Tell me of the sea and of the ships. " * 8}]
    first, second = (ask(client, messages=long).usage for _ in range(2))
    assert second.cache_read_input_tokens > 0
    assert first.input_tokens + first.cache_read_input_tokens == (
        second.input_tokens + second.cache_read_input_tokens
    )


def test_temperature_0_gives_the_same_message_whatever_the_seed(
    client: anthropic.Anthropic,
) -> None:
    def texts(**sampling: Any) -> set[str]:
        options: dict[str, Any] = {"model": MODEL, "messages": [USER], "max_tokens": 12}
        made = [
            client.messages.create(**options, extra_body=sampling | {"seed": seed})
            for seed in (1, 2)
        ]
        return {message.content[0].text for message in made}

    assert len(texts(temperature=0)) == 1
    assert len(texts(temperature=1)) == 2


@pytest.mark.parametrize("stream", [False, True])
def test_a_limit_beyond_the_context_is_cut_and_a_header_says_to_what(
    server: RunningServer, stream: bool
) -> None:
    body = {"model": MODEL, "messages": [USER], "stream": stream, "stop_sequences": ["a", "e"]}
    short = server.post("/v1/messages", {**body, "max_tokens": 4})
    assert "x-max-tokens" not in short.headers
    answer = server.post("/v1/messages", {**body, "max_tokens": 1_000_000})
    assert answer.status_code == 200, answer.text
    counted = server.post("/v1/messages/count_tokens", {"model": MODEL, "messages": [USER]})
    context = server.get(f"/v1/models/{MODEL}").json()["max_model_len"]
    room = context - counted.json()["input_tokens"]
    assert answer.headers["x-max-tokens"] == str(room)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"messages": []}, "messages"),
        ({"max_tokens": None}, "max_tokens"),
        ({"temperature": 1.5}, "temperature"),
        ({"system": 7}, "system must be a string or a list of text blocks"),
        ({"messages": [{"role": "king", "content": "x"}]}, r"messages\[0\].role"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image"}]}]},
            r"messages\[0\].content\[0\].source is missing",
        ),
        ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, r"tools\[0\].type"),
        ({"mcp_servers": [{"url": "x"}]}, "mcp_servers"),
        ({"tool_choice": {"type": "any"}}, "tool_choice requires tools"),
        ({"tool_choice": {"type": "tool", "name": "f"}}, "tool_choice requires tools"),
        (
            {"context_management": {"edits": [{"type": "clear_tool_uses_20250919"}]}},
            "context_management",
        ),
    ],
)
def test_a_bad_field_is_refused_by_its_name_in_anthropics_shape(
    server: RunningServer, fields: dict[str, Any], words: str
) -> None:
    response = server.post(PATH, {"model": MODEL, "messages": [USER], "max_tokens": 4} | fields)
    assert response.status_code == 400
    body = response.json()
    assert body["type"] == "error" and set(body["error"]) == {"type", "message"}
    assert body["error"]["type"] == "invalid_request_error"
    with pytest.raises(ValueError, match=words):
        raise ValueError(body["error"]["message"])


@pytest.mark.parametrize("thread", [{"type": "create"}, {"type": "continue"}])
def test_a_thread_is_refused_so_that_clients_send_the_whole_conversation(
    server: RunningServer, thread: dict[str, Any]
) -> None:
    fields = {"model": MODEL, "messages": [USER], "max_tokens": 4, "thread": thread}
    response = server.post(PATH, fields)
    assert response.status_code == 400
    error = response.json()["error"]
    assert error["details"] == {
        "error_code": "thread_unsupported_request",
        "unsupported": ["thread"],
    }
    assert error["message"].startswith("thread is not supported")
    assert server.post(PATH, fields | {"thread": None}).status_code == 200


def test_claude_codes_setting_to_keep_all_reasoning_is_accepted(
    server: RunningServer,
) -> None:
    edits = [{"type": "clear_thinking_20251015", "keep": "all"}]
    fields = {"model": MODEL, "messages": [USER], "max_tokens": 4}
    response = server.post(PATH, fields | {"context_management": {"edits": edits}})
    assert response.status_code == 200


def test_a_model_that_is_not_here_and_a_wrong_method_have_anthropics_errors(
    server: RunningServer, client: anthropic.Anthropic
) -> None:
    with pytest.raises(anthropic.NotFoundError) as caught:
        ask(client, model="nobody")
    assert caught.value.type == "not_found_error"
    assert server.get(PATH).json()["type"] == "error"
    assert server.get(f"{PATH}/nothing").json()["error"]["type"] == "not_found_error"


def test_a_requests_id_is_where_anthropics_clients_read_it(
    server: RunningServer, client: anthropic.Anthropic
) -> None:
    assert (ask(client)._request_id or "").startswith("req-")
    with pytest.raises(anthropic.NotFoundError) as caught:
        ask(client, model="nobody")
    assert isinstance(caught.value.body, dict)
    assert caught.value.request_id == caught.value.body["request_id"]
    assert "request-id" not in server.get("/v1/models").headers


def test_anthropics_clients_can_list_the_models(client: anthropic.Anthropic) -> None:
    page = client.models.list()
    assert (page.first_id, page.has_more) == (MODEL, False)
    card = client.models.retrieve(MODEL)
    assert (card, card.display_name, card.type) == (page.data[0], MODEL, "model")
    assert card.created_at.tzinfo is not None


def test_anthropics_header_holds_the_key_too() -> None:
    with running_server("--api-key", "secret") as server:
        with client_of(server, "secret") as client:
            assert ask(client).content[0].text
        with client_of(server, "wrong") as client, pytest.raises(anthropic.AuthenticationError):
            ask(client)


def test_a_disconnect_frees_everything_plain_or_streamed(server: RunningServer) -> None:
    body = {"model": MODEL, "messages": [USER], "max_tokens": 50_000, "seed": 1}
    body |= {"ignore_eos": True}
    with httpx.stream("POST", server.url + PATH, json=body | {"stream": True}) as response:
        parts = response.iter_raw()
        next(parts)
        wait_until(lambda: server.metric("running_sequences") == 1)
    server.wait_until_idle()
    with pytest.raises(httpx.ReadTimeout):
        httpx.post(server.url + PATH, json=body, timeout=0.3)
    server.wait_until_idle()


def test_a_failure_in_the_middle_ends_the_stream_with_anthropics_error_event() -> None:
    with running_server("--shutdown-timeout", "0.2") as server:
        body = {"model": MODEL, "messages": [USER], "max_tokens": 50_000, "ignore_eos": True}
        with httpx.stream("POST", server.url + PATH, json=body | {"stream": True}) as response:
            parts = response.iter_text()
            next(parts)
            server.process.send_signal(signal.SIGTERM)
            rest = "".join(parts)
    name, data = rest.removesuffix("\n\n").split("\n\n")[-1].split("\n")
    assert name == "event: error"
    error = json.loads(data.removeprefix("data: "))
    assert (error["type"], error["error"]["type"]) == ("error", "api_error")


@pytest.fixture(scope="module")
def demo(demo_server: RunningServer) -> Iterator[Any]:
    """The demo model, which a grammar can hold to a call."""
    with client_of(demo_server) as client:
        yield client


WEATHER: dict[str, Any] = {
    "name": "weather",
    "input_schema": {
        "type": "object",
        "properties": {"city": {"type": "string", "maxLength": 8}},
        "required": ["city"],
        "additionalProperties": False,
    },
}


def test_the_demo_model_ends_its_turn(demo: Any) -> None:
    message = demo.messages.create(
        model=MODEL, messages=[USER], max_tokens=100, extra_body={"temperature": 0}
    )
    assert message.stop_reason == "end_turn" and "model" in message.content[0].text


def test_a_tool_is_used_and_its_result_taken(demo: Any) -> None:
    asked: dict[str, Any] = {"model": MODEL, "max_tokens": 60, "tools": [WEATHER]}
    choice = {"type": "tool", "name": "weather"}
    with demo.messages.stream(messages=[USER], tool_choice=choice, **asked) as stream:
        events = list(stream)
        first = stream.get_final_message()
    (block,) = first.content
    assert (block.type, block.name, set(block.input)) == ("tool_use", "weather", {"city"})
    assert first.stop_reason == "tool_use"
    partial = "".join(e.partial_json for e in events if e.type == "input_json")
    assert json.loads(partial) == block.input
    result = {"type": "tool_result", "tool_use_id": block.id, "content": "sunny"}
    messages = [USER, first.to_param(), {"role": "user", "content": [result]}]
    second = demo.messages.create(messages=messages, tool_choice={"type": "none"}, **asked)
    assert second.content[0].text


def test_a_prefill_is_gone_on_from(demo: Any) -> None:
    begun = {"role": "assistant", "content": "I am"}
    message = demo.messages.create(
        model=MODEL, messages=[USER, begun], max_tokens=20, extra_body={"temperature": 0}
    )
    assert message.content[0].text and not message.content[0].text.startswith("I am")


def test_output_config_holds_the_answer_to_its_schema(demo: Any) -> None:
    form = {"type": "json_schema", "schema": WEATHER["input_schema"]}
    message = demo.messages.create(
        model=MODEL, messages=[USER], max_tokens=60, output_config={"format": form}
    )
    assert set(json.loads(message.content[0].text)) == {"city"}


def delta(*parts: Part, end: str | None = None) -> OutputDelta:
    return OutputDelta(0, "", [], end, (), parts)


def test_reasoning_is_signed_before_its_block_ends() -> None:
    writer = MessageWriter(MODEL, Usage(4))
    writer.delta(delta(ReasoningPart("Well")))
    events = writer.delta(delta(TextPart("I ask."))).split(b"\n\n")
    assert b'"delta":{"type":"signature_delta","signature":""}' in events[0]
    assert b'"type":"content_block_stop","index":0' in events[1]
    assert b"signature" not in b"".join(events[2:]) + writer.end(Usage(4, 9))


def test_reasoning_text_and_calls_are_separate_blocks() -> None:
    writer = MessageWriter(MODEL, Usage(4))
    writer.delta(delta(ReasoningPart("Well"), TextPart("I "), TextPart("ask.")))
    writer.delta(delta(CallStart(0, "call_a", "look"), CallArguments(0, '{"at"')))
    writer.delta(delta(CallArguments(0, ":1}"), CallStart(1, "call_b", "wait"), end="tool_calls"))
    writer.end(Usage(4, 9))
    assert writer.message["content"] == [
        {"type": "thinking", "thinking": "Well", "signature": ""},
        {"type": "text", "text": "I ask."},
        {"type": "tool_use", "id": "call_a", "name": "look", "input": {"at": 1}},
        {"type": "tool_use", "id": "call_b", "name": "wait", "input": {}},
    ]
    assert writer.message["stop_reason"] == "tool_use"
