"""Clients that invent identities: what is shared among clients goes by what they cannot invent."""

import asyncio
import contextlib
import itertools
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from penstock.server.command_line.cli import main
from penstock.server.config import ServeConfig
from tests.support.serving import MODEL, RunningServer, wait_until

# Two clients of one machine: all of 127.0.0.0/8 is its own.
ONE, OTHER = "127.0.0.1", "127.0.0.2"
HEADERS: dict[str, str] = {
    "authorization": "Bearer invented-{}",
    "x-api-key": "invented-{}",
    "x-forwarded-for": "10.0.0.{}",
    "forwarded": "for=10.0.0.{};proto=https",
    "x-real-ip": "10.0.0.{}",
    "true-client-ip": "10.0.0.{}",
    "x-request-id": "invented-{}",
    "user-agent": "invented-{}",
    "cookie": "session={}",
}
FIELDS = ("user", "safety_identifier", "prompt_cache_key", "cache_salt")
_numbers = itertools.count(1)


def invented() -> dict[str, str]:
    """All headers that may say who asks, each of them new."""
    number = next(_numbers) % 250
    return {name: value.format(number) for name, value in HEADERS.items()}


def ask(
    server: RunningServer, address: str, headers: dict[str, str] | None = None, **fields: Any
) -> httpx.Response:
    body = {"model": MODEL, "prompt": "Once", "max_tokens": 2, "ignore_eos": True} | fields
    transport = httpx.HTTPTransport(local_address=address)
    with httpx.Client(transport=transport, timeout=60) as client:
        return client.post(f"{server.url}/v1/completions", json=body, headers=headers)


def num_open(server: RunningServer) -> float:
    return server.metric("running_sequences") + server.metric("waiting_sequences")


@contextlib.contextmanager
def recording_server(path: Path, *flags: str) -> Iterator[RunningServer]:
    """uvicorn's own variable says that everybody is believed."""
    server = RunningServer(
        *("--scripted", "--max-model-len", "60000", "--record-traffic", str(path)),
        *("--log-requests", "--scheduling-policy", "fair", "--max-num-seqs", "2"),
        *("--max-num-queued-reqs", "4", "--scripted-step-ms", "1", *flags),
        env={"FORWARDED_ALLOW_IPS": "*"},
    )
    try:
        server.wait_until_ready()
        yield server
    finally:
        server.stop()


class Recorded:
    """The clients among whom the server has shared, as its record tells them apart."""

    def __init__(self, server: RunningServer, path: Path) -> None:
        self.server = server
        self.path = path
        self._num_seen = 0

    def clients(self, num_requests: int) -> list[str]:
        """Of the requests since the last call, once all of them are recorded."""

        def lines() -> list[str]:
            return self.path.read_text().splitlines()[1:][self._num_seen :]

        wait_until(lambda: len(lines()) >= num_requests)
        found = [json.loads(line)["tenant"] for line in lines()]
        self._num_seen += len(found)
        return found


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Recorded]:
    path = tmp_path_factory.mktemp("traffic") / "traffic.jsonl"
    with recording_server(path) as server:
        yield Recorded(server, path)


def test_whatever_a_client_invents_it_is_one_client(recorded: Recorded) -> None:
    num_asked = 0
    for name, value in HEADERS.items():
        for number in range(3):
            headers = {name: value.format(number)}
            assert ask(recorded.server, ONE, headers).status_code == 200
            num_asked += 1
    for field in FIELDS:
        for number in range(3):
            fields: dict[str, Any] = {field: f"invented-{number}"}
            assert ask(recorded.server, ONE, **fields).status_code == 200
            num_asked += 1
    first = recorded.clients(num_asked)
    assert len(first) == num_asked and len(set(first)) == 1
    for headers in ({}, {"x-forwarded-for": ONE}):
        assert ask(recorded.server, OTHER, headers).status_code == 200
    second = recorded.clients(2)
    assert len(set(second)) == 1 and set(first) != set(second)


def test_the_record_of_traffic_has_no_text_no_key_and_is_its_users_alone(
    recorded: Recorded,
) -> None:
    prompt, key = "A sentence that nobody else is to read.", "sk-nobody-else"
    headers = {"authorization": f"Bearer {key}", "x-forwarded-for": "203.0.113.5"}
    assert ask(recorded.server, ONE, headers, prompt=prompt, user="someone").status_code == 200
    assert recorded.clients(1)
    text = recorded.path.read_text()
    assert not any(each in text for each in ("sentence", key, "203.0.113.5", "someone", ONE))
    assert recorded.path.stat().st_mode & 0o077 == 0


