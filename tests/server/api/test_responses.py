"""`/v1/responses` with the real OpenAI client and its strict validation, and byte for byte."""

import itertools
import json
import signal
import time
from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest
from tokenizers import Tokenizer

from penstock.server.api.responses.store import ResponseStore, StoredResponse
from penstock.server.api.responses.writer import ResponseWriter
from penstock.server.errors import ResponseNotFound
from penstock.server.output.delta import OutputDelta, Usage
from penstock.server.output.detokenizer import Vocabulary
from penstock.server.output.parts import CallArguments, CallStart, Part, ReasoningPart, TextPart
from tests.support.paths import ROOT
from tests.support.serving import MODEL, RunningServer, running_server, wait_until

PATH = "/v1/responses"
DEMO_TOKENIZER = ROOT / "engine" / "hub" / "demo_model" / "tokenizer.json"


@pytest.fixture(scope="module")
def server() -> Iterator[RunningServer]:
    with running_server("--max-stored-responses", "3") as running:
        yield running


def client_of(server: RunningServer, api_key: str = "x") -> openai.OpenAI:
    url = f"{server.url}/v1"
    return openai.OpenAI(
        base_url=url, api_key=api_key, max_retries=0, _strict_response_validation=True
    )


@pytest.fixture(scope="module")
def client(server: RunningServer) -> Iterator[openai.OpenAI]:
    with client_of(server) as client:
        yield client


def respond(client: openai.OpenAI, **fields: Any) -> Any:
    extra = {"seed": 3} | fields.pop("extra_body", {})
    options: dict[str, Any] = {"model": MODEL, "input": "Who are you?", "max_output_tokens": 12}
    options |= fields
    return client.responses.create(**options, extra_body=extra)


def refusal(server: RunningServer, **fields: Any) -> dict[str, Any]:
    """The error object of a request that is a bad one."""
    response = server.post(PATH, {"model": MODEL, "input": "Hi", "max_output_tokens": 4} | fields)
    assert response.status_code == 400, response.text
    error: dict[str, Any] = response.json()["error"]
    return error


def text_before_the_end(client: openai.OpenAI) -> str:
    """A short part of the answer that is there twice in none of its tokens: a stop string."""
    text: str = respond(client).output_text
    return text[6:10]


def test_a_plain_response_passes_the_clients_strict_validation(client: openai.OpenAI) -> None:
    response = respond(client, metadata={"team": "blue"}, instructions="Be kind.", user="u")
    assert response.status == "incomplete"
    assert response.incomplete_details.reason == "max_output_tokens"
    assert response.output_text
    assert response.output[0].status == "incomplete"
    assert response.usage.output_tokens == 12
    assert response.usage.total_tokens == response.usage.input_tokens + 12
    assert (response.metadata, response.instructions) == ({"team": "blue"}, "Be kind.")


def test_a_response_that_ends_by_itself_is_completed(client: openai.OpenAI) -> None:
    stop = text_before_the_end(client)
    response = respond(client, extra_body={"stop": stop})
    assert response.status == response.output[0].status == "completed"
    assert response.incomplete_details is None


def test_the_stream_has_every_event_in_order(client: openai.OpenAI) -> None:
    plain = respond(client)
    events = list(respond(client, stream=True))
    kinds = [kind for kind, _ in itertools.groupby(event.type for event in events)]
    assert kinds == [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.content_part.added",
        "response.output_text.delta",
        "response.output_text.done",
        "response.content_part.done",
        "response.output_item.done",
        "response.incomplete",
    ]
    assert [event.sequence_number for event in events] == list(range(len(events)))
    final = events[-1].response
    assert {e.response.id for e in events if hasattr(e, "response")} == {final.id}
    item_ids = {e.item_id for e in events if hasattr(e, "item_id")}
    assert item_ids == {final.output[0].id}
    deltas = "".join(e.delta for e in events if e.type == "response.output_text.delta")
    assert deltas == final.output_text == plain.output_text
    assert next(e for e in events if e.type == "response.output_text.done").text == deltas
    done = next(e for e in events if e.type == "response.output_item.done")
    assert done.item == final.output[0]
    assert final.usage.output_tokens == 12


