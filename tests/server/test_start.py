"""What a start that takes long shows, in a log and on a terminal, and how signals end it."""

import json
import os
import re
import signal
import subprocess
import sys
import time
import venv
from pathlib import Path

import httpx
import msgspec
import pytest

from penstock.engine.client import CLEAR_LINE
from penstock.server.command_line.cli import main
from tests.support.serving import RunningServer, running_server, wait_until
from tests.support.terminal import Terminal

# A compiler that never ends, has a child as g++ has, and leaves their ids.
_ENDLESS_COMPILER = """#!/bin/sh
sleep 600 &
echo "$$ $!" >> "$(dirname "$0")/pids"
wait
"""
_LONG = {"prompt": "Once", "max_tokens": 50_000, "stream": True}


@pytest.fixture
def endless(tmp_path: Path) -> dict[str, str]:
    """The environment of a server whose compiler never ends."""
    compiler = tmp_path / "compiler"
    compiler.write_text(_ENDLESS_COMPILER)
    compiler.chmod(0o755)
    return {"CXX": str(compiler), "XDG_CACHE_HOME": str(tmp_path / "cache")}


def compiler_pids(endless: dict[str, str]) -> list[int]:
    """Of the compilers that run, at least one, and their children."""
    file = Path(endless["CXX"]).with_name("pids")
    wait_until(lambda: file.exists() and file.read_text().endswith("\n"))
    return [int(pid) for pid in file.read_text().split()]


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def terminal(*flags: str, env: dict[str, str] | None = None) -> Terminal:
    command = [sys.executable, "-m", "penstock", "serve", "--port", "0", *flags]
    return Terminal(command, {**os.environ, "OMP_NUM_THREADS": "1", "TERM": "xterm", **(env or {})})


def test_each_phase_of_the_start_is_announced_before_it_is_timed() -> None:
    server = RunningServer("--num-threads", "1")
    try:
        server.wait_until_ready()
        log = server.log()
    finally:
        server.stop()
    assert re.search(rf"penstock \S+ loads \S+demo_model; .*:{server.port} answers", log)
    for phase in ("import", "compile", "weights", "kv_pool", "bandwidth", "flops", "tokenizer"):
        assert re.search(rf"INFO {phase}: [^\d].*\n(.*\n)*.*INFO {phase}: \d+\.\d\d s\n", log), (
            phase
        )
    assert re.search(r"INFO weights: reading 0\.\d+ GiB of weights, as \w+\n", log)


@pytest.mark.slow
def test_a_compiler_that_takes_long_is_named_counted_and_told_by_health(
    endless: dict[str, str],
) -> None:
    server = RunningServer("--num-threads", "1", env=endless)
    try:
        compiler_pids(endless)
        health = server.get("/health")
        assert health.status_code == 503
        assert re.search(r"still loading \(compile, \d+ s\)", health.json()["error"]["message"])
        refused = server.complete().json()["error"]["message"]
        assert re.search(r"still loading \(compile, \d+ s\); try again soon", refused)
        wait_until(lambda: re.search(r"INFO compile, \d s\n", server.log()))
        assert f"{endless['CXX']} compiles the CPU step for this processor" in server.log()
    finally:
        server.stop()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_while_the_step_is_compiled_ends_the_compiler_too(
    endless: dict[str, str], number: signal.Signals
) -> None:
    server = RunningServer("--num-threads", "1", env=endless)
    try:
        pids = compiler_pids(endless)
        assert all(is_running(pid) for pid in pids)
        server.process.send_signal(number)
        code, errors = server.exit_code()
    finally:
        server.stop()
    assert code == 0
    assert errors.splitlines()[-1].endswith(
        f"{number.name}: no request is open, so the server ends now"
    )
    wait_until(lambda: not any(is_running(pid) for pid in pids))


def test_no_compiler_outlives_a_server_that_is_killed(endless: dict[str, str]) -> None:
    server = RunningServer("--num-threads", "1", env=endless)
    try:
        pids = compiler_pids(endless)
    finally:
        server.stop()
    wait_until(lambda: not any(is_running(pid) for pid in pids))


@pytest.mark.slow
def test_a_terminal_shows_a_line_that_moves_and_is_gone_at_the_end(
    endless: dict[str, str],
) -> None:
    with terminal("--num-threads", "1", env=endless) as shown:
        shown.wait_for(r"compile  2 s")
        drawn = set(re.findall(r"\x1b\[K(\S) compile  \d s", shown.output))
        assert len(drawn) > 3  # the wheel turns
        shown.press(b"\x03")
        assert shown.exit_code() == 0
        last = shown.output.split(CLEAR_LINE)
        assert "SIGINT: no request is open, so the server ends now" in "".join(last[-3:])
        assert not last[-1].strip() or "SIGINT" in last[-1]  # nothing is drawn after it


