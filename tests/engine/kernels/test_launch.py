"""When kernels may start early, and that they then compute the same."""

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", reason="Triton is not installed; pip install 'penstock[dev]'")

from triton import knobs

from penstock.engine.kernels.launch import device_overlaps, overlap, overlapped
from penstock.engine.kernels.linear import Scaled, skinny_linear
from penstock.engine.kernels.norm import add_rms_norm
from tests.support.kernels import DEVICE, ON_GPU, random


@pytest.mark.parametrize(
    ("capability", "environment", "is_early"),
    [
        ((9, 0), None, True),
        ((10, 0), "1", True),
        ((8, 9), None, False),
        ((12, 0), None, False),
        ((9, 0), "0", False),
    ],
)
def test_kernels_start_early_on_supported_devices_unless_disabled(
    monkeypatch: pytest.MonkeyPatch,
    capability: tuple[int, int],
    environment: str | None,
    is_early: bool,
) -> None:
    monkeypatch.setattr(knobs.runtime, "interpret", False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)
    monkeypatch.delenv("PENSTOCK_PDL", raising=False)  # which the suite of a GPU may have set
    if environment is not None:
        monkeypatch.setenv("PENSTOCK_PDL", environment)
    device_overlaps.cache_clear()
    try:
        assert overlapped().get("launch_pdl", False) is is_early
        with overlap(not is_early):
            assert overlapped()["PDL"] is not is_early
        assert overlapped()["PDL"] is is_early
    finally:
        device_overlaps.cache_clear()


@pytest.mark.skipif(ON_GPU, reason="kernels are compiled here, not interpreted")
def test_interpreted_kernels_start_one_by_one() -> None:
    assert overlapped() == {"PDL": False}


@pytest.mark.gpu
@pytest.mark.skipif(not ON_GPU, reason="there is no GPU")
def test_a_captured_chain_computes_the_same_when_its_kernels_start_early() -> None:
    if torch.cuda.get_device_capability()[0] not in (9, 10):
        pytest.skip("kernels of this GPU do not start early")
    size, wide, depth = 1024, 3072, 40
    up = random(2 * wide, size, dtype=torch.bfloat16) * 0.03
    down = random(size, wide, dtype=torch.bfloat16, seed=1) * 0.01
    norm = torch.ones(size, dtype=torch.bfloat16, device=DEVICE)
    start = random(4, size, dtype=torch.bfloat16, seed=2)
    residual = torch.empty_like(start)

    def chain() -> None:
        # Memory is freed and reused between kernels, and one tensor is updated in place.
        residual.copy_(start)
        x: Tensor | Scaled | None = residual
        for _ in range(depth):
            assert x is not None
            active = residual.new_empty(4, wide)
            skinny_linear(x, up, active, eps=1e-5, is_gated=True)
            change, normed = torch.empty_like(residual), torch.empty_like(residual)
            skinny_linear(active, down, change)
            add_rms_norm(change, residual, norm, 1e-5, normed)
            x = skinny_linear(active, down, residual, residual=residual, following=norm)
            del active, change, normed

    def captured(enabled: bool) -> torch.cuda.CUDAGraph:
        with overlap(enabled):
            chain()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                chain()
        return graph

    captured(False).replay()
    expected = residual.clone()
    early = captured(True)
    for _ in range(50):
        early.replay()
        torch.testing.assert_close(residual, expected, rtol=0, atol=0)
