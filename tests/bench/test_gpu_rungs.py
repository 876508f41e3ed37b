"""The rungs of the GPU ladder, in full size, obey CUDA's rules: `tests.support.rung_rehearsal`.

`make test-ladder` tries all of them.
"""

import shutil

import pytest

from tests.support.run_rehearsal import rungs

pytest.importorskip("triton", reason="Triton is not installed; pip install 'penstock[dev]'")

if not shutil.which("g++"):
    pytest.skip("there is no g++ here, which the rehearsal needs", allow_module_level=True)


@pytest.mark.slow
def test_rungs_capture_and_decode_as_a_gpu_allows() -> None:
    kernels = ["kernel-kv-write", "kernel-codes", "kernel-experts"]
    names = ["kernel", "graph-memset-pdl", "chunk-graphs-pdl", "start", *kernels]
    rows = rungs(*names)
    assert [row["rung"] for row in rows if row["is_right"]] == names
    assert rows[2]["steady_steps"] > 0 and rows[2]["num_ids"] == 17 * 24
    assert rows[3]["launched"] == {"PDL": True, "launch_pdl": True}
