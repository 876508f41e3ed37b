"""Loads on replicas: streams, and conversations whose every turn begins with the one before."""

import asyncio
import json
import time
from dataclasses import dataclass, field
from itertools import cycle
from random import Random
from typing import Any

import httpx

_TIMEOUT = httpx.Timeout(180.0)


@dataclass(frozen=True, slots=True)
class Stream:
    """One answer. token_s: seconds from the request to each event."""

    status: int
    token_s: list[float]
    is_whole: bool
    error: str = ""


async def stream(client: httpx.AsyncClient, url: str, text: str, num_tokens: int) -> Stream:
    """Whole means that the server ended it, after all of its tokens."""
    body: dict[str, Any] = {
        "prompt": text,
        "max_tokens": num_tokens,
        "stream": True,
        "ignore_eos": True,
    }
    body |= {"stream_options": {"include_usage": True}}
    begin_s, num_told, is_whole = time.perf_counter(), 0, False
    token_s: list[float] = []
    try:
        async with client.stream("POST", f"{url}/v1/completions", json=body) as response:
            async for line in response.aiter_lines():
                if line == "data: [DONE]":
                    is_whole = num_told == num_tokens
                elif '"choices":[]' in line:
                    num_told = json.loads(line[6:])["usage"]["completion_tokens"]
                elif line.startswith("data: "):
                    token_s.append(time.perf_counter() - begin_s)
    except httpx.HTTPError as error:
        return Stream(0, token_s, False, repr(error))
    return Stream(response.status_code, token_s, is_whole)


async def streams_until(stop: asyncio.Event, url: str, num: int, num_tokens: int) -> list[Stream]:
    """num streams at a time, one after the other, until none is to begin any more."""
    ended: list[Stream] = []

    async def one(name: int) -> None:
        turn = 0
        while not stop.is_set():
            turn += 1
            ended.append(await stream(client, url, f"{name}, {turn}: count to ten.", num_tokens))

    async with httpx.AsyncClient(timeout=_TIMEOUT) as client:
        await asyncio.gather(*(one(name) for name in range(num)))
    return ended


@dataclass(slots=True)
class Conversations:
    """cached, prompt: tokens of all turns. homes: of each request, the replica that answered."""

    cached: int = 0
    prompt: int = 0
    homes: list[str] = field(default_factory=list)


async def converse(
    urls: list[str], *, num: int = 8, turns: int = 6, seed: int = 0, concurrency: int = 4
) -> Conversations:
    """The turns of num conversations in a random order; urls: used one after the other."""
    random, result = Random(seed), Conversations()
    order = [chat for chat in range(num) for _ in range(turns)]
    random.shuffle(order)
    system = {"role": "system", "content": f"You are assistant {seed}. " + "Be brief. " * 4}
    chats = {chat: [system] for chat in range(num)}
    locks = {chat: asyncio.Lock() for chat in range(num)}
    at_once, next_url = asyncio.Semaphore(concurrency), cycle(urls)

    async def turn(chat: int) -> None:
        async with at_once, locks[chat]:
            words = " ".join(str(random.randrange(1000)) for _ in range(12))
            chats[chat].append({"role": "user", "content": f"{chat}: {words}"})
            body = {"messages": chats[chat], "max_tokens": 16, "ignore_eos": True}
            reply = await client.post(f"{next(next_url)}/v1/chat/completions", json=body)
            assert reply.status_code == 200, reply.text
            data: dict[str, Any] = reply.json()
            answer = data["choices"][0]["message"]["content"].replace("\0", "")
            chats[chat].append({"role": "assistant", "content": answer})
            usage = data["usage"]
            result.prompt += usage["prompt_tokens"]
            result.cached += (usage["prompt_tokens_details"] or {}).get("cached_tokens", 0)

    async with httpx.AsyncClient(timeout=_TIMEOUT) as client:
        await asyncio.gather(*(turn(chat) for chat in order))
    return result
