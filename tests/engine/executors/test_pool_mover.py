"""Blocks of a pool on the device go to the host's memory and come back, beside its other work."""

import time
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", reason="Triton is not installed; pip install 'penstock[dev]'")

from penstock.engine.executors.cuda.pool_mover import PoolMover, piece_bytes, pin, words_of
from penstock.engine.memory.pool.kv_layout import KVLayout
from penstock.engine.memory.pool.kv_pool import KVPools
from penstock.engine.memory.pool.kv_shape import KVShape
from penstock.engine.memory.tiers.host_pieces import HostPieces
from penstock.engine.memory.tiers.host_tier import HostTier, Move
from penstock.scheduler.cache.tier import Loaded, TierBlock
from tests.support.kernels import DEVICE, ON_GPU

# On a GPU enough that a copy takes longer than a launch.
NUM_LAYERS, BLOCK_SIZE = (32, 64) if ON_GPU else (2, 8)
NUM_BLOCKS, NUM_SLOTS = 12, 8
BLOCKS = [TierBlock(0, bytes([number]) * 16) for number in range(4)]


class Moved:
    """A pool of random content, and slots."""

    def __init__(self) -> None:
        shape = KVShape.of(num_layers=NUM_LAYERS, num_kv_heads=2, head_dim=16)
        layout = KVLayout((None,), (0,) * NUM_LAYERS)
        pools = KVPools(shape, layout, [NUM_BLOCKS], BLOCK_SIZE, torch.float16, DEVICE)
        self.parts = words_of(pools.groups[0])
        for words in self.parts:
            words.random_(-(2**31), 2**31 - 1)
        self.mover = PoolMover(pools, 4 * piece_bytes(pools.groups[0]), DEVICE)
        self.pieces = HostPieces(self.mover.piece_bytes, [NUM_SLOTS], pin if ON_GPU else None)
        self.pieces.grow()
        self.mover.use(self.pieces)

    def content(self, first: int, end: int) -> list[Tensor]:
        """Of these blocks."""
        return [words[:, first:end].clone() for words in self.parts]

    def zero_slowly(self, first: int, end: int) -> None:
        """As a step of the device that is not done for a while when this returns."""
        if ON_GPU:
            torch.cuda._sleep(100_000_000)  # type: ignore[no-untyped-call]  # cycles
        for words in self.parts:
            words[:, first:end].zero_()


def same(first: list[Tensor], second: list[Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def test_blocks_come_back_to_other_places_and_a_slot_that_changed_does_not() -> None:
    moved = Moved()
    before = moved.content(0, NUM_BLOCKS)
    slots = (4, 5, 0, 7)  # of which two are next to each other
    outward = [Move(block_id, slot, 40 + block_id) for block_id, slot in enumerate(slots)]
    checksums = moved.mover.gather(0, outward).wait()
    [run] = moved.pieces.runs(0, [0])
    run[0, 100] ^= 8
    inward = [move._replace(block_id=8 + move.block_id) for move in outward]
    found = moved.mover.scatter(0, inward, checksums, [moved.mover.fence()]).wait()
    assert [a == b for a, b in zip(checksums, found, strict=True)] == [True, True, False, True]
    after = moved.content(0, NUM_BLOCKS)
    for old, new in zip(before, after, strict=True):
        assert torch.equal(new[:, [8, 9, 11]], old[:, [0, 1, 3]])
        assert torch.equal(new[:, [*range(8), 10]], old[:, [*range(8), 10]])


def wait_until(tier: HostTier, is_done: Callable[[], bool]) -> None:
    ends_s = time.monotonic() + 60.0
    while not is_done():
        assert time.monotonic() < ends_s
        if not ON_GPU:
            tier.work()


def all_ready(tier: HostTier) -> bool:
    return all(block in tier for block in BLOCKS)


def test_a_step_waits_for_blocks_that_are_read_and_a_load_for_steps_before_it() -> None:
    moved = Moved()
    moved.mover.warm_up()
    before = moved.content(0, 4)
    tier = HostTier(moved.mover, moved.pieces, 1e9, has_threads=ON_GPU)
    for block_id, block in enumerate(BLOCKS):
        tier.store(block, block_id)
    wait_until(tier, lambda: not any(tier._pending))
    for block_id in range(4):
        tier.withdraw(0, block_id)
    moved.zero_slowly(0, 4)  # others use them now
    wait_until(tier, lambda: all_ready(tier))
    moved.zero_slowly(8, 12)
    tier.load({block: 8 + block_id for block_id, block in enumerate(BLOCKS)})
    loaded: list[Loaded] = []

    def are_loaded() -> bool:
        loaded.extend(tier.loaded())
        return len(loaded) == len(BLOCKS)

    wait_until(tier, are_loaded)
    assert all(each.is_intact for each in loaded)
    assert same(moved.content(8, 12), before)
    assert not any(words.any() for words in moved.content(0, 4))
