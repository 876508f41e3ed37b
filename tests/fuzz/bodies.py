"""`python -m tests.fuzz.bodies SECONDS [SEED] [--requests N]`, part of `make test-fuzz`: mutated
bodies, for so many seconds or until N have been sent.

Takes valid bodies of every endpoint and replaces some values by another type or an extreme, or
removes them. No response may be a server error, an error must have its API's shape, and every
response must arrive within five seconds.
"""

import argparse
import contextlib
import copy
import json
import random
import sys
import time
from collections.abc import Iterator
from typing import Any, NamedTuple, Self

import httpx

from tests.support.serving import MODEL, RunningServer

DEADLINE_S = 5.0
_SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
_TOOL = {
    "type": "function",
    "function": {"name": "f", "description": "d", "parameters": _SCHEMA, "strict": True},
}
_CALL = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
_CONVERSATION = [
    {"role": "system", "content": "Be short."},
    {"role": "user", "content": [{"type": "text", "text": "Who"}, {"type": "text", "text": "?"}]},
    {"role": "assistant", "content": None, "tool_calls": [_CALL]},
    {"role": "tool", "tool_call_id": "c1", "content": "5"},
    {"role": "user", "content": "And?", "name": "Ann"},
]
_SAMPLING = {
    "max_tokens": 4,
    "temperature": 0.7,
    "top_p": 0.9,
    "top_k": 5,
    "min_p": 0.01,
    "seed": 1,
    "n": 2,
    "stop": ["a", "bb"],
    "presence_penalty": 0.1,
    "frequency_penalty": 0.1,
    "repetition_penalty": 1.1,
    "logit_bias": {"5": 1},
    "min_tokens": 1,
    "stop_token_ids": [3],
    "bad_words": ["x"],
    "allowed_token_ids": [4, 5, 6],
    "ignore_eos": True,
    "skip_special_tokens": False,
    "return_token_ids": True,
    "truncate_prompt_tokens": 50,
    "request_id": "r",
    "cache_salt": "s",
    "priority": 0,
    "prompt_logprobs": 1,
    "num_speculative_tokens": 2,
}
_ITEMS = [
    {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "Hi"}]},
    {"type": "function_call", "call_id": "c1", "name": "f", "arguments": "{}"},
    {"type": "function_call_output", "call_id": "c1", "output": "5"},
]
_BLOCKS = [{"type": "text", "text": "Hi"}]