def test_each_event_has_its_type_twice_and_no_done_follows(server: RunningServer) -> None:
    body = {"model": MODEL, "input": "Hi", "max_output_tokens": 4, "seed": 1, "stream": True}
    response = server.post(PATH, body)
    assert response.headers["content-type"] == "text/event-stream; charset=utf-8"
    for event in response.text.removesuffix("\n\n").split("\n\n"):
        name, data = event.split("\n")
        assert json.loads(data.removeprefix("data: "))["type"] == name.removeprefix("event: ")


def test_the_stream_helper_of_the_client_accumulates_a_whole_response(
    client: openai.OpenAI,
) -> None:
    stop = text_before_the_end(client)
    options: dict[str, Any] = {"model": MODEL, "input": "Who are you?", "max_output_tokens": 12}
    with client.responses.stream(**options, extra_body={"seed": 3, "stop": stop}) as stream:
        list(stream)
        final = stream.get_final_response()
    assert final.status == "completed"
    assert final.output_text == respond(client, extra_body={"stop": stop}).output_text


def test_logprobs_come_if_include_requests_them(client: openai.OpenAI) -> None:
    asked: dict[str, Any] = {"include": ["message.output_text.logprobs"], "top_logprobs": 2}
    plain = respond(client, **asked).output[0].content[0]
    assert len(plain.logprobs) == 12 and plain.logprobs[0].top_logprobs
    events = list(respond(client, stream=True, **asked))
    streamed = [e.logprobs for e in events if e.type == "response.output_text.delta"]
    assert sum(map(len, streamed)) == 12


def test_previous_response_id_continues_the_conversation(client: openai.OpenAI) -> None:
    first = respond(client)
    second = respond(client, input="And then?", previous_response_id=first.id)
    whole = [
        {"role": "user", "content": "Who are you?"},
        {"role": "assistant", "content": first.output_text},
        {"role": "user", "content": "And then?"},
    ]
    same = respond(client, input=whole, store=False)
    assert second.usage.input_tokens == same.usage.input_tokens
    assert second.output_text == same.output_text
    third = respond(client, input="Why?", previous_response_id=second.id)
    assert third.usage.input_tokens > second.usage.input_tokens


def test_instructions_are_not_carried_over(client: openai.OpenAI) -> None:
    first = respond(client, instructions="Speak of nothing but the weather in the north.")
    second = respond(client, input="So?", previous_response_id=first.id)
    plain = respond(client)
    bare = respond(client, input="So?", previous_response_id=plain.id)
    longer = len(first.output_text.encode()) - len(plain.output_text.encode())
    assert abs(second.usage.input_tokens - bare.usage.input_tokens) <= abs(longer) + 3


def test_a_streamed_response_is_stored_too(client: openai.OpenAI) -> None:
    final = list(respond(client, stream=True))[-1].response
    assert client.responses.retrieve(final.id) == final


def test_a_stored_response_is_retrieved_listed_and_deleted(client: openai.OpenAI) -> None:
    first = respond(client)
    second = respond(client, input="And then?", previous_response_id=first.id)
    assert client.responses.retrieve(second.id) == second
    items = client.responses.input_items.list(second.id, order="asc")
    assert [item.role for item in items] == ["user", "assistant", "user"]  # type: ignore[union-attr]
    newest = client.responses.input_items.list(second.id, limit=1)
    assert newest.has_more and newest.data[0].content[0].text == "And then?"  # type: ignore[union-attr, index]
    client.responses.delete(first.id)
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(first.id)
    assert respond(client, input="Why?", previous_response_id=second.id).output_text


_NO_LIMITS = ["0", "x", "9" * 5000, "-1", "101", "1.5", "1_0", "nan", "inf", "%205", "%D9%A3"]


@pytest.mark.parametrize(
    "query", ["after=a", "order=up", "limit=", *(f"limit={text}" for text in _NO_LIMITS)]
)
def test_a_bad_query_of_a_list_is_refused_by_its_name(
    server: RunningServer, client: openai.OpenAI, query: str
) -> None:
    path = f"{PATH}/{respond(client).id}/input_items?{query}"
    response = server.get(path, headers={"authorization": "Bearer x"})
    assert response.status_code == 400
    assert response.json()["error"]["param"] == query.partition("=")[0]


def test_what_is_not_stored_is_not_found(client: openai.OpenAI) -> None:
    unstored = respond(client, store=False)
    with pytest.raises(openai.NotFoundError) as caught:
        client.responses.retrieve(unstored.id)
    assert caught.value.code == "response_not_found"


