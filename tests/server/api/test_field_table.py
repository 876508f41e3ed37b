"""Every field of OpenAI's types and of vLLM's is served, refused by name, or harmless.

One row for each field: a value, and what it does. A row that sees an effect compares the answer
with the one of the same request without the field, on the demo model.
"""

import typing
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import pytest
from openai.types import completion_create_params as completion_params
from openai.types.chat import completion_create_params as chat_params
from openai.types.responses import response_create_params as response_params

from tests.support.serving import MODEL, RunningServer

COMPLETIONS, CHAT, RESPONSES = "/v1/completions", "/v1/chat/completions", "/v1/responses"
Json = dict[str, Any]
Effect = Callable[[Json, Json], bool]

WHO = [{"role": "user", "content": "Who are you?"}]
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
SCHEMA = {"type": "object", "properties": {"a": {"enum": [1]}}, "required": ["a"]}
BASE: dict[str, Json] = {
    COMPLETIONS: {"prompt": "Once upon a time", "max_tokens": 24, "temperature": 0},
    CHAT: {"messages": WHO, "max_tokens": 24, "temperature": 0},
    RESPONSES: {"input": "Who are you?", "max_output_tokens": 24, "temperature": 0},
}
# Random, but the same each time.
SAMPLED = {"temperature": 1.5, "seed": 3}
# An answer that can only repeat three letters; a prompt that repeats letters; and DRY beside it.
ABC = {"structured_outputs": {"regex": "(abc)+"}, "max_tokens": 100}
ABC_FREELY = {"max_tokens": 40, "allowed_token_ids": list(range(70, 76))}
DRY = {**ABC_FREELY, "dry_multiplier": 0.1, "dry_sequence_breakers": []}
LONG = SAMPLED | {"max_tokens": 60, "ignore_eos": True}


def text(body: Json) -> str:
    """The first answer's."""
    if "output" in body:
        return "".join(p["text"] for i in body["output"] for p in i.get("content", ()))
    choice = body["choices"][0]
    return str(choice["text"] if "text" in choice else choice["message"]["content"])


def other_text(plain: Json, given: Json) -> bool:
    return text(plain) != text(given)


def cut_text(plain: Json, given: Json) -> bool:
    return text(plain).startswith(text(given)) and other_text(plain, given)


def num_tokens(body: Json) -> int:
    usage = body["usage"]
    return int(usage["output_tokens"] if "output" in body else usage["completion_tokens"])


def prompt_tokens(body: Json) -> int:
    return int(body["usage"]["prompt_tokens"])


def _prompt_logprobs(body: Json) -> Any:
    return body.get("prompt_logprobs") or body["choices"][0].get("prompt_logprobs")


def has(*path: str | int) -> Effect:
    """The answer has something there that it has not without the field."""

    def effect(plain: Json, given: Json) -> bool:
        return bool(_at(given, path)) and not _at(plain, path)

    return effect


def _at(value: Any, path: tuple[str | int, ...]) -> Any:
    for step in path:
        try:
            value = value[step]
        except (KeyError, IndexError, TypeError):
            return None
    return value


def ends_as_a_loop(plain: Json, given: Json) -> bool:
    return num_tokens(given) < num_tokens(plain) and stop_reason(given) == "repetition_detected"


def stop_reason(body: Json) -> Any:
    return body["choices"][0]["stop_reason"]


class Row(typing.NamedTuple):
    """value: of the field. effect: of (without it, with it). beside: on both sides; extra: beside
    the field alone."""

    value: Any
    effect: Effect
    beside: Json | None = None
    extra: Json | None = None


