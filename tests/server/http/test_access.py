"""Who may use the server, and how: keys, origins, prefixes, TLS, deadlines, retries."""

import json
import shutil
import ssl
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from penstock.server.command_line.cli import main
from tests.support.serving import MODEL, RunningServer, running_server, wait_until

ORIGIN = "https://pages.example"
OPEN_PATHS = ["/health", "/ping", "/ready"]
LONG: dict[str, Any] = {"model": MODEL, "prompt": "x", "max_tokens": 50_000}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    """With everything on."""
    keys = tmp_path_factory.mktemp("keys") / "keys"
    keys.write_text("# ours\nthird\n\nfourth\nsch\u00f6n\n", encoding="utf-8")
    flags = ["--api-key", "first", "second", "--api-key", "fifth", "--api-key-file", str(keys)]
    flags += ["--allowed-origins", json.dumps([ORIGIN]), "--root-path", "/llm"]
    with running_server(*flags) as running:
        yield running


def with_key(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


@pytest.mark.parametrize("key", ["first", "second", "third", "fourth", "fifth"])
def test_each_key_of_the_flags_and_of_the_file_opens(server: RunningServer, key: str) -> None:
    assert server.get("/v1/models", headers=with_key(key)).status_code == 200


def test_a_key_beyond_ascii_opens_as_curl_sends_it(server: RunningServer) -> None:
    headers = [(b"Authorization", "Bearer sch\u00f6n".encode())]
    assert server.request("GET", "/v1/models", headers=headers).status_code == 200


@pytest.mark.parametrize("key", ["x", "firs", "firstt", "# ours", "schl\u00fcssel"])
def test_any_other_key_gets_a_401_that_explains_how_to_send_one(
    server: RunningServer, key: str
) -> None:
    headers = [(b"Authorization", f"Bearer {key}".encode("latin-1"))]
    for path in ("/v1/models", "/tokenize", "/metrics", "/version", "/docs", "/nothing"):
        response = server.request("GET", path, headers=headers)
        assert response.status_code == 401
        error = response.json()["error"]
        assert error["code"] == "invalid_api_key"
        assert error["message"].startswith("Incorrect API key provided; send the header")
        assert response.headers["www-authenticate"] == "Bearer"
    message = server.get("/v1/models").json()["error"]["message"]
    assert message.startswith("You didn't provide an API key; send the header")


@pytest.mark.parametrize("path", OPEN_PATHS)
def test_what_runs_the_server_needs_no_key(server: RunningServer, path: str) -> None:
    assert server.get(path).status_code == 200


def test_a_key_comes_from_the_environment_where_no_flag_gives_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("PENSTOCK_API_KEY", "from outside")
    with running_server() as server:
        assert server.get("/v1/models").status_code == 401
        assert server.get("/v1/models", headers=with_key("from outside")).status_code == 200


def test_a_prefix_may_be_there_or_taken_off(server: RunningServer) -> None:
    for prefix in ("", "/llm"):
        path = f"{prefix}/v1/models"
        assert server.get(path).status_code == 401
        assert server.get(path, headers=with_key("first")).status_code == 200
        assert server.get(f"{prefix}/health").status_code == 200


def test_a_page_of_an_allowed_origin_may_ask_and_read_the_answer(server: RunningServer) -> None:
    preflight = server.request(
        "OPTIONS",
        "/v1/chat/completions",
        headers={
            "Origin": ORIGIN,
            "Access-Control-Request-Method": "POST",
            "Access-Control-Request-Headers": "authorization,content-type",
        },
    )
    assert preflight.status_code == 200
    assert preflight.headers["access-control-allow-origin"] == ORIGIN
    assert "POST" in preflight.headers["access-control-allow-methods"]
    refused = server.get("/v1/models", headers={"Origin": ORIGIN})
    assert refused.status_code == 401
    assert refused.headers["access-control-allow-origin"] == ORIGIN
    assert "x-request-id" in refused.headers["access-control-expose-headers"]


def test_a_page_of_another_origin_gets_no_cors_headers(server: RunningServer) -> None:
    headers = {"Origin": "https://other.example", **with_key("first")}
    assert "access-control-allow-origin" not in server.get("/v1/models", headers=headers).headers


@pytest.fixture(scope="module")
def with_deadline() -> Iterator[RunningServer]:
    with running_server("--request-timeout", "0.3", "--max-num-seqs", "1") as running:
        yield running


def test_an_answer_that_takes_too_long_is_a_504_not_to_be_retried(
    with_deadline: RunningServer,
) -> None:
    response = with_deadline.post("/v1/completions", LONG)
    error = response.json()["error"]
    assert (response.status_code, error["type"]) == (504, "timeout_error")
    assert "0.3 s" in error["message"]
    assert response.headers["x-should-retry"] == "false"
    with_deadline.wait_until_idle()


def test_a_stream_that_takes_too_long_ends_with_an_error_event(
    with_deadline: RunningServer,
) -> None:
    response = with_deadline.post("/v1/completions", LONG | {"stream": True})
    assert response.status_code == 200
    last = response.text.removesuffix("\n\n").rpartition("\n\n")[2]
    assert json.loads(last.removeprefix("data: "))["error"]["type"] == "timeout_error"
    with_deadline.wait_until_idle()


def test_a_request_that_still_waits_is_dropped_in_time(with_deadline: RunningServer) -> None:
    """Two at once on one slot: the second never gets it, and gets its error in time too."""
    with httpx.stream("POST", with_deadline.url + "/v1/completions", json=LONG | {"stream": True}):
        response = with_deadline.post("/v1/completions", LONG)
        assert response.status_code == 504
        assert response.elapsed.total_seconds() < 10
    with_deadline.wait_until_idle()
    assert with_deadline.complete(max_tokens=4).status_code == 200


def test_the_server_speaks_tls(tmp_path: Path) -> None:
    if not shutil.which("openssl"):
        pytest.skip("needs openssl to make a certificate")
    key, certificate = make_certificate(tmp_path)
    flags = ["--ssl-keyfile", str(key), "--ssl-certfile", str(certificate)]
    with running_server(*flags, is_ready=False) as server:
        context = ssl.create_default_context(cafile=str(certificate))
        with httpx.Client(verify=context, base_url=f"https://127.0.0.1:{server.port}") as client:
            wait_until(lambda: is_ready(client))
            answer = client.post("/v1/completions", json=LONG | {"max_tokens": 3})
            assert answer.json()["usage"]["completion_tokens"] == 3


def is_ready(client: httpx.Client) -> bool:
    try:
        return client.get("/ready").status_code == 200
    except httpx.TransportError:
        return False


def make_certificate(directory: Path) -> tuple[Path, Path]:
    key, certificate = directory / "key.pem", directory / "certificate.pem"
    command = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256"]
    command += ["-nodes", "-days", "2", "-subj", "/CN=127.0.0.1", "-keyout", str(key)]
    command += ["-addext", "subjectAltName=IP:127.0.0.1", "-out", str(certificate)]
    subprocess.run(command, check=True, capture_output=True)
    return key, certificate


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--api-key", ""], "--api-key is empty"),
        (["--api-key-file", "/nowhere/keys"], "--api-key-file"),
        (["--root-path", "llm/"], "--root-path"),
        (["--request-timeout", "0"], "--request-timeout"),
        (["--ssl-keyfile", "/nowhere/key"], "--ssl-certfile"),
        (["--ssl-certfile", "/nowhere/certificate"], "there is no file"),
        (["--ssl-certfile", __file__], "cannot be used"),
    ],
)
def test_a_flag_that_cannot_be_is_one_sentence_and_exit_code_2(
    flags: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["serve", *flags]) == 2
    assert words in capsys.readouterr().err


def test_the_schema_asks_for_a_key_only_where_the_server_does(
    server: RunningServer, scripted_server: RunningServer
) -> None:
    """The other server has no key."""
    schema = server.get("/openapi.json", headers=with_key("first")).json()
    assert schema["paths"]["/v1/models"]["get"]["security"] == [{"key": []}]
    assert "security" not in scripted_server.get("/openapi.json").text.lower()
