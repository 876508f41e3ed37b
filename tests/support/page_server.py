"""The real page at `/`, with a stub that answers what a test needs and no small model says."""

import asyncio
import contextlib
import json
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from typing import Any

import uvicorn
from fastapi import FastAPI, Request
from starlette.responses import JSONResponse, PlainTextResponse, Response, StreamingResponse

from penstock.server.api import page
from tests.support.serving import free_port

Delta = dict[str, Any]


class PageServer:
    """answer(body) gives the deltas of the answer to a request; pause_s is between them."""

    def __init__(self) -> None:
        self.url = f"http://127.0.0.1:{(port := free_port())}"
        self.requests: list[dict[str, Any]] = []
        self.answer: Callable[[dict[str, Any]], Sequence[Delta]] = lambda body: said("Hello.")
        self.finish_reason = "stop"
        self.pause_s = 0.0
        self.models = ["stub-model"]
        config = uvicorn.Config(self._app(), port=port, log_level="error", lifespan="off")
        self._server = uvicorn.Server(config)
        self._thread = threading.Thread(target=self._server.run, daemon=True)
        self._thread.start()
        while not self._server.started:
            time.sleep(0.01)

    def says(
        self,
        text: str,
        *,
        field: str = "content",
        finish_reason: str = "stop",
        pause_s: float = 0.0,
    ) -> None:
        """Every answer from now on."""
        self.answer = lambda body: said(text, field=field)
        self.finish_reason, self.pause_s = finish_reason, pause_s

    def stop(self) -> None:
        self._server.should_exit = True
        self._server.force_exit = True
        self._thread.join(timeout=10)

    def _app(self) -> FastAPI:
        app = FastAPI(openapi_url=None)
        app.include_router(page.router)
        app.add_api_route("/v1/models", self._list_models)
        app.add_api_route("/metrics", self._metrics)
        app.add_api_route("/v1/chat/completions", self._chat, methods=["POST"])
        return app

    async def _list_models(self) -> Response:
        return JSONResponse({"data": [{"id": name, "max_model_len": 4096} for name in self.models]})

    async def _metrics(self) -> Response:
        return PlainTextResponse("")

    async def _chat(self, request: Request) -> Response:
        body = await request.json()
        self.requests.append(body)
        return StreamingResponse(self._events(body), media_type="text/event-stream")

    async def _events(self, body: dict[str, Any]) -> AsyncIterator[bytes]:
        deltas = self.answer(body)
        for delta in deltas:
            yield _event({"choices": [{"index": 0, "finish_reason": None, **delta}]})
            if self.pause_s:
                await asyncio.sleep(self.pause_s)
        yield _event({"choices": [{"index": 0, "delta": {}, "finish_reason": self.finish_reason}]})
        usage = {"prompt_tokens": 3, "completion_tokens": len(deltas)}
        yield _event({"choices": [], "usage": usage}) + b"data: [DONE]\n\n"


def said(text: str, *, field: str = "content") -> list[Delta]:
    """A text in parts of four characters, as tokens have."""
    return [{"delta": {field: text[i : i + 4]}} for i in range(0, len(text), 4)]


def echoed(body: dict[str, Any]) -> list[dict[str, Any]]:
    """Answers with the last message."""
    return said(f"**You said** {body['messages'][-1]['content']}")


def _event(payload: dict[str, Any]) -> bytes:
    return b"data: " + json.dumps(payload).encode() + b"\n\n"


@contextlib.contextmanager
def running_page_server() -> Iterator[PageServer]:
    server = PageServer()
    try:
        yield server
    finally:
        server.stop()
