"""`python -m tests.bench.server.event_loop [NAME ...]`: does one request make the others wait?

A neighbour streams a token every 10 ms while each hostile request is sent and answered. The longest
time between two reads of the neighbour is the gap. Each request is sent three times, and the
smallest of the three gaps is shown, as other programs on the machine only ever add to it.
"""

import contextlib
import json
import socket
import sys
import threading
import time
from collections.abc import Callable
from typing import NamedTuple

from tests.support.serving import MODEL, RunningServer

STEP_MS = 10
MIB = 1 << 20
_NUM_TRIES = 3
_ROOM = ("--max-num-queued-reqs", "2048")
_BODY_BYTES = 16 * MIB - 4096
_COMPLETIONS, _CHAT = "/v1/completions", "/v1/chat/completions"
_RESPONSES, _MESSAGES = "/v1/responses", "/v1/messages"
# Of the demo model, each many times: the lists are longer than its vocabulary.
_IDS = [i % 500 for i in range(1 << 18)]


class Case(NamedTuple):
    path: str
    make: Callable[[], bytes]
    chunk_bytes: int = 0  # of chunked encoding; 0: sent at once, with its length


def completion(**fields: object) -> bytes:
    return json.dumps({"prompt": "Once", "max_tokens": 1} | fields).encode()


def chat(**fields: object) -> bytes:
    messages = [{"role": "user", "content": "Hi"}]
    return json.dumps({"messages": messages, "max_tokens": 1} | fields).encode()


def schema(content: object) -> bytes:
    """A chat whose answer has this JSON schema."""
    form = {"type": "json_schema", "json_schema": {"name": "n", "schema": content}}
    return chat(response_format=form)


def tool(parameters: object) -> bytes:
    function = {"name": "f", "parameters": parameters}
    return chat(tools=[{"type": "function", "function": function}])


def properties(num: int) -> object:
    return {"type": "object", "properties": {f"p{i}": {} for i in range(num)}}


def repeated(before: str, part: str, after: str, num: int | None = None) -> bytes:
    """part: separated by commas; as many as fit into a body if num is None."""
    num = num or (_BODY_BYTES - len(before) - len(after)) // (len(part) + 1)
    return (before + f"{part}," * (num - 1) + part + after).encode()


_MESSAGE = '{"role":"user","content":"a"}'
_TOOL = '{"type":"function","function":{"name":"f"}}'
_ITEM = '{"type":"message","role":"user","content":"a"}'