# What both endpoints of generation take: OpenAI's fields, then vLLM's.
BOTH: dict[str, Row] = {
    "max_tokens": Row(3, lambda a, b: num_tokens(b) == 3),
    "n": Row(3, lambda a, b: len(b["choices"]) == 3),
    "stop": Row("a", cut_text),
    "seed": Row(4, other_text, beside=SAMPLED),
    "temperature": Row(1.9, other_text, extra={"seed": 1}),
    "top_p": Row(0.01, other_text, beside=SAMPLED),
    "presence_penalty": Row(2.0, other_text, beside=LONG),
    "frequency_penalty": Row(2.0, other_text, beside=LONG),
    "logit_bias": Row({"70": 100}, other_text),
    "stream_options": Row(
        {"include_usage": True}, lambda a, b: a["chunks"][-1] != b["chunks"][-1], {"stream": True}
    ),
    "response_format": Row({"type": "json_object"}, lambda a, b: text(b)[0] == "{"),
    "top_k": Row(1, other_text, beside=SAMPLED),
    "min_p": Row(0.9, other_text, beside=SAMPLED),
    "repetition_penalty": Row(1.9, other_text),
    "min_tokens": Row(20, lambda a, b: num_tokens(b) >= 20 > num_tokens(a), {"stop": "a"}),
    "ignore_eos": Row(True, lambda a, b: num_tokens(b) == 120 > num_tokens(a), {"max_tokens": 120}),
    "stop_token_ids": Row(list(range(2, 1026)), lambda a, b: num_tokens(b) < num_tokens(a)),
    "include_stop_str_in_output": Row(True, lambda a, b: text(b) == text(a) + "a", {"stop": "a"}),
    "skip_special_tokens": Row(
        False,
        other_text,
        beside={"max_tokens": 120, "include_stop_str_in_output": True},
    ),
    "prompt_logprobs": Row(1, lambda a, b: bool(_prompt_logprobs(b)) and not _prompt_logprobs(a)),
    "return_token_ids": Row(True, has("choices", 0, "token_ids")),
    "bad_words": Row(["I", "there", "am"], other_text),
    "banned_strings": Row(["i", "T"], other_text),
    "stop_on_loop": Row(9, ends_as_a_loop, beside=ABC),
    "repetition_detection": Row(
        {"max_pattern_size": 4, "min_count": 9}, ends_as_a_loop, beside=ABC
    ),
    "dry_multiplier": Row(5, other_text, beside=ABC_FREELY, extra={"dry_sequence_breakers": []}),
    "dry_base": Row(9, other_text, beside=DRY),
    "dry_allowed_length": Row(50, other_text, beside=DRY),
    "dry_penalty_last_n": Row(0, other_text, beside=DRY),
    "dry_sequence_breakers": Row(
        list("abcdefghijklmnopqrstuvwxyz .,\n"),
        other_text,
        beside={**ABC_FREELY, "dry_multiplier": 5},
    ),
    "xtc_probability": Row(1, other_text, beside=SAMPLED),
    "xtc_threshold": Row(0.01, other_text, beside={**SAMPLED, "xtc_probability": 1}),
    "allowed_token_ids": Row([70, 71], lambda a, b: num_tokens(b) == 24 and other_text(a, b)),
    "truncate_prompt_tokens": Row(2, lambda a, b: prompt_tokens(b) == 2),
    "request_id": Row("mine", lambda a, b: b["id"].endswith("-mine")),
    "structured_outputs": Row({"regex": "[ab]{3}"}, lambda a, b: set(text(b)) <= set("ab")),
    "grammar": Row('root ::= "xyz"', lambda a, b: text(b) == "xyz"),
    "guided_json": Row(SCHEMA, lambda a, b: text(b).replace(" ", "") == '{"a":1}'),
    "guided_regex": Row("[ab]{3}", lambda a, b: set(text(b)) <= set("ab")),
    "guided_choice": Row(["xyz"], lambda a, b: text(b) == "xyz"),
    "guided_grammar": Row('root ::= "xyz"', lambda a, b: text(b) == "xyz"),
    "guided_json_object": Row(True, lambda a, b: text(b)[0] == "{"),
    "regex": Row("[ab]{3}", lambda a, b: set(text(b)) <= set("ab")),
    "ebnf": Row('root ::= "xyz"', lambda a, b: text(b) == "xyz"),
    "best_of": Row(4, lambda a, b: num_tokens(b) > num_tokens(a), beside=SAMPLED),
    "truncation_side": Row("right", other_text, beside={"truncate_prompt_tokens": 3}),
    "json_schema": Row(SCHEMA, lambda a, b: text(b).replace(" ", "") == '{"a":1}'),
    "n_predict": Row(3, lambda a, b: num_tokens(b) == 3, beside={"max_tokens": None}),
    "timings_per_token": Row(True, has("timings", "predicted_n")),
}


