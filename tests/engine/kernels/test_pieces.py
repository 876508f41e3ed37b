"""Blocks become pieces and pieces blocks, and a piece that changed does not."""

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed; pip install 'penstock[dev]'")

from penstock.engine.kernels.blocks import add_checksums, gather_blocks, scatter_blocks
from tests.support.kernels import DEVICE

SEED = 2**62 + 1


def ids(*numbers: int) -> torch.Tensor:
    return torch.tensor(numbers, dtype=torch.int32, device=DEVICE)


def test_pieces_are_the_blocks_of_all_layers_and_come_back_unless_they_changed() -> None:
    # Two tensors, of which one is longer than a program takes at once.
    parts = [
        torch.randint(-(2**31), 2**31 - 1, (layers, 5, size), dtype=torch.int32, device=DEVICE)
        for layers, size in ((3, 40), (2, 5000))
    ]
    blocks, sizes = ids(4, 1, 0), [3 * 40, 2 * 5000]
    pieces = torch.zeros(3, sum(sizes), dtype=torch.int32, device=DEVICE)
    checksums = torch.full((3,), SEED, dtype=torch.int64, device=DEVICE)
    for part, start in zip(parts, (0, sizes[0]), strict=True):
        gather_blocks(blocks, part, start, pieces, checksums)
    for row, block in enumerate(blocks.tolist()):
        expected = torch.cat([part[:, block].flatten() for part in parts])
        assert torch.equal(pieces[row], expected)

    pieces[1, 77] ^= 1 << 30  # one bit
    found = torch.full_like(checksums, SEED)
    add_checksums(pieces, found)
    assert (found == checksums).tolist() == [True, False, True]

    targets = [torch.zeros_like(part) for part in parts]
    for target, start in zip(targets, (0, sizes[0]), strict=True):
        scatter_blocks(ids(2, 3, 0), target, start, pieces, found, checksums)
    for target, part in zip(targets, parts, strict=True):
        assert torch.equal(target[:, 2], part[:, 4]) and torch.equal(target[:, 0], part[:, 0])
        assert not target[:, [1, 3, 4]].any()


@pytest.mark.parametrize("change", ["swapped", "zeros", "another's"])
def test_what_is_not_the_same_piece_has_another_checksum(change: str) -> None:
    pieces = torch.randint(0, 9, (2, 1000), dtype=torch.int32, device=DEVICE)
    seeds = torch.tensor([3, 4], dtype=torch.int64, device=DEVICE)
    before = seeds.clone()
    add_checksums(pieces, before)
    if change == "swapped":
        pieces[0, 0], pieces[0, 1] = 1, 2
        before = seeds.clone()
        add_checksums(pieces, before)
        pieces[0, 0], pieces[0, 1] = 2, 1
    elif change == "zeros":
        pieces[0, 500:] = 0
    else:
        seeds[0] = 5
    after = seeds.clone()
    add_checksums(pieces, after)
    assert (before == after).tolist() == [False, True]
