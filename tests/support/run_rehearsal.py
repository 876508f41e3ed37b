"""Runs rehearsals of the GPU in a process of their own, and checks what they report."""

import json
import os
import subprocess
import sys
from typing import Any


def rehearsal(*arguments: str) -> dict[str, Any]:
    """The report of `tests.support.cuda_rehearsal`."""
    return _reported("tests.support.cuda_rehearsal", *arguments)[-1]


def rungs(*names: str) -> list[dict[str, Any]]:
    """The rows of `tests.support.rung_rehearsal`."""
    return _reported("tests.support.rung_rehearsal", *names)


def ways() -> list[dict[str, Any]]:
    """What `tests.support.way_rehearsal` prints."""
    return _reported("tests.support.way_rehearsal")


def _reported(module: str, *arguments: str) -> list[dict[str, Any]]:
    """The lines of JSON that it prints, where Triton compiles as for a GPU."""
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-m", module, *arguments],
        env=environment | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]


def check_serving(report: dict[str, Any]) -> None:
    """What holds for every rehearsal."""
    # Each would be a stall of a second, in the middle of other people's answers.
    assert report["compiled_while_serving"] == []
    assert report["graphs_while_serving"] == 0
    # Only outputs of prompts are waited for, each in its own step.
    allowed = ("prompt_reader.",)
    assert [wait for wait in report["waits"] if wait.split(" at ")[1].startswith(allowed)] == list(
        report["waits"]
    )
    assert report["bytes_at_most"] < report["bytes_allowed"]
    assert report["decode"]["uploads"] == report["decode"]["waits"] == []
