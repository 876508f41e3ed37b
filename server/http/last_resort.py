"""The outermost handler of errors: what nothing else has caught still gets an answer of JSON.

Without it, uvicorn's own is plain text, which no client of these APIs can read.
"""

import asyncio
import contextlib
import logging

from starlette.types import ASGIApp, Receive, Scope, Send

from penstock.server.errors import reply_to

logger = logging.getLogger("penstock")


class LastResort:
    """Around the whole app. A response that has begun ends with its connection, as it must."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        try:
            await self._app(scope, receive, send)
        except (asyncio.CancelledError, KeyboardInterrupt, SystemExit):
            raise
        except BaseException as error:  # panics of libraries in Rust are no Exceptions
            logger.error("a request failed", exc_info=error)
            response = reply_to(RuntimeError()).response(scope["path"])
            # The server refuses it if a response has begun. To watch `send` would cost each token.
            with contextlib.suppress(RuntimeError):
                await response(scope, receive, send)
                return
            raise
