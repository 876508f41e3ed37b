"""Targets over HTTP: headers, refusals with Retry-After, metrics, and the record of the traffic."""

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.support.serving import MODEL, RunningServer, running_server

TTFT, TPOT = "x-slo-ttft-ms", "x-slo-tpot-ms"


@pytest.fixture(scope="module")
def traffic(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("traffic") / "traffic.jsonl"


@pytest.fixture(scope="module")
def server(traffic: Path) -> Iterator[RunningServer]:
    """One that has served enough to know how long its steps take."""
    flags = ("--num-threads", "1", "--scheduling-policy", "fair", "--record-traffic", str(traffic))
    with running_server(*flags) as running:
        with ThreadPoolExecutor(4) as pool:
            for index in range(8):
                list(pool.map(lambda i: ask(running, seed=i, length=60), range(8)))
                ask(running, seed=100 + index, length=200)
        yield running


def ask(
    server: RunningServer,
    *,
    seed: int = 0,
    length: int = 20,
    max_tokens: int = 12,
    stream: bool = False,
    headers: Any = None,
) -> httpx.Response:
    body = {
        "model": MODEL,
        "prompt": [3 + (seed * 31 + i) % 400 for i in range(length)],
        "max_tokens": max_tokens,
        "ignore_eos": True,
        "stream": stream,
    }
    return httpx.post(f"{server.url}/v1/completions", json=body, headers=headers, timeout=60)


@pytest.mark.parametrize("stream", [False, True])
def test_a_target_that_cannot_be_met_is_a_429_with_the_time_that_is_missing(
    server: RunningServer, stream: bool
) -> None:
    before = server.metric('slo_attained_total{outcome="refused",slo="ttft"}')
    answer = ask(server, seed=7, length=300, stream=stream, headers={TTFT: "0.01"})
    assert answer.status_code == 429
    error = answer.json()["error"]
    assert error["code"] == "target_out_of_reach" and error["type"] == "rate_limit_error"
    assert "the target is 1e-05 s; try again in" in error["message"]
    assert 1 <= int(answer.headers["retry-after"]) < 60
    after = server.metric('slo_attained_total{outcome="refused",slo="ttft"}')
    assert after == before + 1


@pytest.mark.parametrize("stream", [False, True])
def test_a_target_that_can_be_met_is_counted_as_met(server: RunningServer, stream: bool) -> None:
    before = server.metric('slo_attained_total{outcome="met",slo="ttft"}')
    answer = ask(server, stream=stream, headers={TTFT: "60000", TPOT: "60000"})
    assert answer.status_code == 200
    server.wait_until_idle()
    assert server.metric('slo_attained_total{outcome="met",slo="ttft"}') == before + 1
    assert server.metric('slo_attained_total{outcome="met",slo="tpot"}') >= 1
    assert server.metric("predicted_time_to_first_token_seconds_count") >= 1
    assert server.metric("ttft_prediction_error_seconds_count") >= 1


def test_an_answer_slower_than_its_target_is_counted_as_missed(server: RunningServer) -> None:
    assert ask(server, max_tokens=400, headers={TPOT: "0.001"}).status_code == 200
    server.wait_until_idle()
    assert server.metric('slo_attained_total{outcome="missed",slo="tpot"}') >= 1


_NO_TIMES = ["", "soon", "0", "-5", "nan", "inf", "1_000", "1,5", "5 5", "0x10", "1e999", "9" * 400]


@pytest.mark.parametrize("value", [*_NO_TIMES, "\xa05", "\u0663\u0660", "\uff15"])
@pytest.mark.parametrize("name", [TTFT, TPOT])
def test_a_header_that_is_no_time_is_a_400_that_says_what_is_one(
    server: RunningServer, name: str, value: str
) -> None:
    """With the bytes of Latin-1, which headers are read as, where there are such."""
    fits = max(map(ord, value), default=0) < 256
    answer = ask(server, headers={name: value.encode("latin-1" if fits else "utf-8")})
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert error["type"] == "invalid_request_error" and error["param"] == name
    assert "it must be milliseconds, more than 0, such as 250 or 0.5" in error["message"]


def test_a_time_may_have_a_fraction_or_an_exponent(server: RunningServer) -> None:
    for value in ("60000", "6e4", "60000.5"):
        assert ask(server, headers={TTFT: value, TPOT: value}).status_code == 200


def test_steps_are_predicted(server: RunningServer) -> None:
    assert server.metric('predicted_steps_total{class="decode"}') > 50
    predicted = server.metric('step_predicted_seconds_total{class="decode"}')
    measured = server.metric('step_measured_seconds_total{class="decode"}')
    assert predicted > 0 and measured > 0
    assert server.metric('step_prediction_error_ratio{class="decode"}') >= 0
    assert server.metric("fairness_jain_index") == 1.0


def test_what_was_served_is_recorded_without_text(server: RunningServer, traffic: Path) -> None:
    server.wait_until_idle()
    header, *lines = map(json.loads, traffic.read_text().splitlines())
    assert header["settings"]["scheduler"]["policy"] == "fair"
    assert len(lines) >= 72
    assert {12, 400} == {line["output_length"] for line in lines}
    assert {60, 200} <= {line["input_length"] for line in lines}
    assert set(lines[0]) == {
        *("timestamp", "input_length", "output_length", "tenant", "priority", "hash_ids")
    }


def test_a_calibration_of_another_model_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "calibration.json"
    path.write_text("{}")
    server = RunningServer("--calibration", str(path), "--num-threads", "1")
    code, log = server.exit_code(240)
    assert code == 2 and "is not a file of penstock calibrate" in log