def cached(body: Json) -> int:
    return int(body["usage"]["prompt_tokens_details"]["cached_tokens"])


def is_not_cached(plain: Json, given: Json) -> bool:
    return cached(plain) > 0 == cached(given)


EFFECTS: dict[str, dict[str, Row]] = {
    COMPLETIONS: BOTH
    | {
        "prompt": Row("The cat", other_text),
        "cache_salt": Row("s", is_not_cached, beside={"prompt": "Once upon a time " * 20}),
        "echo": Row(True, lambda a, b: text(b) == "Once upon a time" + text(a)),
        "logprobs": Row(2, lambda a, b: len(b["choices"][0]["logprobs"]["top_logprobs"][0]) >= 2),
        "add_special_tokens": Row(False, lambda a, b: prompt_tokens(b) <= prompt_tokens(a)),
        "return_tokens_as_token_ids": Row(
            True,
            lambda a, b: b["choices"][0]["logprobs"]["tokens"][0].startswith("token_id:"),
            beside={"logprobs": 0},
        ),
    },
    CHAT: BOTH
    | {
        "messages": Row([{"role": "user", "content": "Tell me a story."}], other_text),
        "cache_salt": Row("s", is_not_cached, beside={"messages": [WHO[0], *WHO, *WHO]}),
        "max_completion_tokens": Row(3, lambda a, b: num_tokens(b) == 3),
        "logprobs": Row(True, has("choices", 0, "logprobs", "content")),
        "top_logprobs": Row(
            3,
            has("choices", 0, "logprobs", "content", 0, "top_logprobs"),
            beside={"logprobs": True},
        ),
        "tools": Row([TOOL], lambda a, b: prompt_tokens(b) > prompt_tokens(a)),
        "tool_choice": Row(
            "required", has("choices", 0, "message", "tool_calls"), {"tools": [TOOL]}
        ),
        "functions": Row(
            [TOOL["function"]],
            lambda a, b: prompt_tokens(b) > prompt_tokens(a),
        ),
        "function_call": Row(
            {"name": "f"},
            has("choices", 0, "message", "function_call"),
            {"functions": [TOOL["function"]]},
        ),
        "parallel_tool_calls": Row(
            False,
            lambda a, b: len(b["choices"][0]["message"]["tool_calls"]) == 1,
            {"tools": [TOOL], "tool_choice": "required", "max_tokens": 200},
        ),
        "echo": Row(
            True,
            lambda a, b: text(b) == "I am" + text(a),
            beside={"messages": [*WHO, {"role": "assistant", "content": "I am"}]},
        ),
        "add_generation_prompt": Row(False, lambda a, b: prompt_tokens(b) < prompt_tokens(a)),
        "continue_final_message": Row(
            True,
            lambda a, b: prompt_tokens(b) < prompt_tokens(a),
            beside={"messages": [*WHO, {"role": "assistant", "content": "I am"}]},
            extra={"add_generation_prompt": False},
        ),
        "add_special_tokens": Row(True, lambda a, b: prompt_tokens(b) >= prompt_tokens(a)),
        "return_tokens_as_token_ids": Row(
            True,
            lambda a, b: b["choices"][0]["logprobs"]["content"][0]["token"].startswith("token_id:"),
            beside={"logprobs": True},
        ),
    },
    RESPONSES: {
        "input": Row("Tell me a story.", other_text),
        "instructions": Row("Tell me a story.", lambda a, b: _in(b) > _in(a)),
        "max_output_tokens": Row(3, lambda a, b: num_tokens(b) == 3),
        "temperature": Row(1.9, other_text, extra={"seed": 1}),
        "top_p": Row(0.01, other_text, beside=SAMPLED),
        "tools": Row(
            [{"type": "function", "name": "f", "parameters": {"type": "object"}}],
            lambda a, b: _in(b) > _in(a),
        ),
        "tool_choice": Row(
            "required",
            lambda a, b: b["output"][-1]["type"] == "function_call",
            {"tools": [{"type": "function", "name": "f", "parameters": {"type": "object"}}]},
        ),
        "text": Row({"format": {"type": "json_object"}}, lambda a, b: text(b)[0] == "{"),
        "include": Row(
            ["message.output_text.logprobs"], has("output", 0, "content", 0, "logprobs")
        ),
        "top_logprobs": Row(
            2,
            has("output", 0, "content", 0, "logprobs", 0, "top_logprobs"),
            beside={"include": ["message.output_text.logprobs"]},
        ),
        "metadata": Row({"a": "b"}, has("metadata")),
        "request_id": Row("mine", lambda a, b: b["id"] == "resp_mine"),
        "structured_outputs": Row({"choice": ["xyz"]}, lambda a, b: text(b) == "xyz"),
        "guided_choice": Row(["xyz"], lambda a, b: text(b) == "xyz"),
    },
}


