"""Shared memory on huge pages, as the system itself reports it."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from penstock.engine.memory.huge_pages import (
    PAGE_BYTES,
    GrowingHugePages,
    SharedMapping,
    are_possible,
)

pytestmark = pytest.mark.skipif(
    not are_possible(), reason="this system makes no huge pages of shared memory (Linux 6.1 does)"
)
PAGES = 16


@pytest.fixture
def descriptor() -> Iterator[int]:
    made = os.memfd_create("test", os.MFD_CLOEXEC)
    os.ftruncate(made, PAGES * PAGE_BYTES)
    yield made
    os.close(made)


def num_huge() -> int:
    """Pages of shared memory that this process has mapped as huge ones."""
    lines = Path("/proc/self/smaps").read_text().splitlines()
    sizes = [int(line.split()[1]) for line in lines if line.startswith("ShmemPmdMapped")]
    return sum(sizes) * 1024 // PAGE_BYTES


def test_a_page_becomes_huge_and_keeps_what_it_holds(descriptor: int) -> None:
    mapping = SharedMapping(descriptor, PAGES * PAGE_BYTES)
    mapping.memory[PAGE_BYTES + 5] = 7
    mapping.make_huge(1)
    assert num_huge() == 1
    assert mapping.memory[PAGE_BYTES + 5] == 7
    assert os.pread(descriptor, 1, PAGE_BYTES + 5) == b"\7"


def test_two_mappings_are_one_memory(descriptor: int) -> None:
    first, second = (SharedMapping(descriptor, PAGES * PAGE_BYTES) for _ in range(2))
    first.make_huge(0)
    first.memory[3] = 9
    assert second.memory[3] == 9


def test_pages_are_made_as_blocks_are_used(descriptor: int) -> None:
    mapping = SharedMapping(descriptor, PAGES * PAGE_BYTES)
    block_bytes, blocks = PAGE_BYTES // 4 + 64, 12
    layers = [(4096, block_bytes), (4096 + blocks * block_bytes, block_bytes)]
    pages = GrowingHugePages(mapping, layers, blocks)
    assert num_huge() == 0
    pages.reach(0)
    after_one = num_huge()
    assert after_one == 2
    for block in range(blocks):
        pages.reach(block)
        used = [
            range((start + block * size) // PAGE_BYTES, (start + block * size + size) // PAGE_BYTES)
            for start, size in layers
        ]
        assert num_huge() >= len({page for each in used for page in each})
    assert after_one < num_huge() <= PAGES
    assert os.fstat(descriptor).st_blocks * 512 == num_huge() * PAGE_BYTES


def test_what_is_not_whole_at_the_end_stays_small(descriptor: int) -> None:
    mapping = SharedMapping(descriptor, PAGE_BYTES + 4096)
    pages = GrowingHugePages(mapping, [(0, PAGE_BYTES + 4096)], 1)
    pages.reach(0)
    assert num_huge() == 1
