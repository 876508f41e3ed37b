"""Clients that leave, all of them at other moments."""

import asyncio
import random

from tests.chaos.load import asks
from tests.chaos.server import Running

_AT_ONCE = 64


async def leave_early(running: Running, num_clients: int, seed: int) -> int:
    """Each client leaves up to a third of a second after it asked. Returns the blocks in use one
    second after the last of them."""
    rng = random.Random(seed)
    places = asyncio.Semaphore(_AT_ONCE)
    load = asks(0, max_tokens=400)

    async def come_and_go() -> None:
        ask, delay_s = rng.choice(load), rng.random() / 3
        async with places:
            asking = asyncio.create_task(running.client.post(ask.path, json=ask.body))
            await asyncio.sleep(delay_s)
            asking.cancel()
            await asyncio.gather(asking, return_exceptions=True)

    await asyncio.gather(*(come_and_go() for _ in range(num_clients)))
    return await running.blocks_in_use()
