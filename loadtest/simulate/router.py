"""Which replica gets a request. A router knows what it sent, what has ended, and the prompts."""

from collections.abc import Sequence
from enum import StrEnum
from itertools import count
from typing import Protocol

# Prompts are compared in pieces of so many tokens.
_PIECE = 64
# A replica that has the prefix is passed over if it has this many requests more than the least
# loaded one: then waiting costs more than computing the prefix again.
_MAX_IMBALANCE = 8
_MAX_PIECES = 1_000_000


class RouterPolicy(StrEnum):
    """How requests are spread over replicas."""

    ROUND_ROBIN = "round-robin"
    LEAST_LOADED = "least-loaded"
    PREFIX_AWARE = "prefix-aware"


class HasLoad(Protocol):
    """num_open: requests that were sent there and have not ended."""

    @property
    def num_open(self) -> int: ...


class Router(Protocol):
    def choose(self, prompt: tuple[int, ...], replicas: Sequence[HasLoad]) -> int:
        """The index of the replica that gets a request with this prompt."""
        ...


def make_router(policy: RouterPolicy) -> Router:
    match policy:
        case RouterPolicy.ROUND_ROBIN:
            return RoundRobin()
        case RouterPolicy.LEAST_LOADED:
            return LeastLoaded()
        case RouterPolicy.PREFIX_AWARE:
            return PrefixAware()


class RoundRobin:
    """One after the other."""

    def __init__(self) -> None:
        self._numbers = count()

    def choose(self, prompt: tuple[int, ...], replicas: Sequence[HasLoad]) -> int:
        return next(self._numbers) % len(replicas)


class LeastLoaded:
    """The one with the fewest open requests; among equals, in turn."""

    def __init__(self) -> None:
        self._numbers = count()

    def choose(self, prompt: tuple[int, ...], replicas: Sequence[HasLoad]) -> int:
        first, num = next(self._numbers), len(replicas)
        return min(range(num), key=lambda index: (replicas[index].num_open, (index - first) % num))


class PrefixAware:
    """The one that was sent the longest beginning of the prompt before, unless it has much more to
    do than the least loaded one, which is the choice for prompts that are new."""

    def __init__(self) -> None:
        self._least_loaded = LeastLoaded()
        self._replica_of: dict[int, int] = {}  # of the hash of a beginning, the last that got it

    def choose(self, prompt: tuple[int, ...], replicas: Sequence[HasLoad]) -> int:
        hashes, known = [], None
        chained = 0
        for start in range(0, len(prompt) - _PIECE + 1, _PIECE):
            chained = hash((chained, prompt[start : start + _PIECE]))
            hashes.append(chained)
            known = self._replica_of.get(chained, known)
        least = min(replica.num_open for replica in replicas)
        if known is None or replicas[known].num_open > least + _MAX_IMBALANCE:
            known = self._least_loaded.choose(prompt, replicas)
        if len(self._replica_of) + len(hashes) > _MAX_PIECES:
            self._replica_of.clear()
        self._replica_of.update(dict.fromkeys(hashes, known))
        return known
