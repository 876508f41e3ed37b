"""No kernel's threads part before an instruction that needs them all, as Triton compiles it for
Hopper.

Proved is this of the PTX of every kernel that `tests.support.every_kernel` compiles, by that
version of Triton: jump threading (triton-lang/triton#11153, llvm/llvm-project#213868) has harmed
none. Attaching a target to LLVM's passes instead, so that this one does nothing, would not do:
those of Triton 3.6 have another that does the same harm (SimplifyCFG). Not proved is it of other
constants, of other versions of Triton, and of what the assembler does with PTX in which threads
can meet.
"""

import json
import os
import subprocess
import sys

import pytest

pytest.importorskip("triton", reason="Triton is not installed; pip install 'penstock[dev]'")

from tests.support.every_kernel import names

pytestmark = pytest.mark.slow
# Without the interpreter, which this process may use.
_ENVIRONMENT = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}


def _lines(module: str) -> list[list[object]]:
    done = subprocess.run(
        [sys.executable, "-m", f"tests.support.{module}"],
        env=_ENVIRONMENT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


def test_threads_of_every_kernel_meet_where_they_are_all_needed() -> None:
    kernels = _lines("every_kernel")
    assert {name for name, _constants, _parted in kernels} == names()
    assert [kernel for kernel in kernels if kernel[2] != []] == []


def test_the_harm_that_jump_threading_does_is_found() -> None:
    # Fails where Triton's LLVM leaves it (triton-lang/triton#11156): nothing here is needed then.
    [found] = _lines("harmed_kernel")
    assert any("bar.sync" in str(one) for one in found) and any("shfl" in str(one) for one in found)
