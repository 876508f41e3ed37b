"""The data of the picture: Prometheus's results for a demo server under minutes of mixed load.

The results of all queries go into one JSON file in Prometheus's format; the page that draws the
dashboard converts them to Grafana's data frames.
"""

import contextlib
import json
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx

from tests.support.paths import ROOT
from tests.support.prometheus import Prometheus, running_prometheus
from tests.support.serving import MODEL, RunningServer

DASHBOARD = ROOT / "configs" / "grafana" / "penstock.json"
_STEP_S = 2
_EDGE_S = 7
# Grafana's value for a scrape interval of 2.5 seconds: four times that.
_RATE_INTERVAL = "10s"
# Few sequences and KV blocks, so that there is a queue and preemptions.
_FLAGS = (
    "--max-model-len=512",
    "--max-num-seqs=16",
    "--max-num-batched-tokens=256",
    "--kv-cache-memory-bytes=8388608",
    "--scheduling-policy=fair",  # whose index has a panel
)
# In sequence: (share of the time, mean requests per second, flags). Short chats; long prompts in
# bursts; shared prefixes at a rising rate.
_PHASES: tuple[tuple[float, float, tuple[str, ...]], ...] = (
    (
        0.3,
        10,
        (
            "--request-rate=10",
            "--random-input-len=48",
            "--random-output-len=48",
            "--random-range-ratio=0.7",
        ),
    ),
    (
        0.35,
        3.5,
        (
            "--request-rate=3.5",
            "--random-input-len=200",
            "--random-output-len=120",
            "--random-range-ratio=0.8",
            "--burstiness=0.25",
        ),
    ),
    (
        0.35,
        10,
        (
            "--dataset-name=shared-prefix",
            "--shared-prefix-len=128",
            "--num-prefixes=4",
            "--random-input-len=40",
            "--random-output-len=80",
            "--random-range-ratio=0.6",
            "--ramp-up-strategy=linear",
            "--ramp-up-start-rps=4",
            "--ramp-up-end-rps=14",
        ),
    ),
)


def record(home: Path, load_s: float) -> dict[str, Any]:
    """Runs the load. Returns {from, to, results: {panel's id: {query's refId: result}}}."""
    with (
        _demo_server() as server,
        running_prometheus(f"127.0.0.1:{server.port}", home) as prometheus,
    ):
        start_s = time.time()
        with _disconnecting_client(server.url):
            _load(server.url, load_s)
        # Without the first and last seconds, in which the rates rise from 0 and fall to 0.
        return _query_all(prometheus, start_s + _EDGE_S, time.time() - _EDGE_S)


@contextlib.contextmanager
def _demo_server() -> Iterator[RunningServer]:
    server = RunningServer(*_FLAGS)
    try:
        server.wait_until_ready()
        yield server
    finally:
        server.stop()


def _load(url: str, load_s: float) -> None:
    for seed, (share, rate, flags) in enumerate(_PHASES):
        requests = max(1, round(load_s * share * rate))
        command = [sys.executable, "-m", "penstock.loadtest", f"--base-url={url}", f"--seed={seed}"]
        command += [f"--num-prompts={requests}", "--ignore-eos"]
        run = subprocess.run([*command, *flags], cwd=ROOT, capture_output=True, text=True)
        assert run.returncode == 0, run.stderr


@contextlib.contextmanager
def _disconnecting_client(url: str) -> Iterator[None]:
    """Sends a request about every two seconds and disconnects after a few tokens."""
    is_over = threading.Event()
    body = {"model": MODEL, "prompt": "Once", "max_tokens": 200, "stream": True, "ignore_eos": True}

    def run() -> None:
        with httpx.Client(base_url=url, timeout=60) as client:
            while not is_over.wait(timeout=2):
                with client.stream("POST", "/v1/completions", json=body) as response:
                    next(response.iter_bytes())

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield
    finally:
        is_over.set()
        thread.join()


def _query_all(prometheus: Prometheus, start_s: float, end_s: float) -> dict[str, Any]:
    results = {
        panel["id"]: {
            target["refId"]: _query(prometheus, target, start_s, end_s)
            for target in panel.get("targets", [])
        }
        for panel in json.loads(DASHBOARD.read_text())["panels"]
    }
    return {"from": start_s * 1000, "to": end_s * 1000, "results": results}


def _query(prometheus: Prometheus, target: dict[str, Any], start_s: float, end_s: float) -> Any:
    expr = target["expr"]
    variables = {
        "$__rate_interval": _RATE_INTERVAL,
        "$__range": f"{end_s - start_s:.0f}s",
        "$job": "penstock",
        "$instance": ".*",
        "$ttft_slo": "2.0",
        "$tpot_slo": "0.05",
    }
    for name, value in variables.items():
        expr = expr.replace(name, value)
    assert "$" not in expr, f"a variable without a value in {expr}"
    path, when = ("query", {"time": end_s})
    if target["range"]:
        path, when = "query_range", {"start": start_s, "end": end_s, "step": _STEP_S}
    response = httpx.get(
        f"{prometheus.url}/api/v1/{path}", params={"query": expr} | when, timeout=60
    )
    assert response.json()["status"] == "success", response.text
    return response.json()["data"]["result"]
