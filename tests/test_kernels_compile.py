"""What our models' steps launch compiles for a Hopper GPU, with no spills, in few launches.

No GPU is needed, only Triton's compiler: see `tests.compile_kernels`.
"""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("triton", reason="Triton is not installed; pip install 'penstock[dev]'")

MODELS = Path(__file__).parents[1] / "configs" / "models"
# What one block may have on an H100 or H200, by the CUDA programming guide.
MAX_SHARED_BYTES = 227 * 1024
# Outside the interpreter, which this process may have been started for.
ENVIRONMENT = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}


def _run(*command: str) -> str:
    done = subprocess.run(
        [sys.executable, *command], env=ENVIRONMENT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def compiled() -> list[dict[str, Any]]:
    """Of Qwen3-0.6B's steps: it has every kernel that the others have, and the QK-norm too."""
    out = _run("-m", "tests.compile_kernels", str(MODELS / "Qwen3-0.6B"))
    return [json.loads(line) for line in out.splitlines()]


def test_every_kernel_compiles_for_hopper_and_fits_it(compiled: list[dict[str, Any]]) -> None:
    names = {entry["kernel"] for entry in compiled}
    assert {"_decode", "_prefill", "_combine", "_skinny", "_add_rms_norm", "_silu_mul"} <= names
    assert [entry for entry in compiled if entry["shared_bytes"] > MAX_SHARED_BYTES] == []


def test_no_kernel_spills_registers(compiled: list[dict[str, Any]]) -> None:
    # Two or four words that are kept across a loop cost nothing; what is spilled in one does.
    assert [entry for entry in compiled if entry["stack_bytes"] > 16] == []


def test_a_decode_layer_is_seven_launches_for_a_handful_of_sequences() -> None:
    code = (
        "import sys; from pathlib import Path; from tests.compile_kernels import *;"
        "print(launches_in_a_decode_layer(MetaModel(Path(sys.argv[1])), 8).total())"
    )
    assert int(_run("-c", code, str(MODELS / "Llama-3.1-8B"))) == 7
