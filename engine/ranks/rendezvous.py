"""`Rendezvous`: where the ranks that compute on GPUs meet before torch connects them. It is memory
that they inherit, so nothing listens where another machine could reach it."""

import os

from torch._C._distributed_c10d import FileStore


def rendezvous_memory() -> int:
    """A descriptor, which the other ranks must inherit."""
    return os.memfd_create("penstock-rendezvous")


class Rendezvous:
    """Where ranks wait for each other before they connect, which cannot be interrupted."""

    def __init__(self, descriptor: int, size: int) -> None:
        """descriptor: of `rendezvous_memory`; it stays open. size: of all ranks."""
        # One that the process opens again has a lock and a position of its own.
        self.store = FileStore(f"/proc/self/fd/{descriptor}", size)
        self.size = size

    def arrive(self, rank: int) -> None:
        self.store.set(f"rank {rank}", "here")

    def all_are_here(self) -> bool:
        return bool(self.store.check([f"rank {rank}" for rank in range(self.size)]))

    def tell(self, rank: int, number: int, values: list[int]) -> None:
        """A rank's part of the number-th exchange of all."""
        self.store.set(_key(rank, number), " ".join(map(str, values)))

    def told(self, number: int) -> list[list[int]] | None:
        """The numbers that each rank told in it; None as long as one has not."""
        keys = [_key(rank, number) for rank in range(self.size)]
        if not self.store.check(keys):
            return None
        return [list(map(int, self.store.get(key).split())) for key in keys]


def _key(rank: int, number: int) -> str:
    return f"{number} of rank {rank}"
