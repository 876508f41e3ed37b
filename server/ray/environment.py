"""How Ray Serve is set, which it reads from the environment when it is imported. On Kubernetes the
containers have these variables: docker/k8s/ray/rayservice.yaml."""

import math
import os
from collections.abc import MutableMapping

# A replica is asked to end only when every proxy knows that it gets no more requests.
DEREGISTRATION_S = 5
# A longer body reaches the router cut off: it then goes to the least loaded replica.
_MAX_ROUTED_BYTES = 1 << 20


def variables(drain_s: float) -> dict[str, str]:
    """drain_s: how long an answer may take to end when its replica is no longer wanted."""
    return {
        # Ray's own proxy pickles each event of each stream, and sends it from actor to actor.
        "RAY_SERVE_ENABLE_HA_PROXY": "1",
        # The prompt decides on the replica.
        "RAY_SERVE_INGRESS_REQUEST_ROUTER_FORWARD_BODY": "1",
        "RAY_SERVE_HAPROXY_INGRESS_REQUEST_ROUTER_BUFSIZE": str(_MAX_ROUTED_BYTES),
        # The engine's client and its streams live on the loop that sends: another thread between
        # them would have a queue and a wake-up for each event.
        "RAY_SERVE_RUN_USER_CODE_IN_SEPARATE_THREAD": "0",
        "RAY_SERVE_RUN_ROUTER_IN_SEPARATE_LOOP": "0",
        "RAY_SERVE_DIRECT_INGRESS_MIN_DRAINING_PERIOD_S": str(DEREGISTRATION_S),
        # The first start is slow, when Python imports Ray on a machine that also loads the model.
        "RAY_SERVE_PROXY_READY_CHECK_TIMEOUT_S": "60",
        # Each change of the replicas starts a new HAProxy. The one before keeps its connections
        # for so long, by default 120 s, and then cuts them.
        "RAY_SERVE_HAPROXY_HARD_STOP_AFTER_S": str(math.ceil(drain_s) + 2 * DEREGISTRATION_S),
        # Ray runs what it starts at niceness 15, where every other process comes before a stream.
        "RAY_worker_niceness": "0",
        # Ray would report the use of the cluster to its makers.
        "RAY_USAGE_STATS_ENABLED": "0",
    }


def apply(drain_s: float, environment: MutableMapping[str, str] = os.environ) -> None:
    """Sets those that are not set. Before Ray is imported."""
    for name, value in variables(drain_s).items():
        environment.setdefault(name, value)
