"""Every kind of request that the server answers, and their answers without what differs from run to
run: ids, times, and where a stream was cut into events."""

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import httpx

from tests.support.serving import MODEL

PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 20}, "age": {"type": "integer"}},
    "required": ["name", "age"],
}
TOOL = {"name": "weather", "description": "The weather in a city", "parameters": PERSON}
# What is told of an answer and not part of it; what is found in the cache depends on the load.
_VOLATILE = frozenset(
    (
        *("id", "created", "created_at", "completed_at", "item_id", "call_id", "response_id"),
        *("sequence_number", "cached_tokens", "cache_read_input_tokens", "obfuscation"),
        *("accepted_prediction_tokens", "rejected_prediction_tokens"),
    )
)
_TEXT_KEYS = frozenset(
    ("text", "content", "reasoning", "reasoning_content", "thinking", "arguments")
)


@dataclass(frozen=True, slots=True)
class Ask:
    """One request. name: its X-Request-Id. is_seeded: whether its body alone decides the answer."""

    kind: str
    name: str
    path: str
    body: dict[str, Any]
    is_seeded: bool = True


def asks(number: int, max_tokens: int = 48) -> list[Ask]:
    """One of each kind; the prompts of another number differ."""
    prompt = f"Once upon a time, number {number},"
    messages = [{"role": "user", "content": f"Who are you, and what is {number} and 3?"}]
    plain = {"model": MODEL, "prompt": prompt, "max_tokens": max_tokens}
    chat = {"model": MODEL, "messages": messages, "max_tokens": max_tokens, "seed": number}
    hot = {"temperature": 1.0, "seed": number}
    usage = {"stream": True, "stream_options": {"include_usage": True}}
    penalties = {"frequency_penalty": 0.7, "presence_penalty": 0.4, "repetition_penalty": 1.2}
    penalties["min_tokens"] = min(20, max_tokens)
    schema = {"type": "json_schema", "json_schema": {"name": "person", "schema": PERSON}}
    completions, chats = "/v1/completions", "/v1/chat/completions"
    kinds: list[tuple[str, str, dict[str, Any]]] = [
        ("greedy", completions, plain | usage | {"temperature": 0}),
        ("seeded, n = 3", completions, plain | usage | hot | {"n": 3}),
        ("unseeded", completions, plain | usage | {"temperature": 1.0}),
        ("logprobs", completions, plain | usage | hot | {"logprobs": 3}),
        ("prompt logprobs", completions, plain | usage | hot | {"echo": True, "logprobs": 2}),
        (
            "penalties",
            completions,
            plain | usage | hot | penalties,
        ),
        ("stop strings", completions, plain | usage | hot | {"stop": ["q", "zz", "\n\n\n"]}),
        ("regex", completions, plain | usage | hot | {"guided_regex": "[a-z ]{30}[0-9]+"}),
        ("two prompts", completions, plain | hot | {"prompt": [prompt, "A dog"]}),
        ("best of", completions, plain | hot | {"n": 2, "best_of": 3}),
        ("chat", chats, chat | usage | {"logprobs": True, "top_logprobs": 2}),
        ("JSON schema", chats, chat | usage | {"response_format": schema}),
        (
            "tools",
            chats,
            chat
            | usage
            | {"tools": [{"type": "function", "function": TOOL}], "tool_choice": "required"},
        ),
        (
            "Responses",
            "/v1/responses",
            {"model": MODEL, "input": messages[0]["content"], "temperature": 0, "stream": True}
            | {"max_output_tokens": max_tokens},
        ),
        (
            "Messages",
            "/v1/messages",
            {"model": MODEL, "messages": messages, "max_tokens": max_tokens, "temperature": 0}
            | {"stream": True},
        ),
        ("embeddings", "/v1/embeddings", {"model": MODEL, "input": [prompt * 8, "A cat"]}),
    ]
    return [
        Ask(kind, f"{kind} {number}", path, body, is_seeded=kind != "unseeded")
        for kind, path, body in kinds
    ]


