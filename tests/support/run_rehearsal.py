"""Runs `tests.support.cuda_rehearsal` in a process of its own, and checks its report."""

import json
import os
import subprocess
import sys
from typing import Any


def rehearsal(*arguments: str) -> dict[str, Any]:
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-m", "tests.support.cuda_rehearsal", *arguments],
        env=environment | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    report: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return report


def check_serving(report: dict[str, Any]) -> None:
    """What holds for every rehearsal."""
    # Each would be a stall of a second, in the middle of other people's answers.
    assert report["compiled_while_serving"] == []
    assert report["graphs_while_serving"] == 0
    # Only logprobs and outputs of prompts are waited for, each in its own step.
    allowed = ("sampler.logprobs", "prompt_reader.")
    assert [wait for wait in report["waits"] if wait.split(" at ")[1].startswith(allowed)] == list(
        report["waits"]
    )
    assert report["bytes_at_most"] < report["bytes_allowed"]
    assert report["decode"]["uploads"] == report["decode"]["waits"] == []
