"""Images through HTTP: in the three APIs, into the prompt, with limits; and what is refused."""

import base64
import contextlib
import threading
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from tests.server.media.test_decoder import ATTACKS
from tests.support.image_prompts import (
    QWEN,
    data_url,
    picture,
    png_of_zeros,
    write_prompt_files,
)
from tests.support.serving import RunningServer, refusal, running_server

MODEL = "seeing"
NUM_TOKENS = 6  # of `picture()`


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("seeing")
    write_prompt_files(path, QWEN)
    return str(path)


@pytest.fixture(scope="module")
def seeing(directory: str) -> Iterator[RunningServer]:
    limit = ("--limit-mm-per-prompt", '{"image": 3}')
    hosts = ("--allowed-media-domains", "localhost", "127.0.0.1", "images.example")
    flags = ("--model", directory, "--served-model-name", MODEL, "--max-model-len", "2000")
    with running_server(*flags, *limit, *hosts) as server:
        yield server


def part(url: str, **fields: Any) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": url, **fields}}


def text(words: str) -> dict[str, Any]:
    return {"type": "text", "text": words}


def user(*parts: Any) -> dict[str, Any]:
    return {"role": "user", "content": list(parts)}


def ids_of(server: RunningServer, *messages: dict[str, Any]) -> list[int]:
    response = server.post("/tokenize", {"messages": list(messages)})
    assert response.status_code == 200, response.text
    tokens: list[int] = response.json()["tokens"]
    return tokens


def test_an_image_is_as_many_tokens_as_it_has_rows(seeing: RunningServer) -> None:
    image = part(data_url(picture()))
    ids = ids_of(seeing, user(text("What is "), image, text("?")))
    pad = max(set(ids), key=ids.count)
    assert ids.count(pad) == NUM_TOKENS
    first = ids.index(pad)
    assert set(ids[first : first + NUM_TOKENS]) == {pad}
    without = ids_of(seeing, user(text("What is "), text("?")))
    assert len(ids) == len(without) + NUM_TOKENS + 2  # with the marks around it
    answer = seeing.chat(model=MODEL, messages=[user(text("What is "), image, text("?"))])
    assert answer.status_code == 200, answer.text
    assert answer.json()["usage"]["prompt_tokens"] == len(ids)


def test_the_three_apis_make_the_same_prompt(seeing: RunningServer) -> None:
    content, url = picture(), data_url(picture())
    chat = seeing.chat(model=MODEL, messages=[user(text("Look: "), part(url))]).json()
    response = seeing.post(
        "/v1/responses",
        {
            "model": MODEL,
            "max_output_tokens": 8,
            "seed": 1,
            "input": [
                user(
                    {"type": "input_text", "text": "Look: "},
                    {"type": "input_image", "image_url": url, "detail": "auto"},
                )
            ],
        },
    ).json()
    source = {
        "type": "base64",
        "media_type": "image/png",
        "data": base64.b64encode(content).decode(),
    }
    message = seeing.post(
        "/v1/messages",
        {
            "model": MODEL,
            "max_tokens": 8,
            "seed": 1,
            "messages": [user(text("Look: "), {"type": "image", "source": source})],
        },
    ).json()
    texts = (
        chat["choices"][0]["message"]["content"],
        response["output"][0]["content"][0]["text"],
        message["content"][0]["text"],
    )
    nums = (
        chat["usage"]["prompt_tokens"],
        response["usage"]["input_tokens"],
        message["usage"]["input_tokens"] + message["usage"].get("cache_read_input_tokens", 0),
    )
    assert len(set(texts)) == 1 and len(set(nums)) == 1, (texts, nums)
    counted = seeing.post(
        "/v1/messages/count_tokens",
        {
            "model": MODEL,
            "messages": [user(text("Look: "), {"type": "image", "source": source})],
        },
    )
    assert counted.json()["input_tokens"] == nums[0]


