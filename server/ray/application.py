"""Replicas and the process that chooses among them, as an application of Ray Serve."""

from typing import Any

import ray
from ray import serve
from ray.serve import Application
from ray.serve.config import AutoscalingConfig, AutoscalingPolicy, RequestRouterConfig

from penstock.server.config import ServeConfig
from penstock.server.flags.serve_config import serve_config
from penstock.server.ray.cli import Scale, make_parser, scale_of
from penstock.server.ray.environment import DEREGISTRATION_S
from penstock.server.ray.replica import Replica, replicas_for_load
from penstock.server.ray.request_router import Ingress, PrefixRouter

NAME = "penstock"
# Ray must never refuse what Penstock would: also probes and scrapes take a place.
_SPARE_REQUESTS = 1024
_HEALTH_PERIOD_S = 5.0
_HEALTH_TIMEOUT_S = 15.0
_STATS_PERIOD_S = 0.5
# --log-requests is Penstock's own.
_NO_ACCESS_LOG = {"enable_access_log": False}


def build(arguments: dict[str, Any]) -> Application:
    """For `serve run penstock.server.ray.application:build model=... max-model-len=4096` and the
    args of a RayService: flags of `penstock ray` by name. Raises InvalidConfig."""
    flags = []
    for name, value in arguments.items():
        flag = f"--{name.replace('_', '-')}"
        if str(value).lower() == "true":
            flags.append(flag)
        elif isinstance(value, list):
            flags += [flag, *map(str, value)]
        else:
            flags += [flag, str(value)]
    options = make_parser().parse_args(flags)
    return make_application(serve_config(options), scale_of(options))


def make_application(config: ServeConfig, scale: Scale) -> Application:
    """Ray is initialized."""
    drain_s = config.server.shutdown_timeout_s
    scheduler, max_queued = config.engine.scheduler, config.engine.max_num_queued_reqs
    replica = serve.deployment(
        name=NAME,
        max_ongoing_requests=scheduler.max_num_seqs + max_queued + _SPARE_REQUESTS,
        graceful_shutdown_timeout_s=drain_s + 2 * DEREGISTRATION_S,
        health_check_period_s=_HEALTH_PERIOD_S,
        health_check_timeout_s=_HEALTH_TIMEOUT_S,
        ray_actor_options={"num_cpus": scale.num_cpus, "num_gpus": _num_gpus(scale)},
        request_router_config=RequestRouterConfig(
            request_router_class=PrefixRouter, request_routing_stats_period_s=_STATS_PERIOD_S
        ),
        logging_config=_NO_ACCESS_LOG,
        **_num_replicas(scale),
    )(serve.ingress()(Replica)).bind(config)
    ingress = serve.deployment(
        name=f"{NAME}-ingress",
        ray_actor_options={"num_cpus": 0},
        max_ongoing_requests=4096,
        logging_config=_NO_ACCESS_LOG,
    )(serve.ingress()(Ingress)).bind(config, replica)
    # Private, and what Ray's own LLM app uses. There is no other way to choose a replica by the
    # prompt without a process in each stream.
    return replica._with_ingress_request_router(ingress)


def _num_replicas(scale: Scale) -> dict[str, Any]:
    if scale.max_replicas == scale.num_replicas:
        return {"num_replicas": scale.num_replicas}
    return {
        "autoscaling_config": AutoscalingConfig(
            min_replicas=scale.num_replicas,
            max_replicas=scale.max_replicas,
            policy=AutoscalingPolicy(policy_function=replicas_for_load),
        )
    }


def _num_gpus(scale: Scale) -> float:
    if scale.num_gpus is not None:
        return scale.num_gpus
    return 1.0 if ray.cluster_resources().get("GPU") else 0.0
