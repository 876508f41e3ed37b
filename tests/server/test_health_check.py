"""`penstock health`, which the images' HEALTHCHECK runs: with TLS, another port and --root-path."""

import os
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import httpx
import pytest

from penstock.server.command_line.health_check import flags_of_container
from tests.server.http.test_access import make_certificate
from tests.support.paths import ROOT
from tests.support.serving import RunningServer, free_port, running_server, wait_until


def health(*flags: str, **variables: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "penstock", "health", *flags],
        cwd=ROOT,
        env={**os.environ, **variables},
        capture_output=True,
        text=True,
        timeout=60,
    )


def test_it_finds_the_server_by_flags_by_variables_and_under_a_root_path() -> None:
    with running_server("--root-path", "/llm", "--api-key", "secret") as server:
        done = health("--port", str(server.port), "--root-path", "/llm")
        assert (done.returncode, done.stdout) == (0, '{"status":"ok"}\n')
        # Variables of a proxy must not matter.
        assert health(PENSTOCK_PORT=str(server.port), http_proxy="http://x.invalid").returncode == 0


def test_it_asks_a_server_with_tls_whatever_name_its_certificate_has(tmp_path: Path) -> None:
    if not shutil.which("openssl"):
        pytest.skip("needs openssl to make a certificate")
    key, certificate = make_certificate(tmp_path)
    port = free_port()
    flags = ("--port", str(port), "--ssl-keyfile", str(key), "--ssl-certfile", str(certificate))
    server = RunningServer("--scripted", *flags, port=port)
    try:
        wait_until(lambda: health(*flags).returncode == 0)
        assert health("--port", str(port)).returncode == 1  # without TLS
        with pytest.raises(httpx.TransportError):
            server.get("/health")
    finally:
        server.stop()


def test_a_server_that_loads_or_is_not_there_is_unhealthy() -> None:
    port = free_port()
    done = health("--port", str(port))
    assert done.returncode == 1 and f"127.0.0.1:{port}" in done.stderr
    server = RunningServer("--num-threads", "1")
    try:
        assert server.wait_until_answering().status_code == 503
        done = health("--port", str(server.port))
        assert done.returncode == 1 and "loading" in done.stdout
    finally:
        server.stop()


@pytest.mark.slow
def test_a_server_that_accepts_and_never_answers_is_unhealthy_in_time() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        assert health("--port", str(listener.getsockname()[1])).returncode == 1


@pytest.mark.parametrize("start", ["tini\0--\0penstock", "/usr/bin/python3\0/opt/bin/penstock"])
def test_the_flags_of_a_container_are_those_after_serve(start: str, tmp_path: Path) -> None:
    file = tmp_path / "cmdline"
    file.write_text(f"{start}\0serve\0--host\x000.0.0.0\0demo\0--port\x009000\0", encoding="utf-8")
    assert flags_of_container(file) == ["--host", "0.0.0.0", "demo", "--port", "9000"]


@pytest.mark.parametrize("text", ["/sbin/init\0", "", "penstock\0bench\0--port\x001\0"])
def test_another_first_process_has_no_flags_for_us(text: str, tmp_path: Path) -> None:
    file = tmp_path / "cmdline"
    file.write_text(text, encoding="utf-8")
    assert flags_of_container(file) == []
    assert flags_of_container(tmp_path / "none") == []