def test_to_go_on_from_what_is_not_stored_is_a_bad_request(server: RunningServer) -> None:
    error = refusal(server, previous_response_id="resp_nothing")
    assert error["param"] == "previous_response_id"
    assert error["code"] == "previous_response_not_found"


def test_input_may_be_left_out_only_after_a_previous_response(
    server: RunningServer, client: openai.OpenAI
) -> None:
    first = respond(client)
    assert respond(client, input=openai.omit, previous_response_id=first.id).output_text
    assert refusal(server, input=None)["code"] == "missing_required_parameter"


def test_a_response_reports_the_penalties_that_were_in_effect(server: RunningServer) -> None:
    body = {"model": MODEL, "input": "Hi", "max_output_tokens": 4, "presence_penalty": 0.5}
    response = server.post(PATH, body).json()
    assert (response["presence_penalty"], response["frequency_penalty"]) == (0.5, 0.0)


def test_what_cannot_be_included_is_refused_by_its_place(server: RunningServer) -> None:
    misspelt = ["reasoning.encrypted_content", "message.output_text.logprob"]
    error = refusal(server, include=misspelt)
    assert (error["param"], error["code"]) == ("include[1]", "invalid_value")


def test_another_key_finds_nothing(server: RunningServer, client: openai.OpenAI) -> None:
    mine = respond(client)
    with client_of(server, "y") as other, pytest.raises(openai.NotFoundError):
        other.responses.retrieve(mine.id)


def test_a_full_store_evicts_the_least_recently_used_response() -> None:
    # A server of its own: what other keys have stored takes a share of the room.
    with running_server("--max-stored-responses", "3") as server, client_of(server) as client:
        first, second, third = (respond(client).id for _ in range(3))
        client.responses.retrieve(first)
        respond(client)
        assert client.responses.retrieve(first) and client.responses.retrieve(third)
        with pytest.raises(openai.NotFoundError):
            client.responses.retrieve(second)


def stored(num_bytes: int) -> StoredResponse:
    return StoredResponse(body=b"x" * num_bytes, input_items=b"[]", output_items=b"[]")


def test_a_store_holds_no_more_bytes_than_it_may() -> None:
    store = ResponseStore(max_count=100, max_bytes=10_000)
    for i in range(20):
        store.put("", "", f"r{i}", stored(3_000))
        assert store.num_bytes <= 10_000
    assert len(store) == 2
    store.put("", "", "huge", stored(20_000))
    assert len(store) == 2
    store.delete("", "r19")
    store.delete("", "r18")
    assert (len(store), store.num_bytes) == (0, 0)
    with pytest.raises(ResponseNotFound):
        store.get("", "r19")


def test_what_one_key_stores_evicts_nothing_of_another() -> None:
    store = ResponseStore(max_count=4, max_bytes=60_000)
    store.put("a", "a", "first", stored(3_000))
    for i in range(20):
        store.put("b", "b", f"r{i}", stored(10))
    store.put("b", "b", "large", stored(24_000))
    assert store.get("a", "first").num_bytes and len(store) <= 4
    with pytest.raises(ResponseNotFound):
        store.get("b", "r0")
    for i in range(4):
        store.put("a", "a", f"r{i}", stored(10))
    assert store.get("b", "large") and len(store) == 4, "nor does the other in return"
    with pytest.raises(ResponseNotFound):
        store.get("a", "first")


@pytest.mark.parametrize("key", ["", "invented {}"])
def test_one_client_has_one_share_of_the_room_whatever_keys_it_invents(key: str) -> None:
    """Without a key it has that of others who send none."""
    store = ResponseStore(max_count=8, max_bytes=100_000)
    for i in range(4):
        store.put("honest", "", f"r{i}", stored(20_000 if i == 0 else 10))
    for num_bytes in (10, 30_000):
        for i in range(100):
            store.put("flood", key.format(i), f"f{i}", stored(num_bytes))
        assert store.get(key.format(99), "f99") and store.num_bytes <= 100_000
        for i in range(4):
            assert store.get("", f"r{i}")
    for i in range(8):
        store.put("honest", "", f"s{i}", stored(10))
    assert store.get(key.format(99), "f99"), "nor does the other in return"