def _in(body: Json) -> int:
    return int(body["usage"]["input_tokens"])


# Refused by name, with a value that another server would act upon.
REFUSED: dict[str, dict[str, Any]] = {
    COMPLETIONS: {
        "suffix": "end",
        "prompt_embeds": "AAAA",
        "tools": [TOOL],
        "chat_template": "x",
        "thinking_token_budget": 5,
    },
    CHAT: {
        "audio": {"voice": "alloy", "format": "wav"},
        "modalities": ["text", "audio"],
        "web_search_options": {},
        "moderation": {"model": "m"},
        "chat_template": "{{ messages }}",
    },
    RESPONSES: {
        "background": True,
        "conversation": "conv_1",
        "prompt": {"id": "p"},
        "moderation": {"model": "m"},
        "context_management": [{"type": "compaction"}],
        "access_programs": {"a": True},
        "image": {"detail": "high"},
        "messages": WHO,
        "max_tokens": 5,
    },
}
REFUSED_BY_BOTH: dict[str, Any] = {
    "use_beam_search": True,
    "length_penalty": 0.5,
    "early_stopping": True,
    "logits_processors": ["x"],
    "logprob_token_ids": [1],
    "watermarking": True,
    "kv_transfer_params": {"a": 1},
    "ec_transfer_params": {"a": 1},
    "return_prompt_text": True,
    "return_token_offsets": True,
    "routed_experts_prompt_start": 1,
    "mm_processor_kwargs": {"a": 1},
    "media_io_kwargs": {"a": {}},
    "repeat_penalty": 1.2,
    "max_new_tokens": 5,
    "stop_regex": "a",
    "lora_path": "x",
    "mirostat": 2,
    "enable_thinking": False,
}

# Accepted, since they cannot change the answer: a provider's accounting, hints for its caches, the
# padding of a stream; settings of style, which are passed to the chat template.
HARMLESS: dict[str, Any] = {
    "user": "u",
    "metadata": {"a": "b"},
    "store": False,
    "service_tier": "flex",
    "safety_identifier": "s",
    "prompt_cache_key": "k",
    "prompt_cache_retention": "24h",
    "prompt_cache_options": {"mode": "auto"},
    "spaces_between_special_tokens": False,
    "session_id": "s",
    "stream_interval": 4,
    "return_mm_kwargs": True,
    "documents": [{"title": "t", "text": "x"}],  # for templates of other models
    "vllm_xargs": {"a": 1},  # for plugins of vLLM
    "priority": 1,  # under first come, first served
    "num_speculative_tokens": 0,
}
HARMLESS_HERE: dict[str, dict[str, Any]] = {
    COMPLETIONS: {},
    CHAT: {
        "prediction": {"type": "content", "content": "I am"},
        "verbosity": "low",
        "reasoning_effort": "low",
        "chat_template_kwargs": {"enable_thinking": False},  # unknown to the demo's template
        "include_reasoning": False,  # of the demo model, which never reasons
        "parallel_tool_calls": False,
    },
    RESPONSES: {
        "stream_options": {"include_obfuscation": False},
        "max_tool_calls": 3,
        "truncation": "disabled",
        "parallel_tool_calls": True,
        "reasoning": {"effort": "low"},
        "background_options": {"completion_window": "soonest"},  # of `background`, which is refused
    },
}
# What other tests see: test_responses.py.
ELSEWHERE = {"previous_response_id", "stream", "model"}