# Valid bodies by path.
SEEDS: dict[str, list[dict[str, Any]]] = {
    "/v1/completions": [
        {"prompt": "Once", "logprobs": 2, "echo": False, "best_of": 2} | _SAMPLING,
        {"prompt": ["a", "b"], "stream": True, "stream_options": {"include_usage": True}},
        {"prompt": [[1, 2], [3]], "max_tokens": 2, "structured_outputs": {"regex": "[ab]+"}},
        {"prompt": [5, 6, 7], "max_tokens": 0, "echo": True, "logprobs": 1},
    ],
    "/v1/chat/completions": [
        {"messages": _CONVERSATION, "logprobs": True, "top_logprobs": 2} | _SAMPLING,
        {"messages": _CONVERSATION, "tools": [_TOOL], "tool_choice": "auto", "max_tokens": 8},
        {
            "messages": _CONVERSATION[:2],
            "functions": [{"name": "f", "parameters": {"type": "object"}}],
            "function_call": {"name": "f"},
            "max_tokens": 8,
        },
        {"messages": _CONVERSATION, "guided_choice": ["a", "b"], "echo": True, "max_tokens": 4},
        {
            "messages": _CONVERSATION[:2],
            "tools": [_TOOL],
            "tool_choice": {"type": "function", "function": {"name": "f"}},
            "parallel_tool_calls": False,
            "max_tokens": 8,
        },
        {
            "messages": _CONVERSATION[:2],
            "response_format": {
                "type": "json_schema",
                "json_schema": {"name": "n", "schema": _SCHEMA, "strict": True},
            },
            "max_tokens": 8,
            "stream": True,
        },
        {
            "messages": [*_CONVERSATION[:2], {"role": "assistant", "content": "I am"}],
            "continue_final_message": True,
            "add_generation_prompt": False,
            "chat_template_kwargs": {},
            "reasoning_effort": "low",
            "verbosity": "low",
            "max_tokens": 4,
        },
    ],
    "/v1/responses": [
        {
            "input": _ITEMS,
            "instructions": "Be short.",
            "max_output_tokens": 4,
            "text": {"format": {"type": "text"}, "verbosity": "low"},
            "reasoning": {"effort": "low", "summary": "auto"},
            "include": ["message.output_text.logprobs"],
            "metadata": {"a": "b"},
            "store": True,
            "temperature": 1,
        },
        {
            "input": "Hi",
            "tools": [{"type": "function", "name": "f", "parameters": _SCHEMA, "strict": True}],
            "tool_choice": {"type": "function", "name": "f"},
            "max_output_tokens": 8,
            "stream": True,
        },
    ],
    "/v1/responses/input_tokens": [{"input": _ITEMS, "instructions": "Be short."}],
    "/v1/messages": [
        {
            "max_tokens": 4,
            "system": _BLOCKS,
            "messages": [
                {"role": "user", "content": _BLOCKS},
                {
                    "role": "assistant",
                    "content": [{"type": "tool_use", "id": "t", "name": "f", "input": {"a": 1}}],
                },
                {
                    "role": "user",
                    "content": [{"type": "tool_result", "tool_use_id": "t", "content": _BLOCKS}],
                },
            ],
            "tools": [{"name": "f", "description": "d", "input_schema": _SCHEMA}],
            "tool_choice": {"type": "auto", "disable_parallel_tool_use": True},
            "stop_sequences": ["a"],
            "temperature": 1,
            "top_k": 5,
            "thinking": {"type": "disabled"},
            "metadata": {"user_id": "u"},
        },
        {"max_tokens": 4, "messages": [{"role": "user", "content": "Hi"}], "stream": True},
    ],
    "/v1/messages/count_tokens": [{"messages": [{"role": "user", "content": "Hi"}]}],
    "/v1/embeddings": [
        {"input": ["a", "b"], "encoding_format": "base64", "dimensions": 8, "user": "u"},
        {"input": [[1, 2]], "encoding_format": "float"},
    ],
    "/v1/score": [
        {"text_1": "a", "text_2": ["b", "c"]},
        {"queries": ["a"], "documents": ["b", "c"]},
    ],
    "/rerank": [
        {"query": "a", "documents": ["b", {"text": "c"}], "top_n": 1, "max_tokens_per_doc": 1},
    ],
    "/classify": [{"input": ["a", "b"], "use_activation": False}],
    "/v2/embed": [{"texts": ["a"], "input_type": "search_query", "embedding_types": ["float"]}],
    "/tokenize": [
        {"prompt": "a b", "add_special_tokens": True, "return_token_strs": True},
        {"messages": _CONVERSATION, "tools": [_TOOL]},
    ],
    "/detokenize": [{"tokens": [1, 2, 3]}],
}

_EXTREMES: tuple[Any, ...] = (
    None,
    True,
    False,
    0,
    1,
    -1,
    2,
    10**6,
    2**31,
    2**63,
    -(2**63) - 1,
    10**40,
    0.5,
    -0.0,
    1e308,
    5e-324,
    "",
    " ",
    "\0",
    "a",
    "\ud800",
    "\U0001f600" * 50,
    "a" * 20_000,
    "<|im_start|>",
    "{{ 1/0 }}",
    "../../x",
    [],
    [[]],
    [None],
    [1],
    ["a"],
    {},
    {"type": "text"},
    {"type": "json_schema"},
    {"a": {"$ref": "#"}},
    {"": None},
)


def mutated(body: dict[str, Any], rng: random.Random) -> dict[str, Any]:
    """The body with one to three changes somewhere in it."""
    body = copy.deepcopy(body)
    for _ in range(rng.choice((1, 1, 1, 2, 3))):
        if locations := list(_locations(body)):
            _change(*rng.choice(locations), rng)
    return body


def _locations(value: Any) -> Iterator[tuple[Any, Any]]:
    """Every container of a value, and the value's key in it."""
    keys = list(value) if isinstance(value, dict) else range(len(value))
    for key in keys:
        yield value, key
        if isinstance(value[key], (dict, list)):
            yield from _locations(value[key])


