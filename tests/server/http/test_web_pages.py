"""What a page of another site can do through a browser: nothing that the flags do not allow."""

import contextlib
import json
import socket
from collections.abc import Iterator

import httpx
import pytest
from starlette.datastructures import Headers

from penstock.server.config import ServerConfig
from penstock.server.errors import UnknownHost
from penstock.server.http.access import WebPages, host_name
from tests.support.serving import MODEL, RunningServer, running_server

FRIEND, STRANGER = "https://friend.example", "https://stranger.example"
COMPLETIONS = "/v1/completions"
BODY = json.dumps({"model": MODEL, "prompt": "Once", "max_tokens": 3}).encode()


@pytest.fixture(scope="module")
def server() -> Iterator[RunningServer]:
    flags = ["--allowed-origins", json.dumps([FRIEND]), "--allowed-hosts", "llm.example"]
    with running_server(*flags) as running:
        yield running


def post(server: RunningServer, **headers: str) -> httpx.Response:
    given = {name.replace("_", "-"): value for name, value in headers.items()}
    return server.request("POST", COMPLETIONS, content=BODY, headers=given, timeout=30)


@pytest.mark.parametrize(
    "host", ["localhost", "localhost:1", "LocalHost.", "127.0.0.1:80", "[::1]:8000", "llm.example"]
)
def test_the_names_of_this_machine_and_of_the_flag_are_served(
    server: RunningServer, host: str
) -> None:
    assert server.get("/v1/models", headers={"Host": host}).status_code == 200


@pytest.mark.parametrize("path", ["/v1/models", "/metrics", "/", "/v1/responses/resp_1", "/health"])
@pytest.mark.parametrize("host", ["evil.example", "evil.example:8000", "localhost.evil.example"])
def test_another_name_is_a_421_that_names_the_flag(
    server: RunningServer, host: str, path: str
) -> None:
    """So a page whose name is made to resolve to this machine (DNS rebinding) reads nothing."""
    answer = server.get(path, headers={"Host": host})
    assert answer.status_code == 421
    error = answer.json()["error"]
    assert error["code"] == "unknown_host" and "--allowed-hosts" in error["message"]
    assert host in error["message"]


def test_a_request_without_a_host_comes_from_no_browser_and_is_served(
    server: RunningServer,
) -> None:
    with socket.create_connection(("127.0.0.1", server.port), timeout=10) as connection:
        connection.sendall(b"GET /health HTTP/1.0\r\n\r\n")
        assert connection.recv(1 << 12).startswith(b"HTTP/1.1 200 ")


@pytest.mark.parametrize(
    ("host", "names", "is_served"),
    [
        ("127.0.0.1", (), False),
        ("::1", (), False),
        ("localhost", (), False),
        ("127.0.0.1", ("*",), True),
        ("0.0.0.0", (), True),
        ("192.0.2.1", (), True),
        ("0.0.0.0", ("llm.example",), False),
    ],
)
def test_any_name_is_served_where_other_machines_connect_unless_the_flag_names_some(
    host: str, names: tuple[str, ...], is_served: bool
) -> None:
    config = ServerConfig(served_model_names=("m",), host=host, allowed_hosts=names)
    refused = contextlib.nullcontext() if is_served else pytest.raises(UnknownHost)
    with refused:
        WebPages(config).check("GET", Headers({"host": "any.example:8000"}))


@pytest.mark.parametrize(
    ("host", "name"),
    [
        ("a.Example:80", "a.example"),
        ("[::1]:80", "::1"),
        ("[0:0:0:0:0:0:0:1]", "::1"),
        ("::1", "::1"),
        ("[::1", "::1"),
        ("127.0.0.1:80", "127.0.0.1"),
        ("a.example.", "a.example"),
        (":80", ""),
    ],
)
def test_a_name_has_one_spelling(host: str, name: str) -> None:
    assert host_name(host) == name


@pytest.mark.parametrize("origin", [STRANGER, "null", "http://localhost:1", "http://127.0.0.1"])
def test_what_a_page_of_another_origin_sends_is_a_403_that_names_the_flag(
    server: RunningServer, origin: str
) -> None:
    """Also without a content-type, as of a Blob: no browser asks before it sends that."""
    answer = post(server, Origin=origin)
    assert answer.status_code == 403
    error = answer.json()["error"]
    assert error["code"] == "cross_site_request" and "--allowed-origins" in error["message"]


def test_what_the_browser_calls_cross_site_is_refused_without_an_origin_too(
    server: RunningServer,
) -> None:
    assert post(server, Sec_Fetch_Site="cross-site").status_code == 403
    assert post(server, Sec_Fetch_Site="same-site").status_code == 403


def test_the_servers_own_page_allowed_pages_and_programs_are_served(server: RunningServer) -> None:
    own = f"http://127.0.0.1:{server.port}"
    for headers in (
        {},
        {"Origin": own},
        {"Origin": own, "Sec_Fetch_Site": "same-origin"},
        {"Origin": FRIEND, "Sec_Fetch_Site": "cross-site"},
        # Behind a proxy that sends its own name as Host, the browser knows better.
        {"Origin": "https://llm.example", "Sec_Fetch_Site": "same-origin"},
        {"Sec_Fetch_Site": "none"},
    ):
        assert post(server, **headers).status_code == 200, headers


def test_reading_needs_no_origin_as_browsers_show_the_answer_to_nobody_else(
    server: RunningServer,
) -> None:
    answer = server.get("/v1/models", headers={"Origin": STRANGER})
    assert answer.status_code == 200
    assert "access-control-allow-origin" not in answer.headers


def test_pages_of_any_origin_are_served_if_the_flag_says_so() -> None:
    with running_server("--allowed-origins", '["*"]') as server:
        assert post(server, Origin=STRANGER).status_code == 200
