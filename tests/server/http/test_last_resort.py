"""Whatever fails, the client gets JSON, or the end of its connection."""

import asyncio
import json
from typing import Any

import httpx
import pytest
from starlette.types import Receive, Scope, Send

from penstock.server.http.middleware import LastResort


class Panic(BaseException):
    """As those of libraries in Rust, which no `except Exception` catches."""


async def fail(scope: Scope, receive: Receive, send: Send) -> None:
    raise Panic("all is lost")


@pytest.mark.parametrize(("path", "kind"), [("/v1/models", None), ("/v1/messages", "error")])
async def test_a_panic_is_a_500_in_the_shape_of_its_api(path: str, kind: str | None) -> None:
    transport = httpx.ASGITransport(LastResort(fail))
    async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
        answer = await client.get(path)
    assert answer.status_code == 500 and "internal error" in answer.json()["error"]["message"]
    assert answer.json().get("type") == kind
    assert "all is lost" not in answer.text


async def run(app: Any, sent: list[Any]) -> None:
    """As uvicorn sends: a response begins once."""

    async def send(message: Any) -> None:
        if sent and message["type"] == "http.response.start":
            raise RuntimeError("the response has begun")
        sent.append(message)

    scope = {"type": "http", "path": "/", "method": "GET", "headers": []}
    await app(scope, None, send)


async def test_a_response_that_has_begun_gets_no_second_one() -> None:
    async def begin_and_fail(scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        raise Panic

    sent: list[Any] = []
    with pytest.raises(Panic):
        await run(LastResort(begin_and_fail), sent)
    assert [message["type"] for message in sent] == ["http.response.start"]


async def test_a_cancelled_request_is_no_error() -> None:
    async def be_cancelled(scope: Scope, receive: Receive, send: Send) -> None:
        raise asyncio.CancelledError

    sent: list[Any] = []
    with pytest.raises(asyncio.CancelledError):
        await run(LastResort(be_cancelled), sent)
    assert not sent


async def test_without_a_failure_nothing_is_added() -> None:
    async def answer(scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": json.dumps({}).encode()})

    sent: list[Any] = []
    await run(LastResort(answer), sent)
    assert len(sent) == 2
