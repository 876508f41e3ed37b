"""Replicas in Ray Serve, in real processes: what passes, where it goes, and what is never cut."""

import asyncio
import re
from collections import Counter

import httpx
import pytest

from tests.distributed.conftest import DRAIN_S, Deployed
from tests.distributed.load import Stream, converse, stream, streams_until

pytestmark = pytest.mark.timeout(900)
_BEFORE_S = 2.0  # of load before a change


async def test_a_stream_arrives_token_by_token(deployed: Deployed) -> None:
    async with httpx.AsyncClient(timeout=60) as client:
        answer = await stream(client, deployed.url, "Count.", 20)
    assert answer.is_whole and answer.status == 200
    assert answer.token_s[-1] - answer.token_s[0] > 0.5 * 19 * 0.02  # not all at the end


async def test_the_whole_api_answers_and_errors_are_penstocks_own(deployed: Deployed) -> None:
    async with httpx.AsyncClient(base_url=deployed.url, timeout=60) as client:
        assert (await client.get("/health")).json() == {"status": "ok"}
        assert (await client.get("/v1/models")).json()["data"][0]["id"] == "penstock-demo"
        wrong = await client.post("/v1/completions", json={"prompt": 1.5})
        assert wrong.status_code == 400 and wrong.json()["error"]["type"] == "invalid_request_error"
        assert (await client.get("/no/such/path")).status_code == 404


async def test_conversations_keep_their_replica_and_spread_over_both(deployed: Deployed) -> None:
    before = await answered(deployed)
    result = await converse([deployed.url], seed=1)
    after = await answered(deployed)
    num = [after[port] - before[port] for port in after]
    assert len(num) == 2 and sum(num) == 48
    assert max(num) <= 0.65 * 48
    # All but the newest message and the answer before it, in whole blocks.
    assert result.cached > 0.4 * result.prompt


async def test_no_stream_is_cut_when_a_replica_is_removed_or_all_are_replaced(
    deployed: Deployed,
) -> None:
    """Streams of 6 s, twelve at a time: both replicas have some when they are to end."""
    for change in ({"num-replicas": 1}, {"max-num-queued-reqs": 512}):
        streams = await streams_during(deployed, change)
        begun = [each for each in streams if each.status == 200]
        print(change, Counter(each.status for each in streams))  # refused ones are no streams
        assert len(begun) >= 12 and all(each.is_whole for each in begun)


async def streams_during(deployed: Deployed, change: dict[str, int]) -> list[Stream]:
    stop = asyncio.Event()
    load = asyncio.create_task(streams_until(stop, deployed.url, 12, 300))
    await asyncio.sleep(_BEFORE_S)
    process = deployed.redeploy(**change)
    try:
        code = await asyncio.to_thread(process.wait, 240)
        assert code == 0
        await asyncio.sleep(10)  # what was to end has now been asked to
    finally:
        process.kill()
        stop.set()
    return await asyncio.wait_for(load, DRAIN_S)


async def answered(deployed: Deployed) -> dict[str, int]:
    """Answers of each replica so far, by its port."""
    log = deployed.log.read_text(errors="replace")
    ports = dict.fromkeys(re.findall(r"Started HTTP server on port (\d+)", log))
    counts = {}
    async with httpx.AsyncClient(timeout=10) as client:
        for port in ports:
            try:
                text = (await client.get(f"http://127.0.0.1:{port}/metrics")).text
            except httpx.HTTPError:
                continue
            found = re.findall(r'^penstock_requests_total\{outcome="length"\} (\S+)', text, re.M)
            if found:  # else it is the router's
                counts[port] = int(float(found[0]))
    return counts
