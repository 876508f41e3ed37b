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
from tests.support.convergence import parted, unordered_copies
with overlap(True):
    launches = MetaModel(Path(sys.argv[1])).launches(16, 0)
for one in launches:
    if one.name == "_decode":
        ptx, code = one.assembly(90)
        print(json.dumps([one.name, "LDGSTS" in code, parted(ptx), unordered_copies(code)]))
"""


@pytest.mark.slow
def test_threads_of_a_decode_meet_and_it_copies_what_it_stored_after_a_barrier() -> None:
    command = [sys.executable, "-c", _COMPILE, str(MODEL_CONFIGS / "Llama-3.1-8B")]
    done = subprocess.run(command, env=_ENVIRONMENT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    found = {tuple(json.loads(line)[:2]): json.loads(line)[2:] for line in done.stdout.splitlines()}
    assert found == {("_decode", True): [[], []]}
