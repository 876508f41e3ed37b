"""`tests.support.convergence` finds what jump threading can do to a kernel, and stores that a copy
could overtake, in code made by hand."""

import json
import os
import subprocess
import sys

import pytest

from tests.support.convergence import parted, unordered_copies
from tests.support.paths import MODEL_CONFIGS

pytest.importorskip("triton", reason="Triton is not installed; pip install 'penstock[dev]'")

# As of a kernel that stores with one thread, returns early and sums up, compiled as it should be.
PTX = """
.visible .entry kernel(.param .u64 kernel_param_0)
.reqntid 128
{
	.reg .pred 	%p<5>;
	ld.param.b64 	%rd1, [kernel_param_0];
	mov.u32 	%r1, %tid.x;
	mov.u32 %r2, 0x0;
	ld.global.b32 { %r2 }, [ %rd1 + 0 ];
	setp.ne.b32 	%p1, %r1, 0;
	setp.eq.b32 	%p2, %r2, 0;
	@%p1 bra 	$L__BB0_2;
	st.global.b32 	[%rd1], %r1;
$L__BB0_2:
	@%p2 bra 	$L__BB0_4;
$L__BB0_3:                              // the sum
	bar.sync 	0;
	shfl.sync.bfly.b32 	%r3, %r1, 1, 31, -1;
$L__BB0_4:
	ret;
}
"""


def test_threads_that_part_and_meet_before_a_barrier_are_fine() -> None:
    assert parted(PTX) == []


@pytest.mark.parametrize(
    ("old", "new"),
    [
        # Jump threading: one of the two sides decides by itself, and the place to meet is gone.
        ("%r1;\n$L__BB0_2:", "%r1;\n\t@%p2 bra \t$L__BB0_4;\n\tbra.uni \t$L__BB0_3;\n$L__BB0_2:"),
        # Some threads return early, or jump over the barrier.
        ("@%p1 bra \t$L__BB0_2", "@%p1 ret"),
        ("@%p1 bra \t$L__BB0_2", "@%p1 bra \t$L__BB0_4"),
        ("bar.sync", "@%p1 bar.sync"),
        # What decides comes from a thread's number, by way of memory or of another thread.
        ("{ %r2 }, [ %rd1 + 0 ]", "{ %r2 }, [ %r1 + 0 ]"),
        ("mov.u32 %r2, 0x0;\n\tld.global.b32 { %r2 }, [ %rd1 + 0 ]",
         "shfl.sync.idx.b32 %r2, %r1, 0, 31, -1"),
    ],
)  # fmt: skip
def test_a_barrier_that_some_threads_reach_alone_is_found(old: str, new: str) -> None:
    assert old in PTX
    assert any("bar.sync" in one for one in parted(PTX.replace(old, new)))


def test_what_a_whole_warp_has_reduced_is_the_same_in_each_thread_of_one_warp() -> None:
    steps = "\n".join(
        f"shfl.sync.bfly.b32 %r{100 + k}, %r{10 + k}, {1 << k}, 31, -1;\n"
        f"max.f32 %r{11 + k}, %r{10 + k}, %r{100 + k};"
        for k in range(5)
    )
    reduced = PTX.replace("mov.u32 %r2, 0x0;", f"mov.u32 %r10, %r1;\n{steps}")
    reduced = reduced.replace("ld.global.b32 { %r2 }, [ %rd1 + 0 ];", "mov.b32 %r2, %r15;")
    assert parted(reduced.replace(".reqntid 128", ".reqntid 32")) == []
    assert parted(reduced) != []  # of four warps, each has its own
    for change in (("max.f32 %r13", "sub.f32 %r13"), ("%r14, 16, 31", "%r14, 8, 31")):
        assert change[0] in reduced
        assert parted(reduced.replace(*change).replace(".reqntid 128", ".reqntid 32")) != []


# Each of four warps sums up what four threads have left in shared memory.
SUM = """
	and.b32 	%r10, %r1, 3;
	shl.b32 	%r11, %r10, 2;
	mov.b32 	%r12, global_smem;
	add.s32 	%r13, %r12, %r11;
	ld.shared.b32 	%r14, [%r13];
	shfl.sync.bfly.b32 	%r15, %r14, 2, 31, -1;
	add.f32 	%r16, %r14, %r15;
	shfl.sync.bfly.b32 	%r17, %r16, 1, 31, -1;
	add.f32 	%r2, %r17, %r16;
"""
# The same of numbers of 64 bits, whose halves are exchanged.
WIDE_SUM = """
	and.b32 	%r10, %r1, 1;
	shl.b32 	%r11, %r10, 3;
	ld.shared.b64 	%rd2, [%r11];
	mov.b64 	{_, %r14}, %rd2;
	cvt.u32.u64 	%r15, %rd2;
	shfl.sync.bfly.b32 	%r16, %r15, 1, 31, -1;
	shfl.sync.bfly.b32 	%r17, %r14, 1, 31, -1;
	cvt.u64.u32 	%rd3, %r16;
	cvt.u64.u32 	%rd4, %r17;
	shl.b64 	%rd5, %rd4, 32;
	or.b64 	%rd6, %rd3, %rd5;
	add.s64 	%rd7, %rd2, %rd6;
	cvt.u32.u64 	%r2, %rd7;
"""
LOAD = "mov.u32 %r2, 0x0;\n\tld.global.b32 { %r2 }, [ %rd1 + 0 ];"


