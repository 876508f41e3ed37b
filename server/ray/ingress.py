"""Answers HAProxy's question for each request: which replica is to have it?"""

import logging

from ray.serve.handle import DeploymentHandle
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp

from penstock.engine.client import configure_logs
from penstock.server.config import ServeConfig
from penstock.server.observability.progress import Progress
from penstock.server.observability.request_log import request_id
from penstock.server.prompt.model import find_model, read_prompt_files
from penstock.server.prompt.tokenizer import PromptEncoder
from penstock.server.ray.prompt_key import body_digests, conversation_digests
from penstock.server.ray.request_router import Prompt

logger = logging.getLogger("penstock")

# Ray's name for a conversation's id; RAY_SERVE_SESSION_ID_HEADER_KEY names another.
_CONVERSATION = "x-session-id"


class Ingress:
    """One process of each node. replicas: the deployment that it chooses from."""

    def __init__(self, config: ServeConfig, replicas: DeploymentHandle) -> None:
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
