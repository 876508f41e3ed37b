"""A certificate that is renewed while the server runs."""

import shutil
import socket
import ssl
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from tests.server.http.test_access import LONG, is_ready, make_certificate
from tests.support.serving import RunningServer, running_server, wait_until


@pytest.fixture
def files(tmp_path: Path) -> tuple[Path, Path]:
    """The key and the certificate."""
    if not shutil.which("openssl"):
        pytest.skip("needs openssl to make a certificate")
    return make_certificate(tmp_path)


@pytest.fixture
def server(files: tuple[Path, Path]) -> Iterator[RunningServer]:
    key, certificate = map(str, files)
    with running_server(
        "--ssl-keyfile", key, "--ssl-certfile", certificate, is_ready=False
    ) as running:
        with httpx.Client(verify=False, base_url=f"https://127.0.0.1:{running.port}") as client:
            wait_until(lambda: is_ready(client))
        yield running


def test_new_connections_get_it_and_open_streams_go_on(
    server: RunningServer, files: tuple[Path, Path], tmp_path: Path
) -> None:
    before, url = shown(server), f"https://127.0.0.1:{server.port}/v1/completions"
    body = LONG | {"stream": True, "max_tokens": 20_000}
    with (
        httpx.Client(verify=False, timeout=60) as client,
        client.stream("POST", url, json=body) as response,
    ):
        lines = response.iter_lines()
        next(lines)
        renewed = renew(files, tmp_path)
        assert shown(server) == renewed != before
        *_, last = (line for line in lines if line)
    assert last == "data: [DONE]"


@pytest.mark.parametrize("part", [0, 100])
def test_half_a_file_leaves_the_one_before_in_use(
    server: RunningServer, files: tuple[Path, Path], part: int
) -> None:
    certificate = files[1]
    before, whole = shown(server), certificate.read_bytes()
    certificate.write_bytes(whole[:part])
    assert [shown(server), shown(server)] == [before, before]
    certificate.write_bytes(whole)
    assert shown(server) == before
    wait_until(lambda: "it is in use" in server.log())
    assert server.log().count("cannot be used") == 1


def test_a_certificate_waits_for_its_key(
    server: RunningServer, files: tuple[Path, Path], tmp_path: Path
) -> None:
    before, (key, certificate) = shown(server), files
    new_key, new_certificate = make_certificate(directory(tmp_path))
    new_certificate.replace(certificate)
    assert shown(server) == before
    key.unlink()
    assert shown(server) == before
    new_key.replace(key)
    assert shown(server) == certificate.read_text()


def renew(files: tuple[Path, Path], tmp_path: Path) -> str:
    """As a mounted Secret is: other files have the names. Returns the new certificate."""
    for new, old in zip(make_certificate(directory(tmp_path)), files, strict=True):
        new.replace(old)
    return files[1].read_text()


def directory(tmp_path: Path) -> Path:
    made = tmp_path / "renewed"
    made.mkdir()
    return made


def shown(server: RunningServer) -> str:
    """The certificate that a new connection gets, which names no host."""
    context = ssl.create_default_context()
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    with (
        socket.create_connection(("127.0.0.1", server.port), timeout=30) as plain,
        context.wrap_socket(plain) as secure,
    ):
        der = secure.getpeercert(binary_form=True)
    assert der
    return ssl.DER_cert_to_PEM_cert(der)
