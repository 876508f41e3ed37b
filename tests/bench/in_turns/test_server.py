"""A server of a comparison: its command line, its start, and its end."""

import shlex
import sys
from pathlib import Path

import pytest

from penstock.loadtest.bench.replay import run
from penstock.scheduler.errors import InvalidConfig
from tests.bench.in_turns.server import ServerFailed, parse_server, started
from tests.support.serving import wait_until

# Starts a process that ignores SIGTERM, writes its id and its own, and stays.
_PARENT = """
import os, subprocess, sys, time
ignores = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(600)"
child = subprocess.Popen([sys.executable, "-c", ignores])
open(sys.argv[1], "w").write(f"{os.getpid()} {child.pid}\\n")
time.sleep(600)
"""


def python(code: str, *arguments: str) -> str:
    return shlex.join([sys.executable, "-c", code, *arguments, "{port}"])


def test_words_in_braces_are_replaced_and_other_braces_stay() -> None:
    spec = parse_server("""v=serve {model} --port={port} -t {threads} --config '{"a": {}}'""")
    assert spec.argv(port=81, model="/my model", threads=2) == [
        *("serve", "/my model", "--port=81", "-t", "2", "--config", '{"a": {}}'),
    ]


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("llama-server", "write NAME=COMMAND"),
        ("my server=run {port}", "write NAME=COMMAND"),
        ("a=run --port 81", "its command needs {port}"),
        ("a=run 'x {port}", "No closing quotation in its command"),
    ],
)
def test_a_wrong_server_is_one_sentence(text: str, sentence: str) -> None:
    with pytest.raises(InvalidConfig) as raised:
        parse_server(text)
    assert sentence in str(raised.value)


def test_what_a_server_has_started_is_stopped_with_it(tmp_path: Path) -> None:
    file = tmp_path / "pids"
    with started(parse_server(f"a={python(_PARENT, str(file))}"), model="", threads=1):
        wait_until(lambda: file.exists() and file.read_text().endswith("\n"))
    pids = file.read_text().split()
    wait_until(lambda: not any(map(_is_running, pids)))


def _is_running(pid: str) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False
    return state != "Z"  # its parent is gone, so it may never be reaped


def test_a_server_that_ends_before_it_is_ready_is_told_at_once_with_its_log() -> None:
    code = "import sys; sys.exit('there is no such model')"
    spec = parse_server(f"a={python(code)}")
    with started(spec, model="", threads=1) as server, pytest.raises(ServerFailed) as raised:
        run(server.models(600))
    assert "ended before it was ready" in str(raised.value)
    assert "there is no such model" in str(raised.value)


def test_threads_are_those_of_openmp_too() -> None:
    code = "import os, sys; sys.exit('threads: ' + os.environ['OMP_NUM_THREADS'])"
    spec = parse_server(f"a={python(code)}")
    with started(spec, model="", threads=3) as server, pytest.raises(ServerFailed) as raised:
        run(server.models(600))
    assert "threads: 3" in str(raised.value)


def test_a_program_that_does_not_exist_is_told() -> None:
    spec = parse_server("a=/nowhere/llama-server --port {port}")
    with (
        pytest.raises(ServerFailed, match="/nowhere/llama-server cannot be started: No such file"),
        started(spec, model="", threads=1),
    ):
        pass
