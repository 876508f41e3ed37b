"""Input that would delay other clients is refused in bounded time, while a stream continues.

Each case has a limit for its answer, generous because a test machine may be busy with other work.
"""

import json
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.support.neighbour import streaming
from tests.support.serving import MODEL, RunningServer

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
DETOKENIZE, RESPONSES = "/detokenize", "/v1/responses"
TOKENIZE, EMBEDDINGS = "/tokenize", "/v1/embeddings"
HELLO = {"role": "user", "content": "Who are you?"}
MAX_STALL_S = 5.0
FLAGS = ("--num-threads", "1", "--trust-request-chat-template", "--max-body-bytes", "32M")


@pytest.fixture(scope="module")
def server() -> Iterator[RunningServer]:
    running = RunningServer(*FLAGS)
    try:
        running.wait_until_ready()
        yield running
    finally:
        running.stop()


def completion(**fields: Any) -> bytes:
    return json.dumps({"model": MODEL, "prompt": "Once", "max_tokens": 4} | fields).encode()


def chat(**fields: Any) -> bytes:
    return json.dumps({"model": MODEL, "messages": [HELLO], "max_tokens": 4} | fields).encode()


def conversation() -> bytes:
    """Calls since the last question, which are what truncation drops last."""
    call = {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"}
    result = {"type": "function_call_output", "call_id": "c", "output": "x" * 40}
    items = [HELLO, *[call, result] * 7_500]
    return json.dumps({"model": MODEL, "input": items, "truncation": "auto"}).encode()


def tool(description: str) -> dict[str, Any]:
    return {"type": "function", "function": {"name": "f", "description": description}}


def schema(text: str) -> bytes:
    """A chat held to a schema that is given as text, since json.dumps cannot nest so deep."""
    form = f'{{"type":"json_schema","json_schema":{{"name":"n","schema":{text}}}}}'
    return chat(response_format="HERE").replace(b'"HERE"', form.encode())


def nested(depth: int) -> str:
    return '{"items":' * depth + "{}" + "}" * depth


MANY = b"[" + b"5," * 14_999_999 + b"5]"
BAD_WORDS = [f"{i} of which there is so much " * 9 for i in range(100)]
NUMBERS = {str(i): 1 for i in range(65_536)}
FOR_EVER = "{% for i in range(99999) %}{% for j in range(99999) %}x{% endfor %}{% endfor %}"

# Name -> path, what makes the body, seconds, and the status, where it must be that one.
CASES: dict[str, tuple[str, Callable[[], bytes], float, int | None]] = {
    "nested 1,000 deep": (CHAT, lambda: schema(nested(1_000)), 5, 400),
    "nested 100,000 deep": (CHAT, lambda: schema(nested(100_000)), 5, 400),
    "1,000 deep in a field unknown": (
        CHAT,
        lambda: chat(x="HERE").replace(b'"HERE"', b"[" * 1_000),
        5,
        400,
    ),
    "10,000 stop strings": (
        COMPLETIONS,
        lambda: completion(stop=[f"s{i}" for i in range(10_000)]),
        5,
        400,
    ),
    "65,536 biases": (COMPLETIONS, lambda: completion(logit_bias=NUMBERS), 5, 400),
    "a prompt of 1 MB": (COMPLETIONS, lambda: completion(prompt="ab " * 333_000), 5, 400),
    "a prompt of 30 MB": (COMPLETIONS, lambda: completion(prompt="ab " * 10_000_000), 5, 400),
    "a message of 1 MB": (
        CHAT,
        lambda: chat(messages=[{**HELLO, "content": "ab " * 333_000}]),
        5,
        400,
    ),
    "100,000 messages": (CHAT, lambda: chat(messages=[HELLO] * 100_000), 5, 400),
    "600,000 messages": (CHAT, lambda: chat(messages=[HELLO] * 600_000), 5, 400),
    "2,000,000 unknown keys": (
        COMPLETIONS,
        lambda: completion(x=dict.fromkeys(map(str, range(2_000_000)), 1)),
        5,
        400,
    ),
    "1,000,000 ids": (COMPLETIONS, lambda: completion(prompt=[5] * 1_000_000), 5, 400),
    "15,000,000 ids": (
        COMPLETIONS,
        lambda: completion(prompt="HERE").replace(b'"HERE"', MANY),
        5,
        400,
    ),
    "10,000,000 empty prompts": (
        COMPLETIONS,
        lambda: completion(prompt="HERE").replace(b'"HERE"', b"[" + b"[]," * 9_999_999 + b"[]]"),
        5,
        400,
    ),
    "15,000,000 ids of a text": (DETOKENIZE, lambda: b'{"tokens":' + MANY + b"}", 5, 400),
    "ids beyond the vocabulary": (COMPLETIONS, lambda: completion(prompt=[10**9]), 5, 400),
    "a number of 5,000 digits": (
        COMPLETIONS,
        lambda: completion(seed=0).replace(b'"seed": 0', b'"seed": ' + b"9" * 5_000),
        5,
        400,
    ),
    "NaN": (COMPLETIONS, lambda: completion(temperature=float("nan")), 5, 400),
    "an infinity": (COMPLETIONS, lambda: completion(temperature=float("inf")), 5, 400),
    "a lone surrogate": (COMPLETIONS, lambda: completion(prompt="\ud800"), 5, 400),
    "a NUL": (COMPLETIONS, lambda: completion(prompt="a\0b"), 5, 400),
    "a regex that explodes": (
        CHAT,
        lambda: chat(structured_outputs={"regex": "(a{0,9999}b?){0,9999}(a|aa)+" * 20}),
        8,
        None,
    ),
    "alternatives without number": (
        CHAT,
        lambda: chat(structured_outputs={"regex": "a|" * 200_000 + "b"}),
        8,
        None,
    ),
    "an enumeration of 100,000": (
        CHAT,
        lambda: schema(json.dumps({"enum": [f"v{i}" for i in range(100_000)]})),
        8,
        None,
    ),
    "7,500 calls of a response": (RESPONSES, lambda: conversation(), 8, 200),
    "bad words of 2,048 prompts": (
        COMPLETIONS,
        lambda: completion(prompt=["Once"] * 2_048, bad_words=BAD_WORDS),
        5,
        400,
    ),
    "bad words of 1,000 prompts": (
        COMPLETIONS,
        lambda: completion(prompt=["Once"] * 1_000, bad_words=BAD_WORDS),
        5,
        400,
    ),
    "allowed ids of 1,000 prompts": (
        COMPLETIONS,
        lambda: completion(prompt=["Once"] * 1_000, allowed_token_ids=[*range(4_000)] * 60),
        5,
        400,
    ),
    "more answers than fit": (COMPLETIONS, lambda: completion(prompt=["Once"] * 2_048), 5, 400),
    "30 MB cut to 5 tokens": (
        COMPLETIONS,
        lambda: completion(prompt="ab " * 10_000_000, truncate_prompt_tokens=5),
        5,
        200,
    ),
    "30 MB that nothing divides": (
        COMPLETIONS,
        lambda: completion(prompt="ab" * 15_000_000, truncate_prompt_tokens=5),
        5,
        400,
    ),
    "a tool of 30 MB": (CHAT, lambda: chat(tools=[tool("ab " * 10_000_000)]), 8, 400),
    "a suffix of 30 MB": (COMPLETIONS, lambda: completion(suffix="ab " * 10_000_000), 5, 400),
    "30 MB to count": (TOKENIZE, lambda: completion(prompt="ab " * 10_000_000), 5, 400),
    "30 MB to embed": (
        EMBEDDINGS,
        lambda: json.dumps({"model": MODEL, "input": "a " * 15_000_000}).encode(),
        5,
        400,
    ),
    "a template that never ends": (CHAT, lambda: chat(chat_template=FOR_EVER), 15, 400),
    "a template that fills memory": (
        CHAT,
        lambda: chat(chat_template="{{ 'a' * 10 ** 11 }}"),
        15,
        400,
    ),
    "a template of parentheses": (CHAT, lambda: chat(chat_template="{{ " + "(" * 9_000), 15, 400),
}


@pytest.mark.parametrize("name", CASES)
def test_bad_input_is_answered_in_time_and_stalls_no_stream(
    server: RunningServer, name: str
) -> None:
    path, make_body, limit_s, status = CASES[name]
    body = make_body()
    with streaming(server) as longest_gap_s:
        started_s = time.monotonic()
        response = server.request("POST", path, content=body, timeout=60)
        took_s = time.monotonic() - started_s
        time.sleep(0.05)
    assert response.status_code == (status or response.status_code) < 500, response.text[:300]
    if response.status_code == 400:
        assert response.json()["error"]["message"]
    assert took_s < limit_s
    assert longest_gap_s() < MAX_STALL_S


def test_a_template_of_the_client_is_rendered_with_its_messages(server: RunningServer) -> None:
    template = "{{ bos_token }}{% for m in messages %}{{ m.role }}: {{ m.content }}{% endfor %}"
    fields = {"model": MODEL, "messages": [HELLO], "chat_template": template}
    body = server.post("/tokenize", fields).json()
    text = server.post("/detokenize", {"tokens": body["tokens"]}).json()["prompt"]
    assert text.endswith("user: Who are you?")


def test_the_clients_template_sees_what_the_request_gives_it(server: RunningServer) -> None:
    template = "{{ style }} {{ messages[0].content }}"
    fields = {"chat_template": template, "chat_template_kwargs": {"style": "short"}}
    body = server.post("/tokenize", {"messages": [HELLO], **fields}).json()
    text = server.post("/detokenize", {"tokens": body["tokens"]}).json()["prompt"]
    assert text == "short Who are you?"
