"""Methods, encodings, headers, and bytes that are not HTTP."""

import gzip
import json
import socket
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from tests.support.serving import MODEL, RunningServer, running_server

NAME_WITH_SLASHES = "org/family/model"
COMPLETIONS = "/v1/completions"
BODY = json.dumps({"model": MODEL, "prompt": "Once", "max_tokens": 3}).encode()


@pytest.fixture(scope="module")
def server() -> Iterator[RunningServer]:
    flags = ["--root-path", "/llm", "--served-model-name", MODEL, NAME_WITH_SLASHES]
    with running_server(*flags, "--max-body-bytes", "200000") as running:
        yield running


def raw(server: RunningServer, data: bytes) -> tuple[bytes, dict[str, Any]]:
    """The head that comes back, and the body, which must be JSON."""
    with socket.create_connection(("127.0.0.1", server.port), timeout=10) as connection:
        connection.sendall(data)
        received = b""
        while chunk := connection.recv(1 << 16):
            received += chunk
    head, _, body = received.rpartition(b"\r\n\r\n")
    return head, json.loads(body)


@pytest.mark.parametrize("prefix", ["", "/llm"])
def test_errors_of_anthropics_routes_are_anthropics_under_a_prefix_too(
    server: RunningServer, prefix: str
) -> None:
    url = f"{server.url}{prefix}/v1/messages"
    answers = [httpx.get(url), httpx.get(f"{url}/x/y"), httpx.post(url, content=b"x" * 300_000)]
    assert [answer.status_code for answer in answers] == [405, 404, 413]
    assert all(answer.json()["type"] == "error" for answer in answers)


@pytest.mark.parametrize("prefix", ["", "/llm"])
def test_errors_of_all_other_routes_are_openais(server: RunningServer, prefix: str) -> None:
    url = f"{server.url}{prefix}{COMPLETIONS}"
    answers = [httpx.get(url), httpx.get(f"{url}/x/y"), httpx.post(url, content=b"x" * 300_000)]
    assert [answer.status_code for answer in answers] == [405, 404, 413]
    assert all(set(answer.json()) == {"error"} for answer in answers)


@pytest.mark.parametrize("path", ["/v1/files", "/v1/batches/b-1", "/v1/audio/speech"])
def test_an_api_that_is_not_served_is_a_404_that_says_so(server: RunningServer, path: str) -> None:
    answer = server.post(path, {})
    assert answer.status_code == 404 and answer.json()["error"]["code"] == "unknown_url"
    api = "/".join(path.split("/")[:3])
    assert f"does not serve the API under {api}" in answer.json()["error"]["message"]


def test_a_preflight_without_cors_names_the_flag(server: RunningServer) -> None:
    headers = {"Origin": "https://a.example", "Access-Control-Request-Method": "POST"}
    answer = server.request("OPTIONS", COMPLETIONS, headers=headers)
    assert answer.status_code == 405
    assert "--allowed-origins" in answer.json()["error"]["message"]
    assert "--allowed" not in server.request("OPTIONS", COMPLETIONS).text


def test_the_paths_of_llama_cpp_and_of_sagemaker_are_served(server: RunningServer) -> None:
    message = [{"role": "user", "content": "Hi"}]
    bodies: dict[str, dict[str, Any]] = {
        "/completions": {"prompt": "Once", "max_tokens": 3},
        "/chat/completions": {"messages": message, "max_tokens": 3},
        "/embeddings": {"input": "Once"},
        "/ping": {},
    }
    for path, body in bodies.items():
        assert server.post(path, body).status_code == 200
    assert server.get("/models").json() == server.get("/v1/models").json()
    assert server.get("/ping").status_code == 200


@pytest.mark.parametrize("path", ["/health", "/v1/models", "/metrics"])
def test_head_is_get_without_the_body(server: RunningServer, path: str) -> None:
    answer = server.request("HEAD", path)
    assert answer.status_code == 200 and answer.content == b""
    assert server.request("HEAD", COMPLETIONS).status_code == 405


@pytest.mark.parametrize("name", [NAME_WITH_SLASHES, NAME_WITH_SLASHES.replace("/", "%2F")])
def test_a_model_whose_name_has_slashes_is_found(server: RunningServer, name: str) -> None:
    answer = server.get(f"/v1/models/{name}")
    assert answer.status_code == 200 and answer.json()["id"] == NAME_WITH_SLASHES


@pytest.mark.parametrize("encoding", ["gzip", "br", "deflate"])
def test_a_compressed_body_is_a_415_that_says_so(server: RunningServer, encoding: str) -> None:
    headers = {"content-encoding": encoding}
    answer = server.request("POST", COMPLETIONS, content=gzip.compress(BODY), headers=headers)
    assert answer.status_code == 415
    assert answer.json()["error"]["code"] == "unsupported_content_encoding"
    assert encoding in answer.json()["error"]["message"]


