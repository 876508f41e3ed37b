"""Which replica gets a request. A router knows what it sent, each replica's load, and the prompts.

The same classes choose in `penstock simulate` and in production (`penstock.server.ray`), so that a
policy is tried before it serves.
"""

from collections import OrderedDict
from collections.abc import Collection, Hashable, Mapping, Sequence
from enum import StrEnum
from itertools import count
from typing import Generic, Protocol, TypeVar

from penstock.scheduler.cache.prefix import block_digests, root_digest

# Prompts are compared in pieces of so many tokens.
_PIECE = 64
# So many digests for each replica: 31,250 blocks of 64 tokens are those of a large device's pool.
_MAX_PIECES = 31_250
# A replica that has the prefix is passed over if it has more than this multiple of the mean, plus
# the slack, of open requests, or, while it has more of them than another, of recent ones: then
# waiting costs more than computing the prefix again.
_MOST_OF_MEAN = 1.25
_OPEN_SLACK, _RECENT_SLACK = 8.0, 2.0
# A request that was sent to a replica counts for so much less with each further one, so that about
# the last fifty count.
_DECAY = 0.98

Name = TypeVar("Name", bound=Hashable)


class RouterPolicy(StrEnum):
    ROUND_ROBIN = "round-robin"
    LEAST_LOADED = "least-loaded"
    PREFIX_AWARE = "prefix-aware"


def prefix_digests(prompt: Sequence[int], salt: str = "") -> list[bytes]:
    """Returns that of each beginning of the prompt that is whole pieces, the shortest first. salt:
    replicas share nothing between different ones."""
    return block_digests(root_digest(salt, None), prompt, _PIECE)


class Router(Protocol[Name]):
    def choose(self, digests: Sequence[bytes], num_open: Mapping[Name, float]) -> Name:
        """The name of the replica that gets a request whose beginnings have these digests.

        num_open: of each replica, at least one, the requests that were sent there and have not
        ended.
        """


def make_router(policy: RouterPolicy) -> Router[int]:
    routers: dict[RouterPolicy, Router[int]] = {
        RouterPolicy.ROUND_ROBIN: RoundRobin(),
        RouterPolicy.LEAST_LOADED: LeastLoaded(),
        RouterPolicy.PREFIX_AWARE: PrefixAware(),
    }
    return routers[policy]


class RoundRobin(Generic[Name]):
    def __init__(self) -> None:
        self._numbers = count()

    def choose(self, digests: Sequence[bytes], num_open: Mapping[Name, float]) -> Name:
        return list(num_open)[next(self._numbers) % len(num_open)]


class LeastLoaded(Generic[Name]):
    """The one with the fewest open requests; among equals, in turn."""

    def __init__(self) -> None:
        self._numbers = count()

    def choose(self, digests: Sequence[bytes], num_open: Mapping[Name, float]) -> Name:
        names, first = list(num_open), next(self._numbers)
        turns = sorted(range(len(names)), key=lambda index: (index - first) % len(names))
        return min((names[index] for index in turns), key=lambda name: num_open[name])


class PrefixAware(Generic[Name]):
    """The one that was sent most of the prompt before, if that is at least half of it, unless it
    has much more than its share to do. Else the one with the fewest open requests, and among these
    the fewest recent ones.

    A short match decides nothing: prompts that begin alike, as all do with one system prompt,
    would follow each other to one replica. Nor does the emptiest index, which may be that of the
    slowest or newest replica (sglang#14305). A replica that is new counts as one that has had its
    share, so that it is not sent everything at once.
    """

    def __init__(self, max_pieces: int = _MAX_PIECES) -> None:
        """max_pieces: digests that are remembered of each replica, the latest."""
        self._max_pieces = max_pieces
        self._sent: dict[Name, OrderedDict[bytes, None]] = {}
        self._recent: dict[Name, float] = {}

    def choose(self, digests: Sequence[bytes], num_open: Mapping[Name, float]) -> Name:
        self._follow(num_open)
        matches = {name: self._match(name, digests) for name in num_open}
        longest = max(matches.values())
        holders = [name for name in num_open if matches[name] == longest]
        if not longest or 2 * longest < len(digests):
            holders = []
        least_open = min(num_open.values())
        most_open = _limit(num_open.values(), _OPEN_SLACK)
        most_recent = _limit(self._recent.values(), _RECENT_SLACK)
        fit = [
            name
            for name in holders
            if num_open[name] == least_open
            or (num_open[name] < most_open and self._recent[name] < most_recent)
        ]
        chosen = min(fit or num_open, key=lambda name: (num_open[name], self._recent[name]))
        self._note(chosen, digests)
        return chosen

    def _follow(self, names: Mapping[Name, float]) -> None:
        for name in self._recent.keys() - names.keys():
            del self._recent[name], self._sent[name]
        new = [name for name in names if name not in self._recent]
        mean = sum(self._recent.values()) / len(self._recent) if self._recent else 0.0
        self._recent |= dict.fromkeys(new, mean)
        self._sent |= {name: OrderedDict() for name in new}

    def _match(self, name: Name, digests: Sequence[bytes]) -> int:
        """Pieces of the prompt that it was sent before."""
        sent = self._sent[name]
        return next((i for i, digest in enumerate(digests) if digest not in sent), len(digests))

    def _note(self, name: Name, digests: Sequence[bytes]) -> None:
        for each in self._recent:
            self._recent[each] *= _DECAY
        self._recent[name] += 1
        sent = self._sent[name]
        for digest in reversed(digests):  # the longest beginning is forgotten first
            sent[digest] = None
            sent.move_to_end(digest)
        while len(sent) > self._max_pieces:
            sent.popitem(last=False)


def _limit(loads: Collection[float], slack: float) -> float:
    return _MOST_OF_MEAN * sum(loads) / len(loads) + slack
