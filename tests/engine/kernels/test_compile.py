"""What our models' steps launch compiles for a Hopper GPU, with no spills, in few launches.

No GPU is needed, only Triton's compiler: see `tests.support.compile_kernels`.
"""

import json
import os
import subprocess
import sys
from typing import Any

import pytest

from tests.support.paths import MODEL_CONFIGS

pytest.importorskip("triton", reason="Triton is not installed; pip install 'penstock[dev]'")

from tests.support.address_width import narrow_offsets
from tests.support.compile_kernels import before_wait
from tests.support.kernel_table import faults, line

# The limit per thread block on an H100 or H200, from the CUDA programming guide.
MAX_SHARED_BYTES = 227 * 1024
# Without the interpreter, which this process may use.
ENVIRONMENT = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}


def _run(*command: str) -> str:
    done = subprocess.run(
        [sys.executable, *command], env=ENVIRONMENT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture(
    scope="module",
    params=[pytest.param(name, marks=pytest.mark.slow) for name in ("plain", "codes")],
)
def compiled(request: pytest.FixtureRequest) -> list[dict[str, Any]]:
    """The kernels of Qwen3-0.6B's steps: those of the other models, and QK-norm."""
    flags = ["--codes"] if request.param == "codes" else []
    model = str(MODEL_CONFIGS / "Qwen3-0.6B")
    out = _run("-m", "tests.support.compile_kernels", model, *flags)
    return [json.loads(line) for line in out.splitlines()]


def test_every_kernel_compiles_for_hopper_and_fits_it(compiled: list[dict[str, Any]]) -> None:
    names = {entry["kernel"] for entry in compiled}
    assert {"_decode", "_prefill", "_skinny", "_add_rms_norm", "_silu_mul"} <= names
    assert [entry for entry in compiled if entry["shared_bytes"] > MAX_SHARED_BYTES] == []


def test_no_kernel_spills_registers(compiled: list[dict[str, Any]]) -> None:
    # Two or four words spilled across a loop cost nothing.
    assert [entry for entry in compiled if entry["stack_bytes"] > 16] == []


def test_kernels_that_start_early_touch_no_memory_before_they_wait(
    compiled: list[dict[str, Any]],
) -> None:
    early = [entry for entry in compiled if entry["is_overlapped"]]
    assert [entry for entry in early if entry["before_wait"] != []] == []
    # These come first in a step or between two, after copies: there is no kernel to overlap with.
    alone = {entry["kernel"] for entry in compiled} - {entry["kernel"] for entry in early}
    first = {"_gather_decodes", "_gather_chunks", "_gather_drafted"}
    between = {"_scatter", "_copy_blocks"}
    # And these on streams of their own.
    moving = {"_gather_blocks", "_add_checksums", "_scatter_blocks"}
    assert alone == first | between | moving | {"_update_table"}


def test_no_address_is_computed_in_fewer_bits_than_the_largest_pool_needs(
    compiled: list[dict[str, Any]],
) -> None:
    narrow = {entry["kernel"]: entry["narrow_offsets"] for entry in compiled}
    assert {name: lines for name, lines in narrow.items() if lines} == {}


def test_no_kernel_is_over_a_limit_of_the_table(compiled: list[dict[str, Any]]) -> None:
    assert {entry["kernel"]: faults(entry) for entry in compiled if faults(entry)} == {}
    decodes = (entry for entry in compiled if entry["kernel"] == "_decode")
    decode = next(entry for entry in decodes if not entry["constants"]["ROTATES"])
    words = line(decode).split()
    assert words[0] == "_decode" and len(words) == 9 + ("fp8" in words)


@pytest.mark.parametrize(
    ("kernel", "change", "fault"),
    [
        ("_decode", {"shared_bytes": 240_000}, "240000 bytes of shared memory"),
        ("_decode", {"shared_bytes": 100_000}, "2 programs fit a multiprocessor"),
        ("_decode", {"registers": 255}, "2 programs fit a multiprocessor"),
        ("_embed", {"spills": 9}, "9 times a spilled register is moved"),
        ("_embed", {"wait": ["ACQBULK", "PREEXIT"]}, "in this order"),
        ("_embed", {"before_wait": ["LDG.E R9"]}, "before it waits: ['LDG.E R9']"),
        ("_skinny", {"instructions": {"HMMA": 16}}, "no copies run ahead"),
        ("_prefill", {"instructions": {"LDGSTS": 8, "HMMA": 16}}, "no HGMMA"),
    ],
)
def test_what_is_over_a_limit_is_named(
    compiled: list[dict[str, Any]], kernel: str, change: dict[str, Any], fault: str
) -> None:
    entry = next(entry for entry in compiled if entry["kernel"] == kernel)
    assert any(fault in found for found in faults(entry | change))
    assert fault in line(entry | change)


OFFSETS = """
tt.func public @kernel(%table: !tt.ptr<i32> loc("table"(#loc)), %keys: !tt.ptr<bf16>) {
    %c8192 = arith.constant 8192 : i32 loc(#loc1)
    %row = tt.get_program_id x : i32 loc(#loc2)
    %there = tt.addptr %table, %row : !tt.ptr<i32>, i32 loc(#loc3)
    %block = tt.load %there : !tt.ptr<i32> loc(#loc4)
    %wide = arith.extsi %block : i32 to i64 loc(#loc5)
    %offset = arith.muli %wide, %c8192 : i64 loc(#loc6)
    %key = tt.addptr %keys, %offset : !tt.ptr<bf16>, i64 loc(#loc7)
"""


def test_an_offset_in_32_bits_is_found() -> None:
    assert narrow_offsets(OFFSETS) == []
    narrow = OFFSETS.replace("%wide, %c8192 : i64", "%block, %c8192 : i32")
    assert narrow_offsets(narrow) == ["%offset = arith.muli %block, %c8192 : i32"]
    # Widened too late.
    late = narrow.replace("%keys, %offset", "%keys, %late").replace(
        "    %key", "    %late = arith.extsi %offset : i32 to i64\n    %key"
    )
    assert narrow_offsets(late) == ["%offset = arith.muli %block, %c8192 : i32"]
    # An unknown operation is not ignored.
    assert narrow_offsets(narrow.replace("arith.muli", "arith.unheard_of")) != []


MACHINE_CODE = """
.text._kernel:
.L_x_0:
        /*0000*/                   LDC R1, c[0x0][0x28] ;
        /*0010*/              @UP0 UBLKPF.L2 [UR8], UR4 ;
        /*0018*/                   STL [R1], R5 ;
        /*0020*/              @P1 BRA.U.ANY `(.L_x_0) ;
        /*0030*/                   ACQBULK ;
        /*0040*/                   LDG.E R9, desc[UR12][R4.64] ;
.L_x_1:
        /*0050*/                   EXIT ;
"""


@pytest.mark.parametrize(
    "instruction",
    [
        "LDG.E R9, desc[UR12][R4.64]",
        "@!P0 STG.E desc[UR12][R2.64], R9",
        "@P0 EXIT",
        "@P0 BRA `(.L_x_1)",
        "LDGSTS.E.BYPASS.128 [R43], desc[UR12][R2.64], P4",
    ],
)
def test_an_instruction_before_the_wait_is_found(instruction: str) -> None:
    wait = "        /*0030*/                   ACQBULK ;"
    assert before_wait(MACHINE_CODE) == []
    spoilt = MACHINE_CODE.replace(wait, f"        /*0028*/   {instruction} ;\n{wait}")
    assert before_wait(spoilt) == [instruction]
    assert before_wait(MACHINE_CODE.replace("ACQBULK", "@P0 ACQBULK")) is None


def test_a_decode_layer_is_five_launches_for_few_sequences() -> None:
    code = (
        "import sys; from pathlib import Path; from tests.support.compile_kernels import *;"
        "print(launches_in_a_decode_layer(MetaModel(Path(sys.argv[1])), 8).total())"
    )
    assert int(_run("-c", code, str(MODEL_CONFIGS / "Llama-3.1-8B"))) == 5