def test_a_response_takes_the_place_of_an_earlier_one_of_its_id() -> None:
    store = ResponseStore(max_count=9, max_bytes=60_000)
    for num_bytes in (30_000, 20_000, 50_000):
        store.put("", "", "r", stored(num_bytes))
        assert (len(store), store.get("", "r").num_bytes) == (1, store.num_bytes)


def test_to_make_room_among_many_keys_takes_time_in_proportion_to_them() -> None:
    """Anybody may invent keys where none is required, one for each response."""

    def least_time_s(count: int) -> float:
        store = ResponseStore(max_count=count, max_bytes=1 << 30)
        for i in range(count):
            store.put(f"client {i}", f"key {i}", "r", stored(1))
        times_s = []
        for turn in range(10):
            began_s = time.thread_time()
            for i in range(8):
                store.put(f"client {turn} {i}", f"key {turn} {i}", "r", stored(1))
            times_s.append(time.thread_time() - began_s)
        return min(times_s)

    assert least_time_s(2048) < 64 * least_time_s(128)


def test_input_tokens_are_counted_without_an_answer(
    server: RunningServer, client: openai.OpenAI
) -> None:
    before = server.metric("generated_tokens_total")
    counted = client.responses.input_tokens.count(model=MODEL, input="Who are you?")
    assert server.metric("generated_tokens_total") == before
    assert counted.input_tokens == respond(client).usage.input_tokens


def test_a_background_response_is_refused_plainly(server: RunningServer) -> None:
    error = refusal(server, background=True)
    assert (error["param"], error["code"]) == ("background", "unsupported_parameter")
    assert "stream" in error["message"]


def test_nothing_can_be_cancelled_and_the_error_explains_what_to_do(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match="close its connection"):
        client.responses.cancel(respond(client).id)
    with pytest.raises(openai.NotFoundError):
        client.responses.cancel("resp_nobody")


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"input": 7}, "input"),
        ({"input": [{"role": "user"}]}, "input[0].content"),
        ({"input": [{"role": "king", "content": "x"}]}, "input[0].role"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input[0].type"),
        ({"input": []}, "input"),
        ({"input": "a\0b"}, "input"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"max_output_tokens": 1_000_000}, "input"),
        ({"temperature": 9}, "temperature"),
        ({"conversation": "conv_1"}, "conversation"),
        ({"max_tokens": 5}, "max_tokens"),
        ({"n": 2}, "n"),
        ({"guided_choice": []}, "guided_choice"),
        ({"logit_bias": {"999999999": 1}}, "logit_bias"),
        ({"truncation": "some"}, "truncation"),
        ({"text": {"verbosity": 3}}, "text.verbosity"),
    ],
)
def test_a_bad_field_is_refused_by_its_name(
    server: RunningServer, fields: dict[str, Any], param: str
) -> None:
    error = refusal(server, **fields)
    assert error["param"] == param
    assert "messages[" not in error["message"] and "max_completion" not in error["message"]


@pytest.mark.parametrize(
    "fields",
    [
        *({"logit_bias": {key: 1}} for key in ("5", " 5", "5.0", "-5", "", "word", "9" * 30)),
        {"logit_bias": []},
        {"chat_template_kwargs": 5},
        {"stop_token_ids": {}},
        {"bad_words": ["a", 5]},
    ],
    ids=str,
)
def test_a_field_of_both_is_checked_as_in_a_chat(
    server: RunningServer, fields: dict[str, Any]
) -> None:
    chat = server.chat(**fields)
    response = server.post(PATH, {"model": MODEL, "input": "Hi", "max_output_tokens": 8} | fields)
    assert response.status_code == chat.status_code
    assert response.json()["error"] == chat.json().get("error")


def test_a_tool_of_an_unknown_type_is_refused_by_name(server: RunningServer) -> None:
    for tool in ({"type": "nonsense"}, {"name": "f"}):
        error = refusal(server, tools=[{"type": "web_search"}, tool])
        assert error["param"] == "tools[1].type" and str(tool.get("type")) in error["message"]