CLIENT_TYPES = {
    COMPLETIONS: completion_params.CompletionCreateParamsBase,
    CHAT: chat_params.CompletionCreateParamsBase,
    RESPONSES: response_params.ResponseCreateParamsBase,
}


@pytest.fixture(scope="module")
def server(demo_server: RunningServer) -> RunningServer:
    return demo_server


@pytest.mark.parametrize("path", CLIENT_TYPES)
def test_no_field_of_the_openai_client_is_unknown_to_these_tables(path: str) -> None:
    known = EFFECTS[path].keys() | REFUSED[path].keys() | HARMLESS.keys()
    known |= HARMLESS_HERE[path].keys() | ELSEWHERE
    assert set(CLIENT_TYPES[path].__annotations__) <= known


CLIENT = httpx.Client(timeout=30)  # one, since a new one for each request takes most of the time


@pytest.fixture(scope="module", autouse=True)
def _client_closed_at_the_end() -> Iterator[None]:
    yield
    CLIENT.close()


def post(server: RunningServer, path: str, fields: Json) -> httpx.Response:
    return CLIENT.post(server.url + path, json={"model": MODEL} | BASE[path] | fields)


def answered(server: RunningServer, path: str, **fields: Any) -> Json:
    response = post(server, path, fields)
    assert response.status_code == 200, response.text
    if not fields.get("stream"):
        body: Json = response.json()
        return body
    return {"chunks": response.text.split("\n\n")[:-2]}


ROWS = [(path, field, row) for path, rows in EFFECTS.items() for field, row in rows.items()]


@pytest.mark.parametrize(("path", "field", "row"), ROWS, ids=lambda value: str(value)[:30])
def test_a_served_field_has_an_effect_that_is_seen(
    server: RunningServer, path: str, field: str, row: Row
) -> None:
    beside = row.beside or {}
    answered(server, path, **beside)  # so that what can be cached is
    plain = answered(server, path, **beside)
    given = answered(server, path, **(beside | (row.extra or {}) | {field: row.value}))
    assert row.effect(plain, given), (plain, given)


NOT_SERVED = [
    (path, field, value) for path, table in REFUSED.items() for field, value in table.items()
]
NOT_SERVED += [(p, f, v) for p in (COMPLETIONS, CHAT) for f, v in REFUSED_BY_BOTH.items()]


@pytest.mark.parametrize(("path", "field", "value"), NOT_SERVED, ids=lambda value: str(value)[:30])
def test_a_field_that_is_not_served_is_refused_by_name(
    server: RunningServer, path: str, field: str, value: Any
) -> None:
    response = post(server, path, {field: value})
    assert response.status_code == 400, response.text
    error = response.json()["error"]
    assert (error["param"], error["code"]) == (field, "unsupported_parameter")
    assert field in error["message"] and response.headers["x-should-retry"] == "false"


@pytest.mark.parametrize("path", BASE)
def test_a_harmless_field_changes_nothing(server: RunningServer, path: str) -> None:
    plain = answered(server, path)
    for field, value in (HARMLESS | HARMLESS_HERE[path]).items():
        assert text(answered(server, path, **{field: value})) == text(plain), field