@pytest.mark.slow
def test_a_terminal_that_is_stopped_does_not_stop_the_server(endless: dict[str, str]) -> None:
    with terminal("--num-threads", "1", env=endless) as shown:
        shown.wait_for(r"compile  \d s")
        [address] = re.findall(r"http://127\.0\.0\.1:\d+", shown.output)
        shown.press(b"\x13")  # Ctrl-S
        for _ in range(10):
            assert httpx.get(f"{address}/health", timeout=20).status_code == 503
            time.sleep(0.05)
        shown.press(b"\x11")  # Ctrl-Q
        shown.press(b"\x03")
        assert shown.exit_code() == 0


@pytest.mark.slow
def test_json_logs_stay_json_on_a_terminal(endless: dict[str, str]) -> None:
    with terminal("--num-threads", "1", "--log-format", "json", env=endless) as shown:
        compiler_pids(endless)
        shown.wait_for(r'"message":"compile, \d s"')
        shown.press(b"\x03")
        assert shown.exit_code() == 0
        lines = [line for line in shown.output.splitlines() if line and line != "^C"]
        messages = [json.loads(line.removeprefix("^C"))["message"] for line in lines]
    assert any(message.startswith("compile: ") for message in messages)


def test_a_drain_says_for_whom_and_how_long_and_counts_those_that_ended() -> None:
    with running_server("--shutdown-timeout", "25") as server:
        body = _LONG | {"max_tokens": 10_000}
        with httpx.stream("POST", server.url + "/v1/completions", json=body, timeout=60) as stream:
            parts = stream.iter_raw()
            next(parts)
            server.process.send_signal(signal.SIGTERM)
            wait_until(
                lambda: (
                    "drain: SIGTERM: 1 request may take up to 25 s to finish, then the server "
                    "ends; a second SIGTERM ends it at once" in server.log()
                )
            )
            for _ in parts:
                pass
        code, errors = server.exit_code()
    assert code == 0 and re.search(r"INFO drain: \d+\.\d\d s$", errors.strip())


def test_a_drain_names_the_requests_that_it_cut_off_and_the_flag() -> None:
    with running_server("--shutdown-timeout", "0.2") as server:
        with httpx.stream("POST", server.url + "/v1/completions", json=_LONG) as stream:
            parts = stream.iter_raw()
            next(parts)
            server.process.send_signal(signal.SIGTERM)
            for _ in parts:
                pass
        code, errors = server.exit_code()
    assert code == 0
    assert "1 request did not finish in 0.2 s" in errors and "--shutdown-timeout" in errors


def test_a_second_signal_says_that_it_ends_the_server_at_once() -> None:
    with (
        running_server() as server,
        httpx.stream("POST", server.url + "/v1/completions", json=_LONG) as stream,
    ):
        parts = stream.iter_raw()
        next(parts)
        server.process.send_signal(signal.SIGTERM)
        wait_until(lambda: "drain: SIGTERM" in server.log())
        server.process.send_signal(signal.SIGTERM)
        code, errors = server.exit_code()
    assert code == 128 + signal.SIGTERM
    assert errors.splitlines()[-1].endswith("a second signal, so the server ends at once")


_INTERRUPTED_IMPORT = """
import os, runpy, signal, sys

class Interrupt:
    def find_spec(self, name, *_):
        if name == "penstock.server.command_line.cli":
            os.kill(os.getpid(), signal.SIGINT)

# Under nohup, and in the background of a shell, it is ignored.
signal.signal(signal.SIGINT, signal.default_int_handler)
sys.meta_path.insert(0, Interrupt())
sys.argv[1:] = ["serve"]
runpy.run_module("penstock", run_name="__main__")
"""


def test_an_interrupt_while_modules_are_imported_is_no_traceback() -> None:
    command = [sys.executable, "-c", _INTERRUPTED_IMPORT]
    ended = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    assert (ended.returncode, ended.stderr) == (-signal.SIGINT, "")


@pytest.mark.parametrize(
    ("command", "function"),
    [
        ("serve", "penstock.server.app.serve"),
        ("models", "penstock.server.command_line.model_list.main"),
    ],
)
def test_an_interrupt_before_a_command_answers_it_is_an_exit_code_and_no_traceback(
    command: str, function: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(_: object) -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr(function, interrupted)
    assert main([command]) == 128 + signal.SIGINT


def test_a_checkout_that_is_not_installed_is_found_by_every_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    venv.create(tmp_path / "venv", symlinks=True)
    monkeypatch.setattr(sys, "executable", str(tmp_path / "venv" / "bin" / "python"))
    # No .pth file is read there, so it has the packages without this one.
    packages = str(Path(msgspec.__file__).parents[1])
    server = RunningServer("--scripted", env={"PYTHONPATH": packages})
    try:
        server.wait_until_ready()
        body = {"structured_outputs": {"regex": "[ab]{4}"}}  # compiled in a process of its own
        text = server.complete(**body).raise_for_status().json()["choices"][0]["text"]
        assert re.fullmatch("[ab]{4}", text)
    finally:
        server.stop()
