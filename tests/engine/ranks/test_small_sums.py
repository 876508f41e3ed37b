"""Sums by symmetric memory, with ranks as threads: a stand-in for torch's operator adds what all
have in their buffers, with its barriers and in its order.
"""

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed import _symmetric_memory

from penstock.engine.ranks.group import Doing
from penstock.engine.ranks.small_sums import MAX_BYTES, SYMMETRIC_SUMS, SmallSums, small_sums
from penstock.engine.ranks.torch_group import TorchGroup

CPU = torch.device("cpu")


class Place:
    """What the threads share. order: in which a rank adds the parts."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.barrier = threading.Barrier(size, timeout=20)
        self.parts: list[Any] = [None] * size
        self.buffers: list[Tensor] = []
        self.calls = 0
        self.order: Callable[[int], list[int]] = lambda rank: list(range(size))

    def exchanged(self, rank: int, part: Any) -> list[Any]:
        self.parts[rank] = part
        self.barrier.wait()
        parts = list(self.parts)
        self.barrier.wait()
        return parts

    def one_shot(self, shared: Tensor, local: Tensor, op: str, name: str, out: Tensor) -> Tensor:
        assert (op, name) == ("sum", "the group")
        rank = [each.data_ptr() for each in self.buffers].index(shared.data_ptr())
        assert shared.shape == local.shape == out.shape
        shared.copy_(local)
        self.barrier.wait()
        others = [
            each[: shared.nbytes].view(shared.dtype).view(shared.shape) for each in self.buffers
        ]
        total = torch.zeros_like(shared)
        for each in self.order(rank):
            total += others[each]
        self.barrier.wait()
        self.calls += rank == 0
        return out.copy_(total)


class ThreadGroup:
    """`Group` of one thread; in it NCCL's place is a sum in another order."""

    def __init__(self, place: Place, rank: int) -> None:
        self.place, self.rank, self.size = place, rank, place.size
        self.doing = Doing()
        self.group_name = "the group"

    def all_reduce(self, tensor: Tensor) -> None:
        total = sum(self.place.exchanged(self.rank, tensor.clone())[::-1])
        assert isinstance(total, Tensor)
        tensor.copy_(total)

    def broadcast(self, tensor: Tensor) -> None:
        tensor.copy_(self.place.exchanged(self.rank, tensor.clone())[0])

    def gather(self, tensor: Tensor) -> None:
        raise AssertionError

    def barrier(self) -> None:
        self.place.barrier.wait()

    def agree(self, ok: bool) -> bool:
        return all(self.place.exchanged(self.rank, ok))


