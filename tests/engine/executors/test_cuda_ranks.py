"""What several GPUs need before anything is started. `tests/distributed` has them compute."""

import pytest

pytest.importorskip("triton", reason="Triton is not installed; pip install 'penstock[dev]'")

from penstock.engine.loading.gpu_ranks import check_num_gpus
from penstock.engine.ranks.layout import RankLayout
from penstock.scheduler.errors import InvalidConfig


def test_fewer_gpus_than_ranks_are_refused_with_what_to_change() -> None:
    check_num_gpus(RankLayout(1, 2), 2)
    needs = (
        r"needs 4 GPUs, one for each rank, and torch finds 2 here; ask for fewer ranks, make more "
        r"GPUs visible \(CUDA_VISIBLE_DEVICES"
    )
    with pytest.raises(InvalidConfig, match=f"^--tensor-parallel-size 4 {needs}"):
        check_num_gpus(RankLayout(4), 2)
    flags = "--tensor-parallel-size 2 with --pipeline-parallel-size 2"
    with pytest.raises(InvalidConfig, match=f"^{flags} {needs}"):
        check_num_gpus(RankLayout(2, 2), 2)