CASES = {
    "nothing hostile": Case(_COMPLETIONS, completion),
    "2,048 prompts": Case(_COMPLETIONS, lambda: completion(prompt=["Once"] * 2048)),
    "2,048 prompts of 64 ids": Case(_COMPLETIONS, lambda: completion(prompt=[_IDS[:64]] * 2048)),
    "262,144 allowed ids": Case(_COMPLETIONS, lambda: completion(allowed_token_ids=_IDS)),
    "128 answers, 262,144 allowed ids": Case(
        _COMPLETIONS, lambda: completion(allowed_token_ids=_IDS, n=128)
    ),
    "2,048 prompts, 512 allowed ids": Case(
        _COMPLETIONS, lambda: completion(prompt=["Once"] * 2048, allowed_token_ids=_IDS[:512])
    ),
    "2,048 prompts, 262,144 allowed ids": Case(
        _COMPLETIONS, lambda: completion(prompt=["Once"] * 2048, allowed_token_ids=_IDS)
    ),
    "2,048 prompts, 1,024 biases": Case(
        _COMPLETIONS,
        lambda: completion(prompt=["Once"] * 2048, logit_bias={str(i): 1 for i in range(500)}),
    ),
    "2,048 prompts, 128 bad words": Case(
        _COMPLETIONS, lambda: completion(prompt=["Once"] * 2048, bad_words=["abc "] * 128)
    ),
    "300,000 biases": Case(
        _COMPLETIONS, lambda: completion(logit_bias={str(i): 1 for i in range(299_000)})
    ),
    "a prompt of 2,000,000 ids": Case(_COMPLETIONS, lambda: completion(prompt=[7] * 2_000_000)),
    "a prompt of 2,000,000 floats": Case(
        _COMPLETIONS, lambda: repeated('{"prompt":[', "1.5", "]}", 2_000_000)
    ),
    "2,000,000 prompts": Case(_COMPLETIONS, lambda: repeated('{"prompt":[', '""', "]}", 2_000_000)),
    "2,000,000 prompts of no ids": Case(
        _COMPLETIONS, lambda: repeated('{"prompt":[', "[]", "]}", 2_000_000)
    ),
    "2,000,000 values of an unknown field": Case(
        _COMPLETIONS, lambda: repeated('{"prompt":"a","x":[', "1", "]}", 2_000_000)
    ),
    "2,000,000 lists in an unknown field": Case(
        _COMPLETIONS, lambda: repeated('{"prompt":"a","x":[', "[]", "]}", 2_000_000)
    ),
    "99,000 objects in an unknown field": Case(
        _COMPLETIONS, lambda: repeated('{"prompt":"a","x":[', '{"a":{}}', "]}", 49_000)
    ),
    "299,000 unknown fields": Case(
        _COMPLETIONS,
        lambda: json.dumps({"prompt": "a"} | {f"x{i}": 1 for i in range(299_000)}).encode(),
    ),
    "a prompt of 16 MiB": Case(_COMPLETIONS, lambda: completion(prompt="a b " * (4 * MIB - 1100))),
    "a prompt of 16 MiB of escapes": Case(
        _COMPLETIONS, lambda: b'{"prompt":"' + b"\\u00e9" * (_BODY_BYTES // 6) + b'"}'
    ),
    "a prompt of 16 MiB in UTF-8": Case(
        _COMPLETIONS, lambda: b'{"prompt":"' + "é".encode() * (_BODY_BYTES // 2) + b'"}'
    ),
    "an unknown field of 16 MiB": Case(_COMPLETIONS, lambda: completion(x="a" * _BODY_BYTES)),
    "16 MiB of opening brackets": Case(_COMPLETIONS, lambda: b"[" * _BODY_BYTES),
    "brackets nested 190 deep, 16 MiB": Case(
        _COMPLETIONS, lambda: repeated('{"prompt":"a","x":[', "[" * 190 + "]" * 190, "]}")
    ),
    "16 MiB of spaces": Case(_COMPLETIONS, lambda: completion() + b" " * _BODY_BYTES),
    "16 MiB of digits": Case(_COMPLETIONS, lambda: b'{"prompt":' + b"7" * _BODY_BYTES + b"}"),
    "16 MiB that are no JSON": Case(_COMPLETIONS, lambda: b"a" * _BODY_BYTES),
    "16 MiB that are no UTF-8": Case(
        _COMPLETIONS, lambda: b'{"prompt":"' + b"a" * _BODY_BYTES + b"\xff" + b'"}'
    ),
    "1 MiB in chunks of one byte": Case(_COMPLETIONS, lambda: completion(prompt="a" * MIB), 1),
    "16 MiB in chunks of 16 bytes": Case(
        _COMPLETIONS, lambda: completion(prompt="a" * (_BODY_BYTES)), 16
    ),
    "a million messages": Case(_CHAT, lambda: repeated('{"messages":[', _MESSAGE, "]}", 10**6)),
    "99,000 messages": Case(_CHAT, lambda: repeated('{"messages":[', _MESSAGE, "]}", 99_000)),
    "99,000 messages, the last wrong": Case(
        _CHAT, lambda: repeated('{"messages":[', _MESSAGE, ",1]}", 99_000)
    ),
    "60,000 messages": Case(_CHAT, lambda: repeated('{"messages":[', _MESSAGE, "]}", 60_000)),
    "99,000 parts of a message": Case(
        _CHAT,
        lambda: repeated(
            '{"messages":[{"role":"user","content":[', '{"type":"text","text":"a"}', "]}]}", 99_000
        ),
    ),
    "a message of 16 MiB": Case(
        _CHAT, lambda: chat(messages=[{"role": "user", "content": "a b " * (4 * MIB - 1100)}])
    ),
    "600,000 tools": Case(
        _CHAT, lambda: repeated(f'{{"messages":[{_MESSAGE}],"tools":[', _TOOL, "]}", 600_000)
    ),
    "49,000 tools": Case(
        _CHAT, lambda: repeated(f'{{"messages":[{_MESSAGE}],"tools":[', _TOOL, "]}", 49_000)
    ),
    "99,000 tools that are wrong": Case(
        _CHAT, lambda: repeated(f'{{"messages":[{_MESSAGE}],"tools":[', "{}", "]}", 99_000)
    ),
    "a tool with 99,000 parameters": Case(_CHAT, lambda: tool(properties(99_000))),
    "a schema with 99,000 properties": Case(_CHAT, lambda: schema(properties(99_000))),
    "a schema with an enum of 500,000": Case(_CHAT, lambda: schema({"enum": [*range(500_000)]})),
    "99,000 functions": Case(
        _CHAT,
        lambda: repeated(f'{{"messages":[{_MESSAGE}],"functions":[', '{"name":"f"}', "]}", 99_000),
    ),
    "chat_template_kwargs of 299,000": Case(
        _CHAT, lambda: chat(chat_template_kwargs={f"k{i}": 1 for i in range(299_000)})
    ),
    "99,000 items of a response": Case(
        _RESPONSES, lambda: repeated('{"input":[', _ITEM, "]}", 99_000)
    ),
    "16,000 items of a response": Case(
        _RESPONSES, lambda: repeated('{"max_output_tokens":1,"input":[', _ITEM, "]}", 16_000)
    ),
    "99,000 tools of a response": Case(
        _RESPONSES,
        lambda: repeated('{"input":"a","tools":[', '{"type":"function","name":"f"}', "]}", 99_000),
    ),
    "a response's input of 16 MiB": Case(
        _RESPONSES, lambda: json.dumps({"input": "a b " * (4 * MIB - 1100)}).encode()
    ),
    "99,000 of Anthropic's messages": Case(
        _MESSAGES, lambda: repeated('{"max_tokens":1,"messages":[', _MESSAGE, "]}", 99_000)
    ),
    "99,000 of Anthropic's blocks": Case(
        _MESSAGES,
        lambda: repeated(
            '{"max_tokens":1,"messages":[{"role":"user","content":[',
            '{"type":"text","text":"a"}',
            "]}]}",
            99_000,
        ),
    ),
    "2,048 embeddings of 32 ids": Case(
        "/v1/embeddings", lambda: json.dumps({"input": [_IDS[:32]] * 2048}).encode()
    ),
    "2,000,000 inputs to embed": Case(
        "/v1/embeddings", lambda: repeated('{"input":[', '""', "]}", 2_000_000)
    ),
    "99,000 documents to rank": Case(
        "/v1/rerank",
        lambda: repeated('{"query":"a","documents":[', '{"text":"a"}', "]}", 99_000),
    ),
    "16 MiB to tokenize": Case(
        "/tokenize", lambda: json.dumps({"prompt": "a b " * (4 * MIB - 1100)}).encode()
    ),
    "2,000,000 ids to detokenize": Case(
        "/detokenize", lambda: repeated('{"tokens":[', "7", "]}", 2_000_000)
    ),
    # Just within the limits of `server.http.parsable`.
    "within: 520,000 ids": Case(_COMPLETIONS, lambda: completion(prompt=[7] * 520_000)),
    "within: 520,000 prompts": Case(
        _COMPLETIONS, lambda: repeated('{"prompt":[', '""', "]}", 520_000)
    ),
    "within: 520,000 floats": Case(
        _COMPLETIONS, lambda: repeated('{"prompt":[', "1.5", "]}", 520_000)
    ),
    "within: 65,000 unknown fields": Case(
        _COMPLETIONS,
        lambda: json.dumps({"prompt": "a"} | {f"x{i}": 1 for i in range(65_000)}).encode(),
    ),
    "within: chat_template_kwargs of 65,000": Case(
        _CHAT, lambda: chat(chat_template_kwargs={f"k{i}": 1 for i in range(65_000)})
    ),
    "within: 16,000 messages": Case(
        _CHAT, lambda: repeated('{"messages":[', _MESSAGE, "]}", 16_000)
    ),
    "within: 8,000 messages of a part": Case(
        _CHAT,
        lambda: repeated(
            '{"messages":[', '{"role":"user","content":[{"type":"text","text":"a"}]}', "]}", 8_000
        ),
    ),
    "within: 16,000 of Anthropic's messages": Case(
        _MESSAGES, lambda: repeated('{"max_tokens":1,"messages":[', _MESSAGE, "]}", 16_000)
    ),
    "within: 16,000 of Anthropic's blocks": Case(
        _MESSAGES,
        lambda: repeated(
            '{"max_tokens":1,"messages":[{"role":"user","content":[',
            '{"type":"text","text":"a"}',
            "]}]}",
            16_000,
        ),
    ),
    "within: 16,000 items of a response": Case(
        _RESPONSES, lambda: repeated('{"input":[', _ITEM, "]}", 16_000)
    ),
    "within: 16,000 tools of a response": Case(
        _RESPONSES,
        lambda: repeated('{"input":"a","tools":[', '{"type":"function","name":"f"}', "]}", 16_000),
    ),
    "within: a schema of 16,000 properties": Case(_CHAT, lambda: schema(properties(16_000))),
    "within: 16,000 documents to rank": Case(
        "/v1/rerank",
        lambda: repeated('{"query":"a","documents":[', '{"text":"a"}', "]}", 16_000),
    ),
    "within: 520,000 ids to detokenize": Case(
        "/detokenize", lambda: repeated('{"tokens":[', "7", "]}", 520_000)
    ),
}


def main(names: list[str]) -> None:
    server = RunningServer("--scripted", "--scripted-step-ms", str(STEP_MS), *_ROOM)
    try:
        server.wait_until_ready()
        print(f"{'request':40} {'status':>6} {'gap, ms':>8} {'answer, ms':>10}")
        for name, case in CASES.items():
            if names and not any(each in name for each in names):
                continue
            body = case.make()
            tries = [_attack(server.port, case, body) for _ in range(_NUM_TRIES)]
            gap_s, _, _ = min(tries)
            statuses = {status for _, status, _ in tries}
            answer_s = min(answer_s for _, _, answer_s in tries)
            status = ",".join(sorted(statuses))
            print(f"{name:40} {status:>6} {gap_s * 1e3:8.0f} {answer_s * 1e3:10.0f}", flush=True)
    finally:
        server.stop()


def _attack(port: int, case: Case, body: bytes) -> tuple[float, str, float]:
    """The neighbour's longest gap, the status, and the time to the answer."""
    neighbour = _Neighbour(port)
    began_s = time.monotonic()
    status = _status(port, case, body)
    ended_s = time.monotonic()
    time.sleep(0.1)  # for what follows the answer
    return neighbour.longest_gap_s(), status, ended_s - began_s


def _status(port: int, case: Case, body: bytes) -> str:
    length = "Transfer-Encoding: chunked" if case.chunk_bytes else f"Content-Length: {len(body)}"
    head = (
        f"POST {case.path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        f"Connection: close\r\n{length}\r\n\r\n"
    )
    if size := case.chunk_bytes:
        chunks = (body[i : i + size] for i in range(0, len(body), size))
        body = b"".join(b"%x\r\n%b\r\n" % (len(chunk), chunk) for chunk in chunks) + b"0\r\n\r\n"
    with socket.create_connection(("127.0.0.1", port), timeout=300) as connection:
        # A body that is too large is refused before all of it is sent.
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            connection.sendall(head.encode() + body)
        answer = b""
        with contextlib.suppress(ConnectionResetError):
            while chunk := connection.recv(1 << 16):
                answer = answer or chunk
    return answer[9:12].decode() or "-"


class _Neighbour:
    """A stream, read in a thread."""

    def __init__(self, port: int) -> None:
        body = completion(stream=True, max_tokens=900, ignore_eos=True, model=MODEL)
        head = (
            "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\n"
            f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
        )
        self._connection = socket.create_connection(("127.0.0.1", port), timeout=300)
        self._connection.sendall(head.encode() + body)
        self._longest_s = 0.0
        self._has_begun = threading.Event()
        self._is_over = False
        self._reader = threading.Thread(target=self._read)
        self._reader.start()
        self._has_begun.wait(30)

    def longest_gap_s(self) -> float:
        self._is_over = True
        self._reader.join()
        self._connection.close()
        return self._longest_s

    def _read(self) -> None:
        last_s = None
        while data := self._connection.recv(1 << 16):
            now_s = time.monotonic()
            if last_s is not None:
                self._longest_s = max(self._longest_s, now_s - last_s)
                self._has_begun.set()
            last_s = now_s
            if self._is_over or b"[DONE]" in data:
                return


if __name__ == "__main__":
    main(sys.argv[1:])
