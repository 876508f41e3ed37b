"""`penstock ray`: serves on Ray, on this machine or on a cluster, until a signal."""

import importlib.util
import os
import signal
import sys
import threading
from types import FrameType

from penstock.engine.client import say
from penstock.scheduler.errors import InvalidConfig
from penstock.server.config import ServeConfig
from penstock.server.flags.flag_parser import set_defaults
from penstock.server.flags.serve_config import config_file, serve_config
from penstock.server.ray import environment
from penstock.server.ray.flags import Scale, make_parser, scale_of

# Requests and answers do not pass through Ray's memory; this is the least that it takes.
_OBJECT_STORE_BYTES = 80_000_000


def main(argv: list[str]) -> int:
    """Returns the exit code. Raises InvalidConfig."""
    parser = make_parser()
    set_defaults(parser, os.environ, config_file(argv))
    options = parser.parse_args(argv)
    config, scale = serve_config(options), scale_of(options)
    if importlib.util.find_spec("ray") is None:
        raise InvalidConfig("Ray is not installed; install it with: pip install 'penstock[ray]'")
    environment.apply(config.server.shutdown_timeout_s)
    _serve(config, scale)
    return 0


def _serve(config: ServeConfig, scale: Scale) -> None:
    import ray
    from ray import serve

    from penstock.server.ray.application import NAME, make_application

    is_ours = "RAY_ADDRESS" not in os.environ

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