@pytest.mark.parametrize("text", [SUM, WIDE_SUM, SUM.replace("add.f32", "max.f32")])
def test_what_each_warp_sums_up_of_the_same_memory_is_the_same_in_all_threads(text: str) -> None:
    assert LOAD in PTX
    assert parted(PTX.replace(LOAD, text)) == []


@pytest.mark.parametrize(
    ("text", "old", "new"),
    [
        (SUM, "%r1, 3", "%r1, 7"),  # eight numbers, of which a thread sums up four
        (SUM, "%r11, %r10, 2", "%r11, %r1, 2"),
        (SUM, "%r14, 2, 31", "%r14, 4, 31"),
        (SUM, "%r16, %r14, %r15", "%r16, %r13, %r15"),
        # The assembler may contract a product and a sum, in an order that is each lane's own.
        (SUM, "[%r13];", "[%r13];\n\tmul.f32 %r14, %r14, %r14;"),
        (SUM, "add.f32 \t%r16", "mov.b32 %r14, %r11;\n\tadd.f32 \t%r16"),
        (WIDE_SUM, "%r14, 1, 31", "%r14, 2, 31"),
        (WIDE_SUM, "%rd4, 32", "%rd3, 32"),
        (WIDE_SUM, "%r10, %r1, 1", "%r10, %r1, 2"),
    ],
)  # fmt: skip
def test_a_sum_that_is_not_over_all_that_differs_is_a_threads_own(
    text: str, old: str, new: str
) -> None:
    assert old in text
    assert parted(PTX.replace(LOAD, text.replace(old, new))) != []


@pytest.mark.parametrize(
    "read",
    [
        "ld.acquire.gpu.global.b32 %r2, [%rd1];",
        "atom.global.add.u32 %r2, [%rd1], 1;",
        "mov.u32 %r2, %clock;",
        "{ .reg .b32 a; mov.b32 a, %laneid; mov.b32 %r2, a; }",
    ],
)
def test_what_others_change_meanwhile_is_not_the_same_in_all_threads(read: str) -> None:
    assert parted(PTX.replace(LOAD, read)) != []


SASS = """
.text._kernel:
.L_x_0:
        /*0000*/                   @P0 STG.E desc[UR12][R2.64], R9 ;
        /*0010*/                   @!P1 BRA `(.L_x_1) ;
        /*0020*/                   BAR.SYNC.DEFER_BLOCKING 0x0 ;
        /*0030*/                   LDGSTS.E.BYPASS.128 [R43], desc[UR12][R2.64] ;
.L_x_1:
        /*0040*/                   @P2 BRA `(.L_x_0) ;
        /*0050*/                   EXIT ;
"""


def test_a_copy_that_a_store_may_still_follow_is_found() -> None:
    store = "@P0 STG.E desc[UR12][R2.64], R9"
    assert unordered_copies(SASS) == []
    assert unordered_copies(SASS.replace("BAR.SYNC.DEFER_BLOCKING 0x0", "NOP")) == [store]
    assert unordered_copies(SASS.replace("BAR.SYNC", "@P3 BAR.SYNC")) == [store]
    past = SASS.replace("/*0030*/", "/*0028*/ NOP ;\n.L_x_2:\n        /*0030*/")
    assert unordered_copies(past.replace("`(.L_x_1)", "`(.L_x_2)")) == [store]


# Without the interpreter, which this process may use.
_ENVIRONMENT = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
_COMPILE = """
import json, sys
from pathlib import Path
from penstock.engine.kernels.launch import overlap
from tests.support.compile_kernels import MetaModel
from tests.support.convergence import unordered_copies
with overlap(True):
    launches = MetaModel(Path(sys.argv[1])).launches(16, 0)
for one in launches:
    if one.name == "_decode":
        code = one.assembly(90)
        print(json.dumps([one.name, "LDGSTS" in code, unordered_copies(code)]))
"""


@pytest.mark.slow
def test_a_decode_copies_what_it_stored_after_a_barrier() -> None:
    command = [sys.executable, "-c", _COMPILE, str(MODEL_CONFIGS / "Llama-3.1-8B")]
    done = subprocess.run(command, env=_ENVIRONMENT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    found = {tuple(json.loads(line)[:2]): json.loads(line)[2] for line in done.stdout.splitlines()}
    assert found == {("_decode", True): []}
