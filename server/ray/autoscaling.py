"""How many replicas a load takes. Ray's own policy counts requests, whatever their length."""

import math
from collections.abc import Mapping
from typing import Any, Protocol

LOAD = "load"
# A share of a replica's capacity, beyond which answers wait for one another.
_TARGET = 0.75


class Context(Protocol):
    """The part of Ray's AutoscalingContext that is read."""

    target_num_replicas: int
    policy_state: dict[str, Any]

    @property
    def aggregated_metrics(self) -> Mapping[str, Mapping[Any, float]] | None: ...


def load(num_running: int, num_waiting: int, max_num_seqs: int, kv_usage: float) -> float:
    """Returns the load of one replica, as a share of its capacity: of sequences or of the KV cache,
    whichever is scarcer. Above 1 where requests wait. kv_usage: the share of the cache that
    sequences hold."""
    waiting = num_waiting / max_num_seqs
    return max((num_running + num_waiting) / max_num_seqs, kv_usage + waiting)


def replicas_for_load(context: Context) -> tuple[int, dict[str, Any]]:
    """As many as hold the whole load at three quarters of their capacity.

    Ray averages the loads over look_back_period_s, and damps what this says by its delays.
    """
    loads = (context.aggregated_metrics or {}).get(LOAD)
    if not loads:
        return context.target_num_replicas, context.policy_state
    # Rounded first: 1.5 / 0.75 must not become three replicas.
    return max(1, math.ceil(round(sum(loads.values()) / _TARGET, 6))), context.policy_state
