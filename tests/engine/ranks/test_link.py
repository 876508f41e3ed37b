"""Links between stages: both sides in this process, which map the memory apart."""

import mmap
import os
import threading
import time
from collections.abc import Iterator

import pytest
import torch

from penstock.engine.native.library import load_ranks_library
from penstock.engine.ranks.group import Doing, RankFailed
from penstock.engine.ranks.layout import RankLayout
from penstock.engine.ranks.link import Link, LinkSize
from penstock.engine.ranks.shared_memory import RankMemory, shared_memory
from tests.support.compiler import needs_compiler

pytestmark = needs_compiler
# Behind something else in the same memory.
OFFSET = mmap.ALLOCATIONGRANULARITY
SIZE = LinkSize(num_messages=2, message_bytes=5000)


@pytest.fixture
def sides() -> Iterator[tuple[Link, Link]]:
    library, memory = load_ranks_library(), shared_memory(OFFSET + SIZE.num_bytes)
    doing = Doing(step=7, phase="waiting for stage 0")

    def side(rank: int) -> Link:
        shared = RankMemory(library, memory, RankLayout(1, 2), rank, 20.0, doing)
        return Link(shared, 1 - rank, SIZE, OFFSET)

    yield side(1), side(0)
    os.close(memory)


def send(sender: Link, step: int) -> None:
    sender.room((3, 5), torch.float32).fill_(step)
    sender.send(step, step / 2)


def test_messages_come_in_their_order_and_stay_until_they_are_taken(
    sides: tuple[Link, Link],
) -> None:
    sender, receiver = sides
    for step in range(1, 3):
        send(sender, step)
    for step in range(1, 9):
        states = receiver.receive(step, (3, 5), torch.float32)
        assert states.tolist() == [[float(step)] * 5] * 3 and receiver.computed_s == step / 2
        receiver.taken()
        send(sender, step + 2)


def test_whoever_waits_wakes_when_a_message_comes_and_when_one_is_taken(
    sides: tuple[Link, Link],
) -> None:
    sender, receiver = sides
    thread = threading.Timer(0.2, send, (sender, 1))
    thread.start()
    receiver.receive(1, (3, 5), torch.float32)
    assert receiver.waited_s > 0.1
    thread.join()
    send(sender, 2)
    thread = threading.Timer(0.2, receiver.taken)
    thread.start()
    sender.room((3, 5), torch.float32)  # both places are full until then
    assert sender.waited_s > 0.1
    thread.join()


def test_one_that_does_not_come_ends_in_a_sentence_of_who_and_where(
    sides: tuple[Link, Link],
) -> None:
    sides[1].shared.timeout_s = 0.05
    with pytest.raises(RankFailed) as failed:
        sides[1].receive(7, (3, 5), torch.float32)
    assert failed.value.rank == 1
    assert str(failed.value) == (
        "rank 1 (stage 0) did not come within 0.05 s while rank 0 (stage 1) waited for it in step "
        "7, waiting for stage 0 (the states before it, message 1)"
    )


def test_one_that_has_ended_is_waited_for_no_longer(sides: tuple[Link, Link]) -> None:
    began_s = time.monotonic()
    threading.Timer(0.1, sides[1].end, (1,)).start()
    with pytest.raises(RankFailed, match=r"rank 1 \(stage 0\) has ended while rank 0"):
        sides[1].receive(7, (3, 5), torch.float32)
    assert time.monotonic() - began_s < 15.0  # at once, unless the machine is busy