def test_no_line_of_the_log_has_an_address_that_a_client_invented(recorded: Recorded) -> None:
    headers = {"x-forwarded-for": "203.0.113.77", "forwarded": "for=203.0.113.77"}
    ask(recorded.server, ONE, headers | {"x-request-id": "seen"})
    wait_until(lambda: "[seen]" in recorded.server.log())
    assert "203.0.113" not in recorded.server.log()


async def test_a_flood_of_invented_clients_leaves_another_its_share_of_the_queue(
    recorded: Recorded,
) -> None:
    server = recorded.server
    await asyncio.to_thread(server.wait_until_idle)
    endless = {"model": MODEL, "prompt": "Once", "max_tokens": 50_000, "ignore_eos": True}
    transport = httpx.AsyncHTTPTransport(local_address=OTHER)
    async with httpx.AsyncClient(transport=transport, timeout=300) as client:
        flood = [
            asyncio.create_task(
                client.post(f"{server.url}/v1/completions", json=endless, headers=invented())
            )
            for _ in range(2 + 4)
        ]
        await asyncio.to_thread(wait_until, lambda: num_open(server) == len(flood))
        # Neither one more identity nor the address of another client makes a place.
        for headers in (invented(), {"x-forwarded-for": ONE}):
            refused = await asyncio.to_thread(ask, server, OTHER, headers)
            assert refused.status_code == 429
        assert (await asyncio.to_thread(ask, server, ONE)).status_code == 200
        assert not any(each.done() for each in flood)
        for each in flood:
            each.cancel()
        await asyncio.gather(*flood, return_exceptions=True)
    await asyncio.to_thread(server.wait_until_idle)


@pytest.fixture(scope="module")
def behind_proxy(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Recorded]:
    """On the machine of its proxy, which knows another one."""
    path = tmp_path_factory.mktemp("proxied") / "traffic.jsonl"
    with recording_server(path, "--forwarded-allow-ips", ONE, "10.9.0.0/16") as server:
        yield Recorded(server, path)


@pytest.mark.parametrize(
    ("forwarded", "num_clients"),
    [
        (["10.0.0.7", "10.0.0.8", ""], 3),
        # What stands before the last address that is no proxy's came with the request.
        (["1.1.1.1, 10.0.0.7", "2.2.2.2, 10.0.0.7, 10.9.1.1", "10.0.0.7"], 1),
        # One host of IPv6 has a whole network of addresses.
        (["2001:db8::1", "2001:db8::ffff:1", "[2001:db8:0:0:8000::]:80", "2001:db8::1%eth0"], 1),
        (["2001:db8::1", "2001:db8:0:1::1"], 2),
        (["::ffff:192.0.2.1", "::ffff:192.0.2.2"], 2),
    ],
)
def test_a_proxy_that_the_operator_names_says_who_its_client_is(
    behind_proxy: Recorded, forwarded: list[str], num_clients: int
) -> None:
    for value in forwarded:
        answer = ask(behind_proxy.server, ONE, {"x-forwarded-for": value})
        assert answer.status_code == 200
    assert len(set(behind_proxy.clients(len(forwarded)))) == num_clients


def test_who_is_not_the_proxy_cannot_speak_for_it(behind_proxy: Recorded) -> None:
    for value in ("10.0.0.7", "10.0.0.8", ONE):
        ask(behind_proxy.server, OTHER, {"x-forwarded-for": value})
    assert len(set(behind_proxy.clients(3))) == 1


def test_where_there_are_keys_they_are_the_clients_and_invented_ones_are_refused(
    tmp_path: Path,
) -> None:
    path = tmp_path / "traffic.jsonl"
    with recording_server(path, "--api-key", "one", "two") as server:
        recorded = Recorded(server, path)
        assert ask(server, ONE, invented()).status_code == 401
        for address in (ONE, OTHER):
            for key in ("one", "two"):
                headers = invented() | {"authorization": f"Bearer {key}"}
                assert ask(server, address, headers).status_code == 200
        clients = recorded.clients(4)
    assert clients[:2] == clients[2:] and len(set(clients)) == 2


@pytest.mark.parametrize("address", ["*", "proxy.example", "10.0.0.1/8", "10.0.0.0/33", ""])
def test_a_proxy_that_is_no_address_stops_the_start(
    address: str, served: list[ServeConfig], capsys: pytest.CaptureFixture[str]
) -> None:
    """With `*` the first address would count, which clients write."""
    assert main(["serve", "--forwarded-allow-ips", address]) == 2
    assert not served
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and "write it like 127.0.0.1 or 10.0.0.0/8" in error
