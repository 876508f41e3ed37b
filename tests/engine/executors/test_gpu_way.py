"""The ways in which a GPU may compute: what each does, and that the last gives the same."""

from pathlib import Path

import pytest

pytest.importorskip("triton", reason="Triton is not installed; pip install 'penstock[dev]'")

from penstock.engine.config import EngineConfig, GpuWay
from penstock.engine.executors.cpu import CpuExecutor
from penstock.engine.executors.cuda.device import Interpreter
from penstock.engine.loading.gpu_ranks import shared_by_gpus
from penstock.engine.loading.load import load_executor
from penstock.engine.process.phases import Phases
from penstock.scheduler.config import SchedulerConfig
from penstock.scheduler.errors import InvalidConfig
from tests.support.kernels import ON_GPU
from tests.support.paths import DEMO_MODEL
from tests.support.run_rehearsal import ways
from tests.support.scheduling import make_request
from tests.support.stepping import SteppedEngine, ids_of
from tests.support.tiny_models import engine_config, make_model, save

SMALL = SchedulerConfig(max_num_seqs=2, max_num_batched_tokens=8)


@pytest.mark.slow
def test_each_way_launches_what_it_says_and_a_gpu_without_early_starts_begins_with_graphs() -> None:
    pdl, graphs, eager, torch, without_graphs, ampere = ways()
    assert [row["way"] for row in (pdl, graphs, eager, torch)] == [*GpuWay]
    assert pdl["early"] and pdl["graphs"] == graphs["graphs"] > 0
    assert graphs["launches"] and not graphs["early"]
    assert eager["launches"] and not (eager["early"] or eager["graphs"])
    assert not (torch["launches"] or torch["graphs"])
    assert without_graphs["way"] == "eager" and ampere["way"] == "graphs"


@pytest.mark.skipif(ON_GPU, reason="kernels are compiled here, not interpreted")
@pytest.mark.parametrize("family", ["qwen3", pytest.param("qwen3_5", marks=pytest.mark.slow)])
def test_torchs_operators_alone_answer_as_the_cpu_executor(family: str, tmp_path: Path) -> None:
    model = make_model(family)
    path = save(model, tmp_path / "model")
    config = engine_config(path, scheduler=SMALL, gpu_way=GpuWay.TORCH, block_size=16)
    requests = [make_request("a", 5, max_tokens=3), make_request("b", 14, max_tokens=3)]
    expected = SteppedEngine(config).run(requests)
    executor = load_executor(config, path, None, Interpreter(), Phases())
    assert isinstance(executor, CpuExecutor) and executor.info.gpu_way is GpuWay.TORCH
    found = SteppedEngine(config, executor).run(requests)
    assert [ids_of(outputs) for outputs in found] == [ids_of(outputs) for outputs in expected]


def test_torchs_operators_alone_are_refused_for_several_gpus() -> None:
    config = EngineConfig(model=str(DEMO_MODEL), gpu_way=GpuWay.TORCH, tensor_parallel_size=2)
    with pytest.raises(InvalidConfig, match="cannot be combined with --gpu-way torch"):
        shared_by_gpus(config)