@pytest.mark.parametrize("max_output_tokens", [4, 16])
def test_what_openais_schema_requires_of_a_response_is_always_there(
    server: RunningServer, max_output_tokens: int
) -> None:
    fields = {"model": MODEL, "input": "Hi", "max_output_tokens": max_output_tokens}
    bodies = [server.post("/v1/responses", fields).json()]
    text = server.post("/v1/responses", fields | {"stream": True}).text
    events = [json.loads(line[6:]) for line in text.splitlines() if line.startswith("data: ")]
    bodies += [event["response"] for event in events if "response" in event]
    assert len(bodies) == 4
    for body in bodies:
        assert {"error", "instructions", "incomplete_details"} <= body.keys()
        assert body["error"] is body["instructions"] is None


def test_tools_that_only_openai_runs_are_skipped(client: openai.OpenAI) -> None:
    tools = [{"type": kind} for kind in ("web_search", "web_search_2025_08_26", "local_shell")]
    response = respond(client, tools=tools)
    assert response.output_text and response.tools == []


def test_a_disconnect_frees_everything_plain_or_streamed(server: RunningServer) -> None:
    body = {"model": MODEL, "input": "Once", "max_output_tokens": 50_000, "seed": 1}
    body |= {"ignore_eos": True}
    with httpx.stream("POST", server.url + PATH, json=body | {"stream": True}) as response:
        parts = response.iter_raw()
        next(parts)
        wait_until(lambda: server.metric("running_sequences") == 1)
    server.wait_until_idle()
    with pytest.raises(httpx.ReadTimeout):
        httpx.post(server.url + PATH, json=body, timeout=0.3)
    server.wait_until_idle()


def head() -> dict[str, Any]:
    return {"id": "resp_1", "object": "response", "created_at": 1, "model": MODEL}


def written(*deltas: OutputDelta) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """The data of each event, and the response, of an answer that came in these deltas."""
    ended: list[dict[str, Any]] = []
    vocabulary = Vocabulary(Tokenizer.from_file(str(DEMO_TOKENIZER)))
    writer = ResponseWriter(head(), vocabulary, None, ended.append)
    events = writer.openings(1) + b"".join(writer.delta(delta) for delta in deltas)
    events += writer.end(Usage(4, 9, num_reasoning=3))
    blocks = events.decode().removesuffix("\n\n").split("\n\n")
    return [json.loads(block.partition("\ndata: ")[2]) for block in blocks], ended[0]


def in_parts(*parts: Part, end: str | None = None) -> OutputDelta:
    return OutputDelta(0, "", [], end, (), parts)


def test_reasoning_text_and_calls_are_separate_items() -> None:
    events, response = written(
        in_parts(ReasoningPart("Well"), ReasoningPart(", then"), TextPart("I ask.")),
        in_parts(CallStart(0, "call_a", "look"), CallArguments(0, '{"at"')),
        in_parts(CallArguments(0, ":1}"), CallStart(1, "call_b", "wait"), CallArguments(1, "{}")),
        in_parts(end="tool_calls"),
    )
    assert [item["type"] for item in response["output"]] == [
        "reasoning",
        "message",
        "function_call",
        "function_call",
    ]
    reasoning, message, look, wait = response["output"]
    assert reasoning["content"] == [{"type": "reasoning_text", "text": "Well, then"}]
    assert message["content"][0]["text"] == "I ask."
    assert (look["call_id"], look["name"], look["arguments"]) == ("call_a", "look", '{"at":1}')
    assert (wait["call_id"], wait["arguments"]) == ("call_b", "{}")
    assert response["status"] == "completed"
    assert response["usage"]["output_tokens_details"] == {"reasoning_tokens": 3}
    for index, item in enumerate(response["output"]):
        kinds = [e["type"] for e in events if e.get("output_index") == index]
        assert (kinds[0], kinds[-1]) == ("response.output_item.added", "response.output_item.done")
        done = next(e for e in reversed(events) if e.get("output_index") == index)
        assert done["item"] == item
    assert [event["sequence_number"] for event in events] == list(range(len(events)))


def test_a_call_streams_its_arguments_and_then_repeats_them_whole() -> None:
    events, _ = written(
        in_parts(CallStart(0, "call_a", "look"), CallArguments(0, '{"at"')),
        in_parts(CallArguments(0, ":1}"), end="tool_calls"),
    )
    kinds = [kind for kind, _ in itertools.groupby(event["type"] for event in events)]
    assert kinds == [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.function_call_arguments.delta",
        "response.function_call_arguments.done",
        "response.output_item.done",
        "response.completed",
    ]
    deltas = [e["delta"] for e in events if e["type"].endswith("arguments.delta")]
    assert "".join(deltas) == events[-3]["arguments"] == '{"at":1}'


