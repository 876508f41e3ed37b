"""Deploys the application again on the Ray of this machine: with fewer replicas, or other flags.

python -m tests.distributed.redeploy '{"num-replicas": 1, "scripted": true}'
"""

import json
import sys
import tempfile
from pathlib import Path
from typing import Any

from penstock.server.ray import environment


def redeploy(arguments: dict[str, Any]) -> None:
    environment.apply(environment.variables(float(arguments["shutdown-timeout"])))
    with tempfile.TemporaryDirectory() as unused:  # HAProxy runs already
        environment.apply(environment.variables_here(Path(unused), "haproxy"))
    import ray
    from ray import serve

    from penstock.server.ray.application import NAME, build

    ray.init(address="auto", log_to_driver=False)
    serve.run(build(arguments), name=NAME, route_prefix="/")


if __name__ == "__main__":
    redeploy(json.loads(sys.argv[1]))
