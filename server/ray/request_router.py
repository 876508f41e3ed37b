"""Which replica gets a request, as Ray Serve asks it: the policy is `scheduler.routing`'s."""

import time
from collections import defaultdict, deque
from collections.abc import Sequence
from typing import NamedTuple

from ray.serve.request_router import PendingRequest, ReplicaID, RequestRouter, RunningReplica

from penstock.scheduler.routing import PrefixAware
from penstock.server.ray.replica import AT_S, NUM_OPEN

# From a choice to its request's arrival in the replica, for a report that came meanwhile.
_ON_ITS_WAY_S = 0.2


class Prompt(NamedTuple):
    """See `penstock.scheduler.routing.prefix_digests`."""

    digests: list[bytes]


class Reservations:
    """What is open at each replica: its last report, and what was sent there since. A request
    counts from the moment it is sent, so that those of a burst do not follow each other."""

    def __init__(self) -> None:
        self._sent_at_s: defaultdict[ReplicaID, deque[float]] = defaultdict(deque)

    def num_open(self, replica: ReplicaID, reported: float, at_s: float) -> float:
        sent = self._sent_at_s[replica]
        while sent and sent[0] < at_s - _ON_ITS_WAY_S:
            sent.popleft()
        return reported + len(sent)

    def add(self, replica: ReplicaID, now_s: float) -> None:
        self._sent_at_s[replica].append(now_s)

    def keep(self, replicas: Sequence[ReplicaID]) -> None:
        for gone in self._sent_at_s.keys() - set(replicas):
            del self._sent_at_s[gone]


class PrefixRouter(RequestRouter):
    """Prefers the replica that holds the prompt's beginning; see `PrefixAware`."""

    def initialize_state(self) -> None:
        self._policy: PrefixAware[ReplicaID] = PrefixAware()
        self._reservations = Reservations()

    async def choose_replicas(
        self,
        candidate_replicas: list[RunningReplica],
        pending_request: PendingRequest | None = None,
    ) -> list[list[RunningReplica]]:
        if pending_request is None or not candidate_replicas:
            return [candidate_replicas]
        arguments = pending_request.args
        is_ours = bool(arguments) and isinstance(arguments[0], Prompt)
        by_id = {replica.replica_id: replica for replica in candidate_replicas}
        self._reservations.keep(list(by_id))
        num_open = {each: self._num_open(replica) for each, replica in by_id.items()}
        chosen = self._policy.choose(arguments[0].digests if is_ours else [], num_open)
        self._reservations.add(chosen, time.time())
        return [[by_id[chosen]]]

    def _num_open(self, replica: RunningReplica) -> float:
        stats = replica.routing_stats
        return self._reservations.num_open(
            replica.replica_id, stats.get(NUM_OPEN, 0.0), stats.get(AT_S, 0.0)
        )