def test_an_answer_without_a_token_is_an_empty_message() -> None:
    events, response = written(OutputDelta(0, "", [], "stop"))
    assert response["output"][0]["content"][0]["text"] == ""
    assert events[-1]["type"] == "response.completed"


def test_a_failure_in_the_middle_ends_the_stream_with_response_failed() -> None:
    with running_server("--shutdown-timeout", "0.2") as server:
        body = {"model": MODEL, "input": "Hi", "max_output_tokens": 50_000, "ignore_eos": True}
        with httpx.stream("POST", server.url + PATH, json=body | {"stream": True}) as response:
            parts = response.iter_text()
            first = next(parts)
            server.process.send_signal(signal.SIGTERM)
            rest = first + "".join(parts)
    name, data = rest.removesuffix("\n\n").split("\n\n")[-1].split("\n")
    assert name == "event: response.failed"
    failed = json.loads(data.removeprefix("data: "))["response"]
    assert failed["status"] == "failed" and failed["error"]["code"] == "server_error"
    assert "response.output_item.done" in rest


@pytest.fixture(scope="module")
def demo(demo_server: RunningServer) -> Iterator[openai.OpenAI]:
    """The demo model, which a grammar can hold to a call."""
    with client_of(demo_server) as client:
        yield client


WEATHER: dict[str, Any] = {
    "type": "function",
    "name": "weather",
    "parameters": {
        "type": "object",
        "properties": {"city": {"type": "string", "maxLength": 8}},
        "required": ["city"],
        "additionalProperties": False,
    },
}


def test_the_demo_model_answers(demo: openai.OpenAI) -> None:
    response = demo.responses.create(model=MODEL, input="Who are you?", temperature=0)
    assert response.status == "completed" and "model" in response.output_text


def test_a_called_function_answers_and_the_conversation_goes_on(demo: Any) -> None:
    choice: Any = {"type": "function", "name": "weather"}
    first = demo.responses.create(
        model=MODEL, input="Hi", tools=[WEATHER], tool_choice=choice, max_output_tokens=40
    )
    call = first.output[0]
    assert call.type == "function_call" and set(json.loads(call.arguments)) == {"city"}
    result: Any = {"type": "function_call_output", "call_id": call.call_id, "output": "sunny"}
    second = demo.responses.create(
        model=MODEL, input=[result], previous_response_id=first.id, max_output_tokens=20
    )
    assert second.output_text
    items = demo.responses.input_items.list(second.id)
    assert [item.type for item in items] == ["function_call_output", "function_call", "message"]
    stream = demo.responses.create(
        model=MODEL, input="Hi", tools=[WEATHER], tool_choice=choice, stream=True
    )
    events = list(stream)
    assert events[-1].type == "response.completed"
    assert "response.function_call_arguments.done" in [event.type for event in events]


def test_text_format_holds_the_answer_to_its_schema(demo: Any) -> None:
    form = {"type": "json_schema", "name": "w", "schema": WEATHER["parameters"], "strict": True}
    response = demo.responses.create(
        model=MODEL, input="Hi", max_output_tokens=60, text={"format": form}
    )
    assert set(json.loads(response.output_text)) == {"city"}
    assert response.text.format.type == "json_schema"
    form = form | {"schema": {"type": "objekt"}}
    with pytest.raises(openai.BadRequestError) as caught:
        demo.responses.create(model=MODEL, input="Hi", text={"format": form})
    assert str(caught.value.param).startswith("text.format")
    assert "response_format" not in caught.value.message


def test_bad_tools_are_refused_by_this_apis_field_names(server: RunningServer) -> None:
    assert refusal(server, tools=[{"type": "function"}])["param"] == "tools[0].name"
    choice = {"type": "function", "name": "nobody"}
    error = refusal(server, tools=[WEATHER], tool_choice=choice)
    assert error["param"] == "tool_choice.name"
    for wanted in ("required", {"type": "function", "name": "f"}, {"type": "web_search"}):
        error = refusal(server, tools=[{"type": "web_search"}], tool_choice=wanted)
        assert error["param"].startswith("tool_choice")
    call = {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{"}
    assert refusal(server, input=[call])["param"] == "input[0].arguments"