def _change(container: Any, key: Any, rng: random.Random) -> None:
    match rng.randrange(6):
        case 0:
            del container[key]
        case 1:
            container[key] = [container[key]] * rng.choice((1, 2, 50))
        case 2:
            container[key] = {str(key): container[key]}
        case 3 if isinstance(container, dict):
            container[f"{key}_"] = container.pop(key)
        case _:
            container[key] = copy.deepcopy(rng.choice(_EXTREMES))


def check(response: httpx.Response, path: str) -> str | None:
    """The fault of a response, or None."""
    if response.status_code >= 500:
        return f"status {response.status_code}"
    if response.elapsed.total_seconds() > DEADLINE_S:
        return f"it took {response.elapsed.total_seconds():.1f} s"
    if not response.headers.get("x-request-id"):
        return "no x-request-id"
    if response.status_code < 400:
        is_stream = response.headers["content-type"].startswith("text/event-stream")
        return "an event reports a server error" if is_stream and _has_failed(response) else None
    return None if _is_error_object(response, path) else "not an error object"


def _has_failed(response: httpx.Response) -> bool:
    return any(word in response.text for word in ('"server_error"', '"api_error"'))


def _is_error_object(response: httpx.Response, path: str) -> bool:
    try:
        body = response.json()
    except ValueError:
        return False
    if path.startswith("/v1/messages"):
        return bool(body.get("type") == "error" and {"type", "message"} <= body["error"].keys())
    return set(body) == {"error"} and set(body["error"]) == {"message", "type", "param", "code"}


class Extent(NamedTuple):
    """Of a run: its seconds, or its requests if their number is given."""

    seconds: float
    seed: int
    num_requests: int | None

    @classmethod
    def parse(cls, arguments: list[str]) -> Self:
        parser = argparse.ArgumentParser()
        parser.add_argument("seconds", nargs="?", type=float, default=60.0)
        parser.add_argument("seed", nargs="?", type=int, default=random.randrange(10**6))
        parser.add_argument("--requests", type=int)
        options = parser.parse_args(arguments)
        return cls(options.seconds, options.seed, options.requests)

    def half(self) -> Self:
        num = self.num_requests
        return self._replace(seconds=self.seconds / 2, num_requests=num and -(-num // 2))

    def counted(self) -> Iterator[int]:
        """The number of each request. Says how far it is."""
        end_s, num_sent = time.monotonic() + self.seconds, 0
        while (
            time.monotonic() < end_s if self.num_requests is None else num_sent < self.num_requests
        ):
            yield num_sent
            num_sent += 1
            if num_sent % 5_000 == 0:
                print(f"{num_sent} sent", flush=True)


def fuzz(server: RunningServer, extent: Extent) -> int:
    """Returns the number of faulty responses."""
    rng, num_sent, num_faults, slowest_s = random.Random(extent.seed), 0, 0, 0.0
    with httpx.Client(base_url=server.url, timeout=30) as client:
        for num_sent in extent.counted():  # noqa: B007 - it is reported
            path = rng.choice(list(SEEDS))
            body = mutated({"model": MODEL} | rng.choice(SEEDS[path]), rng)
            content = json.dumps(body).encode()
            response = client.post(path, content=content)
            slowest_s = max(slowest_s, response.elapsed.total_seconds())
            if fault := check(response, path):
                num_faults += 1
                print(f"{path}: {fault}\n  {content[:1500]!r}\n  {response.text[:500]}")
    print(
        f"{num_sent + 1} bodies from seed {extent.seed}, {num_faults} faults; "
        f"slowest {slowest_s:.2f} s"
    )
    return num_faults


def main(arguments: list[str]) -> int:
    extent, num_faults = Extent.parse(arguments).half(), 0
    for is_scripted in (True, False):
        with fuzzed_server("--max-model-len", "400", is_scripted=is_scripted) as server:
            num_faults += fuzz(server, extent)
    return int(num_faults > 0)


@contextlib.contextmanager
def fuzzed_server(*flags: str, is_scripted: bool) -> Iterator[RunningServer]:
    """With scripted tokens, which are fast, or with the demo model, which uses every field."""
    server = RunningServer(*(["--scripted"] if is_scripted else ["--num-threads", "1"]), *flags)
    try:
        server.wait_until_ready()
        yield server
    finally:
        server.stop()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
