"""The rungs of the GPU ladder, in full size, obey CUDA's rules: `tests.support.rung_rehearsal`.

`make test-ladder` tries all of them.
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


def rehearsed(*names: str) -> list[dict[str, Any]]:
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-m", "tests.support.rung_rehearsal", *names],
        env=environment | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]


def test_rungs_capture_and_decode_as_a_gpu_allows() -> None:
    names = ["kernel", "graph-memset-pdl", "chunk-graphs-pdl", "start"]
    rows = rehearsed(*names)
    assert [row["rung"] for row in rows if row["is_right"]] == names
    assert rows[2]["steady_steps"] > 0 and rows[2]["num_ids"] == 17 * 24
    assert rows[3]["launched"] == {"PDL": True, "launch_pdl": True}
