"""The requests, each of a shape that is long to read, check, render, tokenize, compile or write.

"within": just within the limits of `server.http.body`.
"""

import json

from tests.bench.server.neighbour_gap.requests import (
    BODY_BYTES,
    CHAT,
    COMPLETIONS,
    EMBEDDINGS,
    MESSAGES,
    MIB,
    RESPONSES,
    TEXT_BYTES,
    Case,
    chat,
    completion,
    filled,
    http,
    message,
    posts,
    raw,
    repeated,
    text,
)

_IDS = [*range(1 << 18)]
_MESSAGE = '{"role":"user","content":"a"}'
_PART = '{"type":"text","text":"a"}'
_PARTS_MESSAGE = f'{{"role":"user","content":[{_PART}]}}'
_TOOL = '{"type":"function","function":{"name":"f"}}'
_OWN_TOOL = '{"type":"function","name":"f"}'
_ITEM = '{"type":"message","role":"user","content":"a"}'
_ONE = f'{{"max_tokens":1,"messages":[{_MESSAGE}],'

_TEXTS: dict[str, Case] = {
    "a prompt of 32 MiB": text(COMPLETIONS, "prompt"),
    "a prompt of 32 MiB, truncated": lambda: completion(
        prompt=filled("a b "), truncate_prompt_tokens=100
    )(),
    "a prompt of 32 MiB without spaces": text(COMPLETIONS, "prompt", "abc"),
    "a prompt of 32 MiB in UTF-8": raw(
        lambda: b'{"prompt":"' + "é".encode() * (TEXT_BYTES // 2) + b'"}'
    ),
    "a prompt of 32 MiB of escapes": text(COMPLETIONS, "prompt", "é"),
    "a prompt of 2 MiB": lambda: completion(prompt=filled("a b ", 2 * MIB))(),
    "2,048 prompts of 16 KiB": lambda: completion(prompt=[filled("a b ", 16_000)] * 2048)(),
    "a suffix of 32 MiB": lambda: completion(suffix=filled("a b "))(),
    "a message of 32 MiB": message("a b "),
    "a message of 32 MiB of escapes": message("é"),
    "a message of 32 MiB with a template": lambda: chat(
        messages=[{"role": "user", "content": filled("a b ")}],
        chat_template="{{ messages[0].content }}",
    )(),
    "an image of 32 MiB": lambda: chat(
        messages=[{"role": "user", "content": [{"type": "image_url", "image_url": filled("a")}]}]
    )(),
    "a response's input of 32 MiB": text(RESPONSES, "input"),
    "a response's instructions of 32 MiB": lambda: posts(
        RESPONSES, input="a", instructions=filled("a b ")
    )(),
    "one of Anthropic's messages of 32 MiB": lambda: posts(
        MESSAGES, max_tokens=1, messages=[{"role": "user", "content": filled("a b ")}]
    )(),
    "an unknown field of 32 MiB": lambda: completion(x=filled("a"))(),
    "32 MiB to tokenize": text("/tokenize", "prompt"),
    "2 MiB to tokenize, with names": lambda: posts(
        "/tokenize", prompt=filled("a b ", 2 * MIB), return_token_strs=True
    )(),
    "a message of 32 MiB to tokenize": lambda: posts(
        "/tokenize", messages=[{"role": "user", "content": filled("a b ")}]
    )(),
    "2,048 embeddings of 16 KiB": lambda: posts(
        EMBEDDINGS, input=[filled("a b ", 16_000)] * 2048
    )(),
    "an input of 32 MiB to embed": text(EMBEDDINGS, "input"),
    "2,048 documents of 16 KiB to rank": lambda: posts(
        "/rerank", query="a", documents=[filled("a b ", 16_000)] * 2047
    )(),
    "32 MiB of opening brackets": raw(lambda: b"[" * BODY_BYTES),
    "32 MiB of spaces": raw(lambda: b'{"prompt":"a"}' + b" " * TEXT_BYTES),
    "32 MiB of digits": raw(lambda: b'{"prompt":' + b"7" * TEXT_BYTES + b"}"),
    "32 MiB of digits, quoted": text("/v1/completions", "seed", "7"),
    "32 MiB that are no JSON": raw(lambda: b"a" * BODY_BYTES),
    "32 MiB that are no UTF-8": raw(lambda: b'{"prompt":"' + b"a" * TEXT_BYTES + b'\xff"}'),
    "more than 32 MiB": raw(lambda: b'{"prompt":"' + b"a" * BODY_BYTES + b'"}'),
}

_LISTS: dict[str, Case] = {
    "2,048 prompts": completion(prompt=["Once"] * 2048),
    "2,048 prompts of 64 ids": completion(prompt=[_IDS[:64]] * 2048),
    "2,048 prompts of 250 ids": completion(prompt=[_IDS[:250]] * 2048),
    "262,144 allowed ids": completion(allowed_token_ids=_IDS),
    "128 answers, 262,144 allowed ids": completion(allowed_token_ids=_IDS, n=128),
    "2,048 prompts, 512 allowed ids": completion(
        prompt=["Once"] * 2048, allowed_token_ids=_IDS[:512]
    ),
    "2,048 prompts, 262,144 allowed ids": completion(
        prompt=["Once"] * 2048, allowed_token_ids=_IDS
    ),
    "2,048 prompts, 1,024 biases": completion(
        prompt=["Once"] * 2048, logit_bias=dict.fromkeys(map(str, _IDS[:1024]), 1)
    ),
    "2,048 prompts, 128 bad words": completion(prompt=["Once"] * 2048, bad_words=["abc "] * 128),
    "65,000 biases": completion(logit_bias=dict.fromkeys(map(str, _IDS[:65_000]), 1)),
    "100,000 stop strings": completion(stop=["a"] * 100_000),
    "16 stop strings of 1,024": completion(stop=["a" * 1023 + c for c in "abcdefghijklmnop"]),
    "100,000 bad words": completion(bad_words=["a"] * 100_000),
    "100,000 stop ids": completion(stop_token_ids=_IDS[:100_000]),
    "a prompt of 262,000 ids": completion(prompt=_IDS[:262_000]),
    "a prompt of 262,000 ids, echoed": completion(
        prompt=_IDS[1 : 1 << 17] * 2, echo=True, max_tokens=0
    ),
    "a prompt of 4,000,000 ids": completion(prompt=[7] * 4_000_000),
    "4,000,000 prompts": repeated(COMPLETIONS, '{"prompt":[', '""', "]}", 4_000_000),
    "1,000,000 fields": raw(
        lambda: b'{"prompt":"a",' + b",".join(b'"x%d":1' % i for i in range(10**6)) + b"}"
    ),
    "4,000,000 values of an unknown field": repeated(
        COMPLETIONS, '{"prompt":"a","x":[', "1", "]}", 4_000_000
    ),
    "4,000,000 lists in an unknown field": repeated(
        COMPLETIONS, '{"prompt":"a","x":[', "[]", "]}", 4_000_000
    ),
    "brackets nested 190 deep, 32 MiB": repeated(
        COMPLETIONS, '{"prompt":"a","x":[', "[" * 190 + "]" * 190, "]}"
    ),
    "brackets nested 16,000 deep": raw(
        lambda: b'{"prompt":"a","x":' + b"[" * 16_000 + b"]" * 16_000 + b"}"
    ),
    "a million messages": repeated(CHAT, '{"max_tokens":1,"messages":[', _MESSAGE, "]}", 10**6),
    "100,000 messages": repeated(CHAT, '{"max_tokens":1,"messages":[', _MESSAGE, "]}", 100_000),
    "100,000 messages, the last wrong": repeated(
        CHAT, '{"max_tokens":1,"messages":[', _MESSAGE, ",1]}", 100_000
    ),
    "100,000 parts of a message": repeated(
        CHAT, '{"max_tokens":1,"messages":[{"role":"user","content":[', _PART, "]}]}", 100_000
    ),
    "100,000 tools": repeated(CHAT, f'{_ONE}"tools":[', _TOOL, "]}", 100_000),
    "100,000 items of a response": repeated(RESPONSES, '{"input":[', _ITEM, "]}", 100_000),
    "100,000 of Anthropic's messages": repeated(
        MESSAGES, '{"max_tokens":1,"messages":[', _MESSAGE, "]}", 100_000
    ),
    "2,048 embeddings of 32 ids": posts(EMBEDDINGS, input=[_IDS[:32]] * 2048),
    "4,000,000 inputs to embed": repeated(EMBEDDINGS, '{"input":[', '""', "]}", 4_000_000),
    "2,047 documents to rank": posts("/rerank", query="a", documents=["b"] * 2047),
    "100,000 documents to rank": repeated(
        "/rerank", '{"query":"a","documents":[', '{"text":"a"}', "]}", 100_000
    ),
    "4,000,000 ids to detokenize": repeated("/detokenize", '{"tokens":[', "7", "]}", 4_000_000),
    "within: 520,000 ids": completion(prompt=[7] * 520_000),
    "within: 520,000 prompts": repeated(COMPLETIONS, '{"prompt":[', '""', "]}", 520_000),
    "within: 520,000 floats": repeated(COMPLETIONS, '{"prompt":[', "1.5", "]}", 520_000),
    "within: 65,000 unknown fields": lambda: completion(**{f"x{i}": 1 for i in range(65_000)})(),
    "within: chat_template_kwargs of 65,000": chat(
        chat_template_kwargs={f"k{i}": 1 for i in range(65_000)}
    ),
    "within: 16,000 messages": repeated(
        CHAT, '{"max_tokens":1,"messages":[', _MESSAGE, "]}", 16_000
    ),
    "within: 8,000 messages of a part": repeated(
        CHAT, '{"max_tokens":1,"messages":[', _PARTS_MESSAGE, "]}", 8_000
    ),
    "within: 16,000 messages to tokenize": repeated(
        "/tokenize", '{"messages":[', _MESSAGE, "]}", 16_000
    ),
    "within: 16,000 of Anthropic's messages": repeated(
        MESSAGES, '{"max_tokens":1,"messages":[', _MESSAGE, "]}", 16_000
    ),
    "within: 16,000 of Anthropic's blocks": repeated(
        MESSAGES, '{"max_tokens":1,"messages":[{"role":"user","content":[', _PART, "]}]}", 16_000
    ),
    "within: 16,000 items of a response": repeated(
        RESPONSES, '{"max_output_tokens":1,"input":[', _ITEM, "]}", 16_000
    ),
    "within: 16,000 tools of a response": repeated(
        RESPONSES, '{"input":"a","tools":[', _OWN_TOOL, "]}", 16_000
    ),
    "within: 8,000 tools": repeated(CHAT, f'{_ONE}"tools":[', _TOOL, "]}", 8_000),
    "within: 8,000 tools, one required": repeated(
        CHAT, f'{_ONE}"tool_choice":"required","tools":[', _TOOL, "]}", 8_000
    ),
    "within: 16,000 documents to rank": repeated(
        "/rerank", '{"query":"a","documents":[', '{"text":"a"}', "]}", 16_000
    ),
    "within: 520,000 ids to detokenize": repeated("/detokenize", '{"tokens":[', "7", "]}", 520_000),
}


def _schema(content: object) -> Case:
    """A chat whose answer has this JSON schema."""
    form = {"type": "json_schema", "json_schema": {"name": "n", "schema": content}}
    return chat(response_format=form, max_tokens=8)


def _properties(num: int, value: object = None) -> dict[str, object]:
    return {"type": "object", "properties": {f"p{i}": value or {} for i in range(num)}}


def _nested(depth: int) -> dict[str, object]:
    content: dict[str, object] = {"type": "object"}
    for _ in range(depth):
        content = {"type": "object", "properties": {"a": content}}
    return content


def _distinct_schemas() -> list[bytes]:
    """From as many clients at the same time, each with some work to compile."""
    kinds = [{"type": "string"}, {"type": "integer"}, {"enum": ["a", "b"]}, {"type": "number"}]
    contents = [
        {
            "type": "object",
            "properties": {f"p{i}_{j}": kinds[j % 4] for j in range(40)},
            "required": [f"p{i}_0"],
        }
        for i in range(200)
    ]
    return [request for content in contents for request in _schema(content)()]


_GRAMMARS: dict[str, Case] = {
    "200 distinct schemas": _distinct_schemas,
    "a schema with 1,000 properties": _schema(_properties(1_000)),
    "a schema with 1,000 strings": _schema(_properties(1_000, {"type": "string"})),
    "within: a schema of 16,000 properties": _schema(_properties(16_000)),
    "a schema with 100,000 properties": _schema(_properties(100_000)),
    "a schema nested 100 deep": _schema(_nested(100)),
    "a schema nested 5,000 deep": lambda: [
        http(
            CHAT,
            b'{"messages":[%b],"structured_outputs":{"json":' % _MESSAGE.encode()
            + b'{"not":' * 5_000
            + b"{}"
            + b"}" * 5_002,
        )
    ],
    "a schema with an enum of 20,000": _schema({"enum": _IDS[:20_000]}),
    "a schema with an enum of 500,000": _schema({"enum": [*range(500_000)]}),
    "a tool with 16,000 parameters": chat(
        tools=[{"type": "function", "function": {"name": "f", "parameters": _properties(16_000)}}]
    ),
    "200 tools, one required": chat(
        tools=[
            {"type": "function", "function": {"name": f"f{i}", "parameters": _properties(10)}}
            for i in range(200)
        ],
        tool_choice="required",
    ),
    "500,000 choices": chat(structured_outputs={"choice": list(map(str, range(500_000)))}),
    "10,000 choices": chat(structured_outputs={"choice": list(map(str, range(10_000)))}),
    "a regex of 1 MiB": chat(structured_outputs={"regex": "a" * MIB}),
    "a regex of 32 MiB": lambda: chat(structured_outputs={"regex": filled("a")})(),
    "a regex that expands": chat(structured_outputs={"regex": "((a{1,99}){1,99}){1,99}"}),
    "a grammar of 64 KiB": chat(grammar="root ::= " + " | ".join(['"abcdefgh"'] * 5_000)),
    "a grammar of 32 MiB": lambda: chat(grammar=filled("a"))(),
}

_ANSWERS: dict[str, Case] = {
    "logprobs of 100,000 ids of a prompt": completion(
        prompt=_IDS[:100_000], echo=True, logprobs=20, max_tokens=0
    ),
    "logprobs of 260,000 ids of a prompt": completion(
        prompt=_IDS[:260_000], prompt_logprobs=20, max_tokens=1
    ),
    "128 answers of 100 tokens with logprobs": completion(
        n=128, max_tokens=100, logprobs=20, ignore_eos=True
    ),
    "128 answers of 200 ids": completion(
        n=128, max_tokens=200, return_token_ids=True, ignore_eos=True
    ),
    "2,048 prompts, echoed with logprobs": completion(
        prompt=[_IDS[:100]] * 2048, echo=True, logprobs=5, max_tokens=0
    ),
}


def _pipelined(num: int) -> Case:
    again = b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n" * num
    return lambda: [again + b"GET /health HTTP/1.0\r\nHost: localhost\r\n\r\n"]


_HTTP: dict[str, Case] = {
    "1 MiB in chunks of one byte": lambda: [
        http(COMPLETIONS, json.dumps({"prompt": "a" * MIB}).encode(), chunk_bytes=1)
    ],
    "32 MiB in chunks of 16 bytes": lambda: [
        http(COMPLETIONS, json.dumps({"prompt": "a" * TEXT_BYTES}).encode(), chunk_bytes=16)
    ],
    "100,000 headers": lambda: [http(COMPLETIONS, b"{}", extra="a:b\r\n" * 100_000)],
    "a header of 32 MiB": lambda: [http(COMPLETIONS, b"{}", extra=f"a: {filled('b')}\r\n")],
    "a target of 400 KiB": lambda: [http(COMPLETIONS + "?" + "a=b&" * 100_000, b"{}")],
    "10,000 requests at once on a connection": _pipelined(10_000),
    "1,000 connections": lambda: _pipelined(1)() * 1_000,
}

CASES: dict[str, Case] = {
    "nothing hostile": completion(),
    **_TEXTS,
    **_LISTS,
    **_GRAMMARS,
    **_ANSWERS,
    **_HTTP,
}
