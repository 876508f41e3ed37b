"""`python -m tests.bench.in_turns` as it is used, with real small servers as peers."""

import json
import os
import shlex
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from tests.bench.in_turns.command import main
from tests.support.paths import ROOT
from tests.support.serving import wait_until

pytestmark = pytest.mark.slow

CASES = "8x8@2:n=4,24x4@1:shared=16:n=2,6x3@2:turns=3:n=2"


def scripted(name: str, *flags: str) -> list[str]:
    """A server of scripted tokens as the flag --server."""
    command = [sys.executable, "-m", "penstock", "serve", "--scripted", "--port", "{port}", *flags]
    return ["--server", f"{name}={shlex.join(command)}"]


def start(*flags: str) -> "subprocess.Popen[str]":
    return subprocess.Popen(
        [sys.executable, "-m", "tests.bench.in_turns", *flags],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


class Compared(NamedTuple):
    status: int
    text: str
    said: str
    document: dict[str, Any]

    def cases(self, server: str) -> list[str]:
        """Those in which it was measured."""
        return [each["case"] for each in self.document["measurements"] if each["server"] == server]

    def ratio(self, peer: str, key: str, case: int = 0) -> dict[str, float]:
        found: dict[str, float] = self.document["cases"][case]["penstock_over"][peer][key]
        return found


@pytest.fixture(scope="module")
def compared(tmp_path_factory: pytest.TempPathFactory) -> Compared:
    """Penstock, one that is slow, one with too short a context, and one that never starts."""
    file = tmp_path_factory.mktemp("peers") / "out" / "result.json"
    ends = shlex.join([sys.executable, "-c", "import sys; sys.exit('no such model')", "{port}"])
    process = start(
        *scripted("slow", "--scripted-step-ms", "150"),
        *scripted("penstock", "--scripted-step-ms", "4"),
        *scripted("small", "--max-model-len", "20"),
        *("--server", f"absent={ends}", "--cases", CASES, "--rounds", "2", "--threads", "1"),
        *("--extra-body", 'slow={"max_tokens": 2}', "--busy", "--result-filename", str(file)),
    )
    text, said = process.communicate(timeout=280)
    return Compared(process.returncode, text, said, json.loads(file.read_text()))


def test_each_server_is_measured_in_turns_and_the_order_alternates(compared: Compared) -> None:
    turns = [
        (each["round"], each["server"], each["case"])
        for each in compared.document["measurements"]
        if each["server"] != "small"
    ]
    order = ((1, "penstock"), (1, "slow"), (2, "slow"), (2, "penstock"))
    assert turns == [(*turn, case) for turn in order for case in CASES.split(",")]


def test_the_slower_server_is_the_slower_one_in_every_number(compared: Compared) -> None:
    for case in (0, 1):
        assert compared.ratio("slow", "median_ttft_ms", case)["high"] < 1
        assert compared.ratio("slow", "median_tpot_ms", case)["high"] < 1
        assert compared.ratio("slow", "output_throughput", case)["low"] > 1
        assert compared.ratio("slow", "output_throughput", case)["num"] == 2


def test_a_conversation_grows_by_what_was_said(compared: Compared) -> None:
    found = [each for each in compared.document["measurements"] if each["case"].endswith("n=2")]
    (first, *_) = [each for each in found if ":turns" in each["case"]]
    assert first["summary"]["completed"] == 2 * 3
    lengths = [turn["input_tokens"] for turn in first["summary"]["turns"]]
    assert lengths[0] == 6 and lengths[1] > 12 and lengths[2] > lengths[1] + 6
    assert "conversations of 3 turns, each 6 new tokens" in compared.text


def test_a_server_that_fails_is_told_and_loses_its_own_turns_alone(compared: Compared) -> None:
    assert compared.status == 1
    assert compared.document["failures"].keys() == {"small", "absent"}
    assert compared.cases("absent") == [] and compared.cases("small") == ["8x8@2:n=4"]
    assert "no such model" in compared.document["failures"]["absent"]
    assert "requests of 24x4@1:shared=16:n=2 failed: HTTP 400" in compared.said
    assert "small failed in round 1" in compared.text


def test_an_extra_body_is_of_one_server_and_shorter_outputs_are_told(compared: Compared) -> None:
    totals = {
        (each["server"], each["case"]): each["summary"]["total_output_tokens"]
        for each in compared.document["measurements"]
    }
    assert totals["penstock", "8x8@2:n=4"] == 32 and totals["slow", "8x8@2:n=4"] == 8
    assert "slow, 8x8@2:n=4: it generated 8 of 32 tokens" in compared.said
    assert "penstock, 8x8@2:n=4: it generated" not in compared.said


def test_the_text_has_the_machine_the_ratios_and_the_cpu_of_others(compared: Compared) -> None:
    assert f"{compared.document['processor']}, cores: " in compared.text
    assert "a busy process on each core beside; threads of each server: 1" in compared.text
    assert compared.text.count("\npenstock/slow ") == 3
    assert "Other processes meanwhile: " in compared.text
    assert sum(each["cpu"]["server"] for each in compared.document["measurements"]) > 0


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_when_it_is_ended_the_server_that_runs_is_stopped(
    number: signal.Signals, tmp_path: Path
) -> None:
    """In the background of a shell, where a program starts with SIGINT ignored."""
    file = tmp_path / "pid"
    script = f"echo $$ > {file}.new; mv {file}.new {file}; exec sleep 600"
    waits = shlex.join(["sh", "-c", script, "{port}"])
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        process = start("--server", f"penstock={waits}", "--server", f"other={waits}", "--json")
    finally:
        signal.signal(signal.SIGINT, before)
    wait_until(file.exists)
    process.send_signal(number)
    text, _ = process.communicate(timeout=60)
    assert process.returncode == 130
    assert json.loads(text)["is_interrupted"] is True
    with pytest.raises(ProcessLookupError):
        os.kill(int(file.read_text()), 0)


# Another program's server: no GET /v1/models, no usage, two words an event, and a field refused.
_SCRIPT = """
import json, sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

class Handler(BaseHTTPRequestHandler):
    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.send_response(422 if "stream_options" in body else 200)
        self.end_headers()
        for _ in range(body["max_tokens"]):
            self.wfile.write(b'data: {"choices": [{"text": "Who are you?"}]}\\n\\n')
        self.wfile.write(b"data: [DONE]\\n\\n")

ThreadingHTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
"""


def test_a_small_script_is_compared_and_its_tokens_are_counted() -> None:
    command = shlex.join([sys.executable, "-c", _SCRIPT, "{port}"])
    flags = ["--cases", "4x3@1:n=2", "--rounds", "1", "--json"]
    for name in ("penstock", "script"):
        flags += [
            "--server",
            f"{name}={command}",
            "--extra-body",
            f'{name}={{"stream_options":null}}',
        ]
    process = start(*flags, "--tokenizer", str(ROOT / "engine" / "hub" / "demo_model"))
    text, said = process.communicate(timeout=120)
    assert process.returncode == 0, said
    first, second = json.loads(text)["measurements"]
    assert first["summary"]["completed"] == second["summary"]["completed"] == 2
    assert first["summary"]["uncounted"] == 0
    assert first["summary"]["total_output_tokens"] > 2 * 3


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        ([], "there is nothing to compare with; give --server"),
        (["--server", "a=run {port}", "--server", "a=go {port}"], "two servers are named a"),
        (["--server", "a=run {model} {port}"], "the command of a has {model}; give --model"),
        (["--server", "a=run {port}", "--extra-body", "b={}"], "choose from penstock, a"),
        (["--server", "a=run {port}", "--extra-body", "a=1"], "write NAME=JSON"),
        (["--server", "a=run {port}", "--rounds", "0"], "--rounds is 0"),
        (["--server", "a=run {port}", "--cases", "8"], "--cases '8' is not valid"),
        (["--server", "a=run {port}", "--result-filename", "."], "is a directory"),
        (["--sever", "a=run {port}"], "did you mean --server?"),
    ],
)
def test_a_wrong_command_line_is_one_sentence(
    flags: list[str], sentence: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*flags]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert sentence in line


def test_help_says_that_one_server_runs_at_a_time(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--help"]) == 0
    assert "One server runs at a time" in capsys.readouterr().out