@pytest.fixture
def operator(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[Place], None]]:
    """Puts the stand-ins in torch's place."""
    monkeypatch.setenv(SYMMETRIC_SUMS, "1")
    monkeypatch.setattr(torch.cuda, "can_device_access_peer", lambda one, other: one != other)
    places: list[Place] = []

    def empty(num_bytes: int, *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.zeros(num_bytes, dtype=dtype, device=device)

    def rendezvous(buffer: Tensor, group: Any) -> None:
        group.place.buffers[:] = group.place.exchanged(group.rank, buffer)

    def one_shot(*arguments: Any) -> Tensor:
        return places[0].one_shot(*arguments)

    monkeypatch.setattr(_symmetric_memory, "empty", empty)
    monkeypatch.setattr(_symmetric_memory, "rendezvous", rendezvous)
    library = torch.library.Library("symm_mem", "IMPL")  # type: ignore[no-untyped-call]
    library.impl("one_shot_all_reduce_copy_out", one_shot, "CPU")  # type: ignore[no-untyped-call]
    yield places.append
    library._destroy()  # type: ignore[no-untyped-call]


def in_threads(place: Place, run: Callable[[ThreadGroup], Any]) -> list[Any]:
    with ThreadPoolExecutor(place.size) as threads:
        return list(threads.map(run, [ThreadGroup(place, rank) for rank in range(place.size)]))


def joined(group: ThreadGroup) -> SmallSums | None:
    process_group: Any = group
    return small_sums(group, process_group, CPU, group.size, group.agree)


@pytest.mark.parametrize("size", [2, 4, 8])
def test_the_sum_is_in_the_order_of_the_ranks_on_all_of_them(
    size: int, operator: Callable[[Place], None]
) -> None:
    operator(place := Place(size))
    parts = [torch.randn(3, 40, generator=torch.Generator().manual_seed(i)) for i in range(size)]

    def run(group: ThreadGroup) -> list[Tensor]:
        sums = joined(group)
        assert sums is not None
        found = []
        for dtype in (torch.float32, torch.bfloat16):
            for _ in range(2):  # the buffer is used again
                tensor = parts[group.rank].to(dtype, copy=True)
                assert sums.takes(tensor)
                sums.all_reduce(tensor)
                found.append(tensor)
        return found

    found = in_threads(place, run)
    for index, dtype in enumerate([torch.float32] * 2 + [torch.bfloat16] * 2):
        expected = parts[0].to(dtype)
        for part in parts[1:]:
            expected = expected + part.to(dtype)
        assert all(torch.equal(each[index], expected) for each in found)


def test_large_unaligned_and_whole_numbers_are_left_to_nccl() -> None:
    sums = SmallSums(torch.zeros(MAX_BYTES, dtype=torch.uint8), "the group")
    most = torch.zeros(MAX_BYTES // 2 + 8, dtype=torch.bfloat16)
    assert sums.takes(most[: MAX_BYTES // 2])
    assert not sums.takes(most)
    assert not sums.takes(most[1:9])
    assert not sums.takes(most[:7])
    assert not sums.takes(most[:0])
    assert not sums.takes(most[:8].half()) and not sums.takes(most[:8].int())


def test_a_group_sums_small_tensors_by_it_and_others_as_before(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    by_nccl: list[int] = []
    monkeypatch.setattr(
        "torch.distributed.all_reduce", lambda each, group: by_nccl.append(len(each))
    )
    peers: Any = SimpleNamespace(rank=0, failures=lambda name: threading.Lock())
    group = TorchGroup(peers, [0, 1], None, CPU, by_nccl=True)
    small, large = torch.zeros(8), torch.zeros(MAX_BYTES)
    group.all_reduce(small)
    assert by_nccl == [8]
    by_symmetry: list[int] = []
    sums = SmallSums(torch.zeros(MAX_BYTES, dtype=torch.uint8), "the group")
    monkeypatch.setattr(sums, "all_reduce", lambda each: by_symmetry.append(len(each)))
    group.small_sums = sums
    group.all_reduce(small)
    group.all_reduce(large)
    assert (by_nccl, by_symmetry) == ([8, MAX_BYTES], [8])


def test_it_is_off_unless_it_is_asked_for(
    operator: Callable[[Place], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(SYMMETRIC_SUMS)
    operator(place := Place(2))
    assert in_threads(place, joined) == [None, None]
    assert place.buffers == []


def _order_of_its_own(place: Place, _: pytest.MonkeyPatch) -> None:
    """As torch adds for three ranks: each begins with itself."""
    place.order = lambda rank: [(rank + step) % place.size for step in range(place.size)]


def _forgets_a_rank(place: Place, _: pytest.MonkeyPatch) -> None:
    place.order = lambda rank: list(range(place.size - 1))


def _one_cannot(place: Place, patch: pytest.MonkeyPatch) -> None:
    def rendezvous(buffer: Tensor, group: Any) -> None:
        place.exchanged(group.rank, buffer)
        if group.rank == 1:
            raise RuntimeError("no descriptor\nand a trace")

    patch.setattr(_symmetric_memory, "rendezvous", rendezvous)


def _one_is_far(_: Place, patch: pytest.MonkeyPatch) -> None:
    patch.setattr(torch.cuda, "can_device_access_peer", lambda one, other: (one, other) != (2, 1))


@pytest.mark.parametrize(
    ("spoil", "why"),
    [
        (_order_of_its_own, "their sums are not NCCL's"),
        (_forgets_a_rank, "their sums are not NCCL's"),
        (_one_cannot, "no descriptor"),
        (_one_is_far, "a GPU does not reach the memory of another"),
    ],
)
def test_where_one_rank_cannot_have_it_none_has_and_the_log_says_why(
    spoil: Callable[[Place, pytest.MonkeyPatch], None],
    why: str,
    operator: Callable[[Place], None],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    operator(place := Place(4))
    spoil(place, monkeypatch)
    assert in_threads(place, joined) == [None] * 4
    assert f"{SYMMETRIC_SUMS}: sums stay with NCCL ({why})" in caplog.messages


def test_of_three_ranks_torch_adds_in_an_order_that_differs_so_there_is_none(
    operator: Callable[[Place], None], caplog: pytest.LogCaptureFixture
) -> None:
    operator(place := Place(3))
    assert in_threads(place, joined) == [None] * 3
    assert "they are not for 3 ranks" in caplog.text
