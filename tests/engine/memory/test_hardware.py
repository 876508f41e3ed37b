"""The hardware table, measurements, and the utilisation metrics based on them."""

import time
from dataclasses import replace

import pytest
import torch

from penstock.engine.executors.scripted import scripted_info
from penstock.engine.memory.hardware import (
    copy_bandwidth,
    gpu_matmul_flops,
    link_of,
    matmul_flops,
    peak_bandwidth,
    peak_flops,
)
from penstock.engine.step.messages import StepReport
from penstock.scheduler.batch import StepOutputs
from penstock.scheduler.stats import NO_WORK, SchedulerStats
from penstock.server.observability.metrics import Metrics
from tests.support.kernels import DEVICE, ON_GPU

BF16 = torch.bfloat16


@pytest.mark.parametrize(
    ("name", "link"),
    [
        ("NVIDIA H100 80GB HBM3", "NVLink 4"),
        ("NVIDIA H100 PCIe", "PCIe 5"),
        ("NVIDIA A100-SXM4-80GB", "NVLink 3"),
        ("NVIDIA A100-PCIE-40GB", "PCIe 4"),
        ("NVIDIA B200", "NVLink 5"),
        ("NVIDIA GeForce RTX 4090", "PCIe 4"),
        ("NVIDIA GH200 480GB", None),
        ("abacus", None),
    ],
)
def test_a_device_s_link_is_that_of_its_board(name: str, link: str | None) -> None:
    found = link_of(name)
    assert (found and found.name) == link
    if found is not None:
        assert 1e-6 < found.latency_s < 1e-4 and 1e10 < found.bus_bytes_per_s < 1e12


@pytest.mark.parametrize(
    ("name", "flops", "bandwidth"),
    [
        ("NVIDIA H200", 989e12, 4.8e12),
        ("NVIDIA H200 NVL", 835e12, 4.8e12),
        ("NVIDIA GH200 480GB", 989e12, 4.0e12),
        ("NVIDIA GH200 144G HBM3e", 989e12, 4.9e12),
        ("NVIDIA H20", 148e12, 4.0e12),
        ("NVIDIA GB200", 2.5e15, 8e12),
        ("NVIDIA B200", 2.25e15, 8e12),
        ("NVIDIA GB300", 2.5e15, 8e12),
        ("NVIDIA L4", 121e12, 300e9),
        ("NVIDIA L40S", 362.05e12, 864e9),
        ("NVIDIA A10G", 70e12, 600e9),
        ("NVIDIA A100-SXM4-80GB", 312e12, 2.039e12),
        ("NVIDIA A100-SXM4-40GB", 312e12, 1.555e12),
    ],
)
def test_a_device_gets_its_own_peaks_and_not_those_of_a_similar_name(
    name: str, flops: float, bandwidth: float
) -> None:
    assert peak_flops(name, BF16) == peak_flops(name, torch.float16) == flops
    assert peak_bandwidth(name) == bandwidth


def test_an_unknown_device_or_another_dtype_has_no_peak() -> None:
    assert peak_flops("cpu", BF16) is None
    assert peak_bandwidth("cpu") is None
    assert peak_flops("NVIDIA H200", torch.float32) is None


def _report(step: int, step_s: float, model_flops: int) -> StepReport:
    return StepReport(
        step=step,
        outputs=StepOutputs(),
        stats=SchedulerStats(),
        work=NO_WORK,
        started_s=time.monotonic(),
        step_s=step_s,
        model_bytes=0,
        model_flops=model_flops,
    )


def _metrics(peak_flops_per_s: float | None) -> Metrics:
    """After a step of 2 ms with 3e9 operations, and one of 1 ms with 1e9."""
    metrics = Metrics()
    metrics.model = replace(scripted_info(), peak_flops_per_s=peak_flops_per_s)
    for step, (step_s, flops) in enumerate([(0.002, 3 * 10**9), (0.001, 10**9)], start=1):
        metrics.on_step(_report(step, step_s, flops))
    return metrics


def test_flops_utilization_counts_only_the_time_in_steps() -> None:
    text = _metrics(1e13).text().decode()
    ratio = 4e9 / 0.003 / 1e13
    line = 'penstock_model_flops_utilization_ratio{class="all",peak="datasheet"} '
    (value,) = [entry for entry in text.splitlines() if entry.startswith(line)]
    assert float(value.rpartition(" ")[2]) == pytest.approx(ratio)
    assert 'penstock_peak_flops_per_second{peak="datasheet"} ' in text


def test_without_a_known_peak_there_is_no_flops_utilization() -> None:
    assert "flops_utilization" not in _metrics(None).text().decode()


def test_the_measured_flops_are_those_of_a_product_timed_by_hand() -> None:
    left = torch.rand(768, 768)
    times_s = []
    for _ in range(10):
        started_s = time.perf_counter()
        torch.mm(left, left)
        times_s.append(time.perf_counter() - started_s)
    # A wide tolerance, since the machine has other work too.
    assert 0.1 < matmul_flops(torch.float32) / (2 * 768**3 / min(times_s)) < 10


def test_bfloat16_is_measured_as_it_is_multiplied_which_no_processor_emulates() -> None:
    # On AVX2 alone, torch's own product in bfloat16 has an eightieth of float32's speed.
    assert matmul_flops(BF16) > 0.2 * matmul_flops(torch.float32)


@pytest.mark.gpu
@pytest.mark.skipif(not ON_GPU, reason="there is no GPU")
def test_a_gpus_copy_bandwidth_is_between_a_hosts_and_its_datasheets() -> None:
    measured = copy_bandwidth(DEVICE, 2**28)
    peak = peak_bandwidth(torch.cuda.get_device_name(DEVICE)) or 1e14
    assert 1e11 < measured <= peak


@pytest.mark.gpu
@pytest.mark.skipif(not ON_GPU, reason="there is no GPU")
def test_a_gpu_multiplies_at_a_third_of_its_datasheet_or_more() -> None:
    measured = gpu_matmul_flops(DEVICE, torch.bfloat16)
    peak = peak_flops(torch.cuda.get_device_name(DEVICE), torch.bfloat16) or 1e16
    assert 1e13 < measured <= peak and (peak == 1e16 or measured > peak / 3)
