"""One request that ends the engine, or whose logits are NaN, among others that must not notice."""

import asyncio
from dataclasses import dataclass
from typing import Any

import httpx

from tests.chaos.load import answer, asks
from tests.chaos.server import running
from tests.support.serving import MODEL
from tests.support.troubled_engine import CRASHES, HANGS, NAN, RAISES

_IDS = {"raises": RAISES, "hangs": HANGS, "dies": CRASHES, "nan": NAN}


@dataclass(frozen=True)
class Poisoned:
    """num_unharmed: others whose answers are as without it."""

    kind: str
    status: int
    code: str
    num_others: int
    num_unharmed: int
    num_quarantined: int

    @property
    def is_good(self) -> bool:
        return self.status == 500 and self.num_unharmed == self.num_others

    def __str__(self) -> str:
        what = "has NaN logits" if self.kind == "nan" else f"{self.kind} in its step"
        return (
            f"{what}: {self.status} {self.code}; {self.num_unharmed} of {self.num_others} others "
            "unharmed"
        )


async def poison_among_others(
    kind: str, num_others: int, module: str = "tests.support.troubled_engine", **settings: object
) -> Poisoned:
    """kind: a key of `_IDS`. module, settings: see `running`."""
    settings = {"stall_timeout_s": 3.0, **settings}
    async with running(module, **settings) as server:
        load = [ask for i in range(4) for ask in asks(i) if ask.is_seeded][:num_others]
        expected = await asyncio.gather(*(answer(server.client, ask) for ask in load))
        others = [asyncio.create_task(answer(server.client, ask)) for ask in load]
        await asyncio.sleep(0.1)  # they run
        reply = await _send(server.client, _IDS[kind])
        got = await asyncio.gather(*others)
        return Poisoned(
            kind,
            reply.status_code,
            reply.json().get("error", {}).get("code", ""),
            num_others=len(load),
            num_unharmed=sum(a == b for a, b in zip(got, expected, strict=True)),
            num_quarantined=server.engine.recovery.num_quarantined,
        )


async def _send(client: httpx.AsyncClient, token_id: int) -> httpx.Response:
    body: dict[str, Any] = {"model": MODEL, "prompt": [5, 6, token_id], "max_tokens": 8}
    return await client.post("/v1/completions", json=body)