def repeating(number: int, max_tokens: int = 48) -> list[Ask]:
    """Those whose body decides the answer, with prompts that repeat a text, as some answers then
    do."""
    text = f"{number}: The water goes through the gate and turns the wheel. "
    return [
        replace(ask, body=ask.body | ({"prompt": text * 5} if "prompt" in ask.body else {}))
        for ask in asks(number, max_tokens)
        if ask.is_seeded
    ]


def predicting(ask: Ask, answered: Any) -> Ask:
    """A chat whose answer is known, of which it predicts all but a word."""
    (choice,) = (part for part in answered["events"] if isinstance(part, dict) and 0 in part)
    words = choice[0]["delta"]["content"].split(" ")
    words[len(words) // 2] = "otherwise"
    prediction = {"type": "content", "content": " ".join(words)}
    return replace(ask, body=ask.body | {"prediction": prediction})


async def answer(client: httpx.AsyncClient, ask: Ask) -> Any:
    """Comparable with another answer to the same request."""
    headers = {"x-request-id": ask.name}
    response = await client.post(ask.path, json=ask.body, headers=headers)
    if response.headers["content-type"].startswith("application/json"):
        return {"status": response.status_code, "body": _without_volatile(response.json())}
    return {"status": response.status_code, "events": list(joined(events_of(response.text)))}


def events_of(text: str) -> list[Any]:
    """The data of each server-sent event; keep-alives are none."""
    lines = (line[6:] for line in text.splitlines() if line.startswith("data: "))
    return [line if line == "[DONE]" else json.loads(line) for line in lines]


def joined(events: Iterable[Any]) -> Iterator[Any]:
    """OpenAI's chunks become one for each choice; of other streams, deltas in a row become one."""
    choices: dict[int, Any] = {}
    last: Any = None
    for event in events:
        if isinstance(event, dict) and "choices" in event:
            for choice in event["choices"]:
                index = choice["index"]
                choices[index] = _merged(choices.get(index), _without_volatile(choice))
            if event.get("usage"):
                yield _without_volatile(event["usage"])
            continue
        event = _without_volatile(event)
        is_delta = isinstance(event, dict) and str(event.get("type")).endswith("delta")
        if is_delta and last is not None and last["type"] == event["type"]:
            last["delta"] = _merged(last["delta"], event["delta"])
            if "logprobs" in last or "logprobs" in event:
                last["logprobs"] = (last.get("logprobs") or []) + (event.get("logprobs") or [])
            continue
        if last is not None:
            yield last
        last = event if is_delta else None
        if not is_delta:
            yield event
    yield dict(sorted(choices.items()))


def _merged(before: Any, new: Any) -> Any:
    """Texts and lists go on, objects go on in each of their fields, other values are replaced."""
    if before is None or new is None:
        return before if new is None else new
    if isinstance(new, dict):
        return before | {
            key: _merged_field(key, before.get(key), value) for key, value in new.items()
        }
    return before + new if isinstance(new, str | list) else new


def _merged_field(key: str, before: Any, new: Any) -> Any:
    if key == "tool_calls" and before and new:
        calls = {call["index"]: call for call in before}
        for call in new:
            calls[call["index"]] = _merged(calls.get(call["index"]), call)
        return list(calls.values())
    if isinstance(new, str) and key not in _TEXT_KEYS and not key.startswith("partial"):
        return new
    return _merged(before, new)


def _without_volatile(value: Any) -> Any:
    if isinstance(value, dict):
        if "cache_read_input_tokens" in value:  # Anthropic's other tokens are those besides
            value = dict(value)
            value["input_tokens"] += value["cache_read_input_tokens"]
        return {k: _without_volatile(v) for k, v in value.items() if k not in _VOLATILE}
    if isinstance(value, list):
        return [_without_volatile(each) for each in value]
    return value
