"""How Ray Serve is set, which it reads from the environment when it is imported. On Kubernetes the
containers have these variables: docker/k8s/ray/rayservice.yaml."""

import contextlib
import math
import os
import secrets
import shlex
from collections.abc import MutableMapping
from pathlib import Path

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
        # Each replica's uvicorn would take a client's X-Forwarded-For for HAProxy's.
        "FORWARDED_ALLOW_IPS": "",
        # Ray would report the use of the cluster to its makers.
        "RAY_USAGE_STATS_ENABLED": "0",
    }


# So Ray is on systems where it knows no clusters: all its processes listen on loopback alone.
_HAS_CLUSTERS = "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"
# In front of Ray's HAProxy, whose configuration has statistics and metrics on all interfaces.
_HAPROXY = """#!/bin/sh
for file; do case "$file" in */haproxy.cfg)
    sed -i -E 's/^( *bind )[*]?:/\\1127.0.0.1:/' "$file" ;;
esac; done
exec {haproxy} "$@"
"""


def variables_here(folder: Path, haproxy: str) -> dict[str, str]:
    """Those of a Ray that is started for this machine alone. folder: where its HAProxy has its
    files, private and empty; by default any user of the machine could have made it. haproxy: the
    program."""
    wrapper = folder / "haproxy"
    wrapper.write_text(_HAPROXY.format(haproxy=shlex.quote(haproxy)))
    wrapper.chmod(0o700)
    files = {
        "BINARY_PATH": wrapper,
        "CONFIG_FILE_LOC": folder / "haproxy.cfg",
        "SOCKET_PATH": folder / "admin.sock",
        "METRICS_SOCKET_PATH": folder / "metrics.sock",
        "SERVER_STATE_BASE": folder,
        "SERVER_STATE_FILE": folder / "server-state",
    }
    named = {f"RAY_SERVE_HAPROXY_{name}": str(path) for name, path in files.items()}
    # Whoever reaches a Ray runs code in it (CVE-2023-48022), also another user of this machine.
    return {_HAS_CLUSTERS: "0", "RAY_AUTH_MODE": "token"} | named


def apply(given: dict[str, str], environment: MutableMapping[str, str] = os.environ) -> None:
    """Sets those that are not set. Before Ray is imported."""
    for name, value in given.items():
        environment.setdefault(name, value)


def make_token(environment: MutableMapping[str, str] = os.environ) -> None:
    """Makes the token where Ray's own commands look for it, unless there is one. Ray would make it
    for all to read."""
    if environment["RAY_AUTH_MODE"] != "token" or {"RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"} & {
        *environment
    }:
        return
    try:
        path = Path.home() / ".ray" / "auth_token"
        path.parent.mkdir(mode=0o700, exist_ok=True)
        with contextlib.suppress(FileExistsError):
            path.touch(0o600, exist_ok=False)
            path.write_text(secrets.token_hex(32))
        path.chmod(0o600)
    except (OSError, RuntimeError):  # there is no home
        environment["RAY_AUTH_TOKEN"] = secrets.token_hex(32)


def close_to_others() -> None:
    """In a replica on such a Ray: its server for calls of other deployments, for which Ray knows no
    setting, listens on loopback too. Private, as is what chooses the replica."""
    if os.environ.get(_HAS_CLUSTERS) == "0":
        from ray.serve._private import replica

        bind = replica.add_port_to_grpc_server
        replica.add_port_to_grpc_server = lambda server, address: bind(
            server, address.replace("[::]", "127.0.0.1")
        )
