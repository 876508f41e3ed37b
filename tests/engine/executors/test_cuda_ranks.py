"""What several GPUs need before anything is started. `tests/distributed` has them compute."""

import pytest

pytest.importorskip("triton", reason="Triton is not installed; pip install 'penstock[dev]'")

from penstock.engine.executors.cuda.ranks import check_num_gpus
from penstock.scheduler.errors import InvalidConfig


def test_fewer_gpus_than_ranks_are_refused_with_what_to_change() -> None:
    check_num_gpus(2, 2)
    message = (
        r"--tensor-parallel-size 4 needs 4 GPUs, one for each rank, and torch finds 2 here; set it "
        r"to at most 2, make more of them visible \(CUDA_VISIBLE_DEVICES"
    )
    with pytest.raises(InvalidConfig, match=message):
        check_num_gpus(4, 2)