@pytest.mark.parametrize(
    "kind",
    [
        "application/json",
        "Application/JSON; charset=utf-8",
        "application/vnd.api+json",
        "text/json",
        "",
    ],
)
def test_what_is_called_json_or_nothing_at_all_is_read(server: RunningServer, kind: str) -> None:
    headers = {"content-type": kind} if kind else {}
    answer = server.request("POST", COMPLETIONS, content=BODY, headers=headers)
    assert answer.status_code == 200


@pytest.mark.parametrize("path", [COMPLETIONS, "/v1/messages", "/v1/embeddings", "/tokenize"])
@pytest.mark.parametrize(
    "kind",
    [
        "text/plain",
        "text/plain;application/json",
        "application/x-www-form-urlencoded",
        "multipart/form-data; boundary=x",
        "application/xml",
    ],
)
def test_a_body_that_is_not_called_json_is_a_415_that_says_what_to_send(
    server: RunningServer, path: str, kind: str
) -> None:
    """Without an option, curl sends a form."""
    answer = server.request("POST", path, content=BODY, headers={"content-type": kind})
    assert answer.status_code == 415
    assert "-H 'Content-Type: application/json'" in answer.json()["error"]["message"]


def test_a_byte_order_mark_is_passed_over(server: RunningServer) -> None:
    answer = server.request("POST", COMPLETIONS, content=b"\xef\xbb\xbf" + BODY)
    assert answer.status_code == 200


def test_of_a_key_that_comes_twice_the_last_counts(server: RunningServer) -> None:
    body = BODY[:-1] + b', "max_tokens": 5}'
    answer = server.request("POST", COMPLETIONS, content=body)
    assert answer.json()["usage"]["completion_tokens"] == 5


def test_a_client_that_expects_100_continue_gets_it(server: RunningServer) -> None:
    head = f"POST {COMPLETIONS} HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(BODY)}\r\n"
    head += "Expect: 100-continue\r\nConnection: close\r\n\r\n"
    with socket.create_connection(("127.0.0.1", server.port), timeout=10) as connection:
        connection.sendall(head.encode())
        assert connection.recv(1 << 12).startswith(b"HTTP/1.1 100 Continue")
        connection.sendall(BODY)
        assert connection.recv(1 << 12).startswith(b"HTTP/1.1 200 OK")


@pytest.mark.parametrize(
    "data", [b"FOO / HTTP/1.1\r\n\r\n", b"hello\r\n\r\n", b"GET / HTTP/1.1\r\nNo colon\r\n\r\n"]
)
def test_bytes_that_are_not_http_get_an_error_object_and_an_id(
    server: RunningServer, data: bytes
) -> None:
    head, body = raw(server, data)
    assert head.startswith(b"HTTP/1.1 400 ") and b"x-request-id: req-" in head
    assert body["error"]["code"] == "invalid_http"


def test_headers_without_end_are_not_kept(server: RunningServer) -> None:
    head, body = raw(server, b"GET /health HTTP/1.1\r\nA: " + b"b" * 530_000)
    assert head.startswith(b"HTTP/1.1 431 ")
    assert body["error"]["code"] == "headers_too_large"


@pytest.mark.parametrize(
    ("path", "content", "status"),
    [
        (COMPLETIONS, b"{", 400),
        ("/v1/nothing", b"", 404),
        (COMPLETIONS, BODY.replace(MODEL.encode(), b"other"), 404),
        ("/v1/models", b"", 405),
        (COMPLETIONS, b"x" * 300_000, 413),
    ],
)
def test_an_error_that_a_retry_would_repeat_tells_clients_not_to_retry(
    server: RunningServer, path: str, content: bytes, status: int
) -> None:
    answer = server.request("POST", path, content=content, headers={"x-request-id": "mine"})
    assert (answer.status_code, answer.headers["x-should-retry"]) == (status, "false")
    assert answer.headers["x-request-id"] == "mine"
    assert answer.headers["openai-processing-ms"].isdecimal()


def test_a_disconnect_frees_a_request_and_the_one_pipelined_after_it(
    server: RunningServer,
) -> None:
    long = json.dumps({"model": MODEL, "prompt": "x", "max_tokens": 50_000}).encode()
    head = f"POST {COMPLETIONS} HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(long)}\r\n\r\n"
    with socket.create_connection(("127.0.0.1", server.port), timeout=10) as connection:
        connection.sendall((head.encode() + long) * 2)
        while not server.metric("running_sequences"):
            pass
    server.wait_until_idle()
