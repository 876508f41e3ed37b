"""`python -m tests.support.rung_rehearsal RUNG...`: rungs of the GPU's ladder without a GPU.

Runs them in full size on `tests.support.pretend_gpu`, which enforces CUDA's rules and computes
nothing: what they would find wrong on a GPU is then the GPU's fault, not theirs. Prints their rows.
Run it without TRITON_INTERPRET.
"""

import sys
from unittest import mock

from torch import Tensor

from tests.support.pretend_gpu import PretendGpu


def main(names: list[str]) -> None:
    for name in names:
        gpu = PretendGpu(answer=65)  # an "a" of the dummy tokenizer
        with gpu.installed():
            # Where there is no GPU, it would turn Triton's interpreter on.
            from tests.bench.gpu import rung

            def memset(tensor: Tensor, gpu: PretendGpu = gpu) -> None:
                gpu.use(tensor)

            with mock.patch.object(rung, "driver_memset", memset):
                status = rung.main([name])
        if status:
            sys.exit(status)


if __name__ == "__main__":
    main(sys.argv[1:])
