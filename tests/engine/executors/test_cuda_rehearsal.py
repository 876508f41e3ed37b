"""What only a GPU would show, on one that computes nothing: see `tests.support.cuda_rehearsal`.

`make test-ops` drives it for longer, and without graphs.
"""

import json
import os
import shutil
import subprocess
import sys
from typing import Any

import pytest

pytest.importorskip("triton", reason="Triton is not installed; pip install 'penstock[dev]'")

if not shutil.which("g++"):
    pytest.skip("there is no g++ here, which the rehearsal needs", allow_module_level=True)


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
    # Logprobs and the outputs of prompts are waited for in their own step.
    waiting = ("sampler.logprobs", "prompt_reader.")
    assert [wait for wait in report["waits"] if wait.split(" at ")[1].startswith(waiting)] == list(
        report["waits"]
    )
    assert report["bytes_at_most"] < report["bytes_allowed"]
    assert report["decode"]["uploads"] == report["decode"]["waits"] == []


@pytest.fixture(scope="module")
def report() -> dict[str, Any]:
    return rehearsal("1")


def test_serving_compiles_nothing_and_waits_for_the_device_only_for_requested_outputs(
    report: dict[str, Any],
) -> None:
    check_serving(report)


def test_a_step_of_decodes_alone_is_one_graph_and_sends_nothing(report: dict[str, Any]) -> None:
    decode = report["decode"]
    assert decode["launches"] == []
    assert decode["replays"] == decode["steps"]
    # Seven launches a layer, here one of them, and the output layer is one more of `_skinny`.
    layer = {"_skinny": 5, "_rotate_and_store": 1, "_decode": 1, "_combine": 1}
    assert {name: decode["launches_in_graph"][name] for name in layer} == layer
    assert sum(decode["launches_in_graph"].values()) == 7 + 11
    assert decode["operations_in_graph"] == []


def test_the_rehearsal_fails_on_what_a_gpu_forbids(report: dict[str, Any]) -> None:
    assert [name for name, refusal in report["rules"].items() if not refusal] == []
    assert len(report["rules"]) == 11