def test_results_of_tools_hold_images_in_the_three_apis(seeing: RunningServer) -> None:
    url = data_url(picture())
    data = url.partition(",")[2]
    call = {"id": "c1", "type": "function", "function": {"name": "see", "arguments": "{}"}}
    chat = [
        user(text("See")),
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c1", "content": [text("here: "), part(url)]},
    ]
    ids = ids_of(seeing, *chat)
    (pad,) = seeing.post("/tokenize", {"prompt": "<|image_pad|>"}).json()["tokens"]
    assert ids.count(pad) == NUM_TOKENS
    assert seeing.chat(model=MODEL, messages=chat).status_code == 200
    source = {"type": "base64", "media_type": "image/png", "data": data}
    result = {
        "type": "tool_result",
        "tool_use_id": "c1",
        "content": [text("here: "), {"type": "image", "source": source}],
    }
    use = {"type": "tool_use", "id": "c1", "name": "see", "input": {}}
    messages = [user(text("See")), {"role": "assistant", "content": [use]}, user(result)]
    counted = seeing.post("/v1/messages/count_tokens", {"model": MODEL, "messages": messages})
    assert counted.json() == {"input_tokens": len(ids)}, counted.text
    output = [{"type": "input_text", "text": "here: "}, {"type": "input_image", "image_url": url}]
    items = [
        {"role": "user", "content": "See"},
        {"type": "function_call", "call_id": "c1", "name": "see", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c1", "output": output},
    ]
    response = seeing.post(
        "/v1/responses", {"model": MODEL, "input": items, "max_output_tokens": 2}
    )
    assert response.json()["usage"]["input_tokens"] == len(ids)


def test_an_earlier_response_keeps_its_image(seeing: RunningServer) -> None:
    image = {"type": "input_image", "image_url": data_url(picture())}
    body: dict[str, Any] = {"model": MODEL, "max_output_tokens": 2}
    first = seeing.post("/v1/responses", body | {"input": [user(image)]}).json()
    body |= {"previous_response_id": first["id"], "input": "And now?"}
    second = seeing.post("/v1/responses", body)
    assert second.json()["usage"]["input_tokens"] > first["usage"]["input_tokens"] + 6


def test_low_detail_takes_fewer_tokens(seeing: RunningServer) -> None:
    url = data_url(picture(900, 900))
    low, high = (ids_of(seeing, user(part(url, detail=d))) for d in ("low", "high"))
    assert len(low) < len(high) / 2


def test_a_request_says_how_large_its_images_become_in_the_three_apis(
    seeing: RunningServer,
) -> None:
    url, options = data_url(picture(400, 400)), {"max_pixels": 1 << 14}
    chat: dict[str, Any] = {"messages": [user(part(url))]}
    num_whole = len(ids_of(seeing, *chat["messages"]))
    num_small = seeing.post("/tokenize", chat | {"mm_processor_kwargs": options}).json()["count"]
    assert num_whole - num_small == 12 * 12 - 4 * 4
    fields: dict[str, Any] = {"model": MODEL, "mm_processor_kwargs": options}
    source = {"type": "base64", "media_type": "image/png", "data": url.partition(",")[2]}
    messages = [user({"type": "image", "source": source})]
    counted = seeing.post("/v1/messages/count_tokens", fields | {"messages": messages})
    assert counted.json() == {"input_tokens": num_small}
    items = [user({"type": "input_image", "image_url": url})]
    body = fields | {"input": items, "max_output_tokens": 2}
    assert seeing.post("/v1/responses", body).json()["usage"]["input_tokens"] == num_small
    wrong = refused(seeing.chat(model=MODEL, **chat, mm_processor_kwargs={"do_resize": False}))
    assert wrong["param"] == "mm_processor_kwargs" and "longest_edge" in wrong["message"]


def refused(response: httpx.Response) -> dict[str, Any]:
    assert response.status_code == 400, response.text
    error: dict[str, Any] = response.json()["error"]
    return error


@pytest.mark.parametrize("name", ATTACKS)
def test_an_attack_is_a_400_that_names_the_part(seeing: RunningServer, name: str) -> None:
    content, reason = ATTACKS[name]
    data = content if isinstance(content, str) else base64.b64encode(content).decode()
    url = f"data:image/png;base64,{data}"
    error = refused(
        seeing.chat(model=MODEL, messages=[user(text("a")), user(text("b"), part(url))])
    )
    assert error["param"] == "messages[1].content[1].image_url" and error["code"] == "invalid_image"
    assert reason in error["message"] and error["param"] in error["message"]


@pytest.mark.parametrize(
    ("url", "reason"),
    [
        ("data:text/html;base64,PGI+", "its type is 'text/html'"),
        ("data:image/svg+xml;base64,PHN2Zz4=", "its type is 'image/svg+xml'"),
        ("data:;base64,AAAA", "its type is ''"),
        ("data:image/png,abc", "must begin like data:image/png;base64,"),
        ("data:image/png;charset=utf-8,abc", "must begin like"),
        ("data:image/png;base64", "must begin like"),
        ("data:" + ";a" * 100 + ";base64,AAAA", "must begin like"),
        ("data:", "must begin like"),
        ("file:///etc/passwd", "its URL must be like https://"),
        ("http://images.example/a.png", "its URL must be like https://"),
        ("https://other.example/a.png", "not among the hosts"),
        ("https://localhost/a.png", "not public"),
        ("https://127.0.0.1/a.png", "not public"),
        ("https://[::1]/a.png", "its URL must be like https://"),
        ("https://169.254.169.254/latest/meta-data", "not among the hosts"),
        ("https://images.example\\@127.0.0.1/a.png", "its URL must be like https://"),
        ("", "its URL must be like https://"),
    ],
)
def test_a_url_is_refused_by_the_part_s_name(seeing: RunningServer, url: str, reason: str) -> None:
    error = refused(seeing.chat(model=MODEL, messages=[user(part(url))]))
    assert error["param"] == "messages[0].content[0].image_url"
    assert reason in error["message"], error


WRONG: dict[str, tuple[list[dict[str, Any]], str, str]] = {
    "four images": ([user(*[part(data_url(picture()))] * 4)], "content[3].image_url", "one image"),
    "of an assistant": (
        [user(text("a")), {"role": "assistant", "content": [part("data:")]}],
        "messages[1].content[0].image_url",
        "has no images",
    ),
    "of a system": (
        [{"role": "system", "content": [part("data:")]}, user(text("a"))],
        "messages[0].content[0].image_url",
        "has no images",
    ),
    "no URL": ([user({"type": "image_url"})], "content[0].image_url", "is missing"),
    "an empty object": ([user({"type": "image_url", "image_url": {}})], "image_url", "url"),
    "a number": ([user({"type": "image_url", "image_url": 5})], "messages[0].content", "parts"),
    "a detail": ([user(part("data:", detail="most"))], "image_url", "detail"),
    "a mark in a text": (
        [user(text("<|image_pad|>"), part(data_url(picture())))],
        "messages",
        "2 marks for one (<|image_pad|>)",
    ),
    "an image of more than the context": (
        [user(part(data_url(picture(1000, 900))), part(data_url(picture(1000, 900))))] * 1
        + [user(part(data_url(picture(1000, 900))))],
        "messages[1].content[0].image_url",
        "this model's context",
    ),
    "audio": ([user({"type": "input_audio", "input_audio": {}})], "content[0].type", "input_audio"),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_is_wrong_is_refused_by_name(seeing: RunningServer, name: str) -> None:
    messages, param, reason = WRONG[name]
    error = refused(seeing.chat(model=MODEL, messages=messages))
    assert param in error["param"] and reason in error["message"], error


def test_a_prompt_with_an_image_is_not_cut(seeing: RunningServer) -> None:
    messages = [user(part(data_url(picture())))]
    error = refused(seeing.chat(model=MODEL, messages=messages, truncate_prompt_tokens=9))
    assert error["param"] == "truncate_prompt_tokens"


@pytest.mark.parametrize(
    ("block", "param", "reason"),
    [
        ({"type": "file", "file_id": "f"}, "source.type", "base64"),
        ({"type": "base64", "media_type": "image/png"}, "source.data", "is missing"),
        ({"type": "url"}, "source.url", "is missing"),
        ({"type": "base64", "media_type": "image/png", "data": "%"}, "source", "valid base64"),
        ({"type": "base64", "media_type": "image/tiff", "data": "AAAA"}, "source", "image/tiff"),
        ({"type": "url", "url": "https://other.example/a"}, "source", "not among the hosts"),
    ],
)
def test_an_image_of_messages_is_refused_by_its_own_name(
    seeing: RunningServer, block: dict[str, Any], param: str, reason: str
) -> None:
    content = [text("a"), {"type": "image", "source": block}]
    body = {"model": MODEL, "max_tokens": 2, "messages": [user(*content)]}
    response = seeing.post("/v1/messages", body)
    assert response.status_code == 400
    message = response.json()["error"]["message"]
    assert f"messages[0].content[1].{param}" in message and reason in message, message


def test_an_image_of_responses_is_refused_by_its_own_name(seeing: RunningServer) -> None:
    system = {"role": "system", "content": "Be brief."}
    image = {"type": "input_image", "image_url": "data:image/png;base64,AAAA"}
    body = {"model": MODEL, "input": [system, system, user(image)]}
    assert refused(seeing.post("/v1/responses", body))["param"] == "input[2].content[0].image_url"
    body = {"model": MODEL, "input": [user({"type": "input_image", "file_id": "f"})]}
    assert refused(seeing.post("/v1/responses", body))["param"] == "input[0].content[0].file_id"


def test_streams_of_others_go_on_while_images_are_decoded(seeing: RunningServer) -> None:
    """And when their decoders are killed: nothing of theirs is in the server's process."""
    end = threading.Event()

    def send(width: int) -> None:
        while not end.is_set():
            large = data_url(png_of_zeros(width, 3000))
            seeing.chat(model=MODEL, messages=[user(part(large))], max_tokens=1)
            width += 1  # else it would be known, and not decoded

    senders = [threading.Thread(target=send, args=(width,)) for width in (2000, 3000, 4000)]
    for each in senders:
        each.start()
    try:
        body = {"model": MODEL, "prompt": "a", "max_tokens": 1500, "stream": True}
        url, num_events = f"{seeing.url}/v1/completions", 0
        with httpx.stream("POST", url, json=body | {"ignore_eos": True}, timeout=60) as stream:
            for line in stream.iter_lines():
                num_events += line.startswith("data: {")
        assert num_events > 10
    finally:
        end.set()
        for each in senders:
            each.join()


def test_a_client_that_leaves_ends_nothing_but_its_own(seeing: RunningServer) -> None:
    body = {"model": MODEL, "messages": [user(part(data_url(png_of_zeros(5000, 5000))))]}
    with contextlib.suppress(httpx.ReadTimeout):
        httpx.post(f"{seeing.url}/v1/chat/completions", json=body, timeout=0.3)
    image = part(data_url(picture()))
    assert seeing.chat(model=MODEL, messages=[user(image)]).status_code == 200


@pytest.mark.slow
@pytest.mark.parametrize(
    "flags", [("--language-model-only",), ("--limit-mm-per-prompt", '{"image": 0}')], ids=str
)
def test_a_server_of_text_alone_refuses_images_by_name(
    directory: str, flags: tuple[str, ...]
) -> None:
    with running_server("--model", directory, "--max-model-len", "2000", *flags) as server:
        messages = [user(text("a"), part(data_url(picture())))]
        error = refused(server.post("/v1/chat/completions", {"messages": messages}))
        assert error["param"] == "messages[0].content[1].image_url"
        assert error["code"] == "unsupported_parameter"
        assert "--language-model-only" in error["message"]
        plain = server.post("/v1/chat/completions", {"messages": [user(text("a"))]})
        assert plain.status_code == 200


@pytest.mark.slow
def test_a_flag_says_how_large_images_become(directory: str) -> None:
    flags = ("--model", directory, "--max-model-len", "2000", "--mm-processor-kwargs")
    with running_server(*flags, '{"max_pixels": 16384}') as server:
        messages = [user(part(data_url(picture(400, 400))))]
        ids = ids_of(server, *messages)
        assert ids.count(max(set(ids), key=ids.count)) == 4 * 4
    message = refusal("--scripted", *flags, '{"max_soft_tokens": 70}')
    assert "--mm-processor-kwargs: 'max_soft_tokens': 70" in message
