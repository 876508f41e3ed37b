"""The flags of `penstock ray`: those of `penstock serve`, and of its replicas."""

import argparse
from dataclasses import dataclass

from penstock.engine.client import Device
from penstock.scheduler.errors import InvalidConfig
from penstock.server.flags.flag import Flag, add_flags, config_of
from penstock.server.flags.flag_parser import FlagParser
from penstock.server.flags.serve_flags import add_serve_flags

# A scale-down is in no hurry, unlike the end of a single server.
_DRAIN_S = 3600.0


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


_FLAGS = (
    Flag(
        "--num-replicas N",
        "replicas, each with an engine of its own; the fewest with --max-replicas",
        default=1,
    ),
    Flag(
        "--max-replicas N",
        "replicas are added and removed with the load, up to this many (default: as "
        "--num-replicas)",
    ),
    Flag(
        "--num-cpus N",
        "what Ray reserves for a replica, and the threads of its engine on a CPU unless "
        "--num-threads is given (default: %(default)g)",
        default=1.0,
    ),
    Flag(
        "--num-gpus N",
        "what Ray reserves for a replica (default: 1 if the cluster has any and --device is "
        "not cpu)",
    ),
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
