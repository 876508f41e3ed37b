"""Which replica gets a request, as Ray Serve asks it: the policy is `scheduler.routing`'s."""

import logging
import time
from collections import defaultdict, deque
from collections.abc import Sequence
from typing import NamedTuple

from ray.serve.handle import DeploymentHandle
from ray.serve.request_router import PendingRequest, ReplicaID, RequestRouter, RunningReplica
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp

from penstock.engine.client import configure_logs
from penstock.scheduler.routing import PrefixAware
from penstock.server.config import ServeConfig
from penstock.server.observability.progress import Progress
from penstock.server.observability.request_log import request_id
from penstock.server.prompt.model import find_model, read_prompt_files
from penstock.server.prompt.tokenizer import PromptEncoder
from penstock.server.ray.environment import close_to_others
from penstock.server.ray.prompt_key import body_digests, conversation_digests
from penstock.server.ray.replica import AT_S, NUM_OPEN

# From a choice to its request's arrival in the replica, for a report that came meanwhile.
_ON_ITS_WAY_S = 0.2


class Prompt(NamedTuple):
    """See `penstock.scheduler.routing.prefix_digests`."""

    digests: list[bytes]


class Reservations:
    """The requests that are open at each replica: its last report, and those sent there since. A
    request counts from the moment it is sent, so that those of a burst do not follow each other."""

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


logger = logging.getLogger("penstock")

# Ray's name for a conversation's id; RAY_SERVE_SESSION_ID_HEADER_KEY names another.
_CONVERSATION = "x-session-id"


class Ingress:
    """One process of each node. replicas: the deployment that it chooses from."""

    def __init__(self, config: ServeConfig, replicas: DeploymentHandle) -> None:
        close_to_others()
        self._config = config
        self._replicas = replicas
        self._encoder: PromptEncoder | None = None

    def __serve_build_asgi_app__(self) -> ASGIApp:  # a name of Ray's
        config = self._config.server
        configure_logs(config.log_level, config.log_format, request_id.get)
        return Starlette(routes=[Route("/internal/route", self._route, methods=["POST"])])

    async def check_health(self) -> None:
        """Reads the tokenizer before the first request."""
        if self._encoder is None:
            progress = Progress(self._config.server.log_format)
            files = await find_model(self._config, progress)
            prompts = await read_prompt_files(self._config, files.directory, progress)
            self._encoder = prompts.encoder
            self._replicas._init()

    async def _route(self, request: Request) -> Response:
        assert self._encoder
        conversation = request.headers.get(_CONVERSATION)
        digests = (
            conversation_digests(conversation)
            if conversation
            else body_digests(await request.body(), self._encoder)
        )
        # Not reserved in the replica, which refuses by its own limits: see `Reservations`.
        async with self._replicas.choose_replica(Prompt(digests), _reserve=False) as selection:
            replica = selection._replica
            return JSONResponse({"replica_id": replica.replica_id.to_full_id_str()})
