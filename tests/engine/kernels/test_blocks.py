"""Whole blocks are copied in every layer, and no other is touched."""

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed; pip install 'penstock[dev]'")

from penstock.engine.kernels.blocks import copy_blocks
from tests.support.kernels import DEVICE


@pytest.mark.parametrize("block_size", [16, 48])
def test_a_copied_block_is_its_source_in_every_layer(block_size: int) -> None:
    shape = (3, 6, block_size, 2, 40)
    keys, values = torch.randn(2, *shape, device=DEVICE).unbind()
    before = keys.clone(), values.clone()
    copies = torch.tensor([(1, 4), (1, 0), (5, 2)], dtype=torch.int32, device=DEVICE)
    copy_blocks(copies, keys, values)
    for after, old in zip((keys, values), before, strict=True):
        assert torch.equal(after, old[:, [1, 1, 5, 3, 1, 5]])
