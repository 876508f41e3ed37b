"""Deploys the application again on the Ray of this machine: with fewer replicas, or other flags.

python -m tests.distributed.redeploy '{"num-replicas": 1, "scripted": true}'
"""

import json
import sys
from typing import Any

from penstock.server.ray import environment


def redeploy(arguments: dict[str, Any]) -> None:
    environment.apply(float(arguments["shutdown-timeout"]))
    import ray
    from ray import serve

    from penstock.server.ray.application import NAME, build

    ray.init(address="auto", log_to_driver=False)
    serve.run(build(arguments), name=NAME, route_prefix="/")


if __name__ == "__main__":
    redeploy(json.loads(sys.argv[1]))
