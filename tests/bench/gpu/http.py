"""`python -m tests.bench.gpu.http http|ready MODEL`: the HTTP server with random weights.

Under load, or from its start to its first response.
"""

import argparse
import contextlib
import json
import shutil
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from penstock.loadtest.bench.http_target import HttpTarget, TargetConfig
from penstock.loadtest.bench.readiness import warm_up
from penstock.loadtest.bench.replay import raise_open_file_limit, replay, run
from penstock.loadtest.report.report import ReportConfig, summarize
from penstock.loadtest.workload.config import FIRST_TOKEN_ID, WorkloadConfig
from penstock.loadtest.workload.workload import make_requests
from penstock.scheduler.errors import PenstockError

_POLL_S = 0.02
_TAIL_CHARS = 2000
# For the server's copy of the weights beside the page cache's.
_SPARE_DISK = 2 * 2**30


class PartFailed(PenstockError):
    """A part could not be measured; the message says why."""


def measure_http(
    model: str, tiny: bool, limit_s: float, more_flags: list[str]
) -> Iterator[dict[str, Any]]:
    """Two rows: `start` of dummy weights, and `http` under 256 streams of 128 and 1,024 tokens."""
    num_streams, prompt, output = (4, 8, 6) if tiny else (256, 128, 1024)
    ends_s = time.monotonic() + limit_s
    flags = ["--load-format", "dummy", "--max-num-seqs", str(num_streams)]
    flags += ["--max-model-len", str(prompt + output + 16), "--no-enable-prefix-caching"]
    with tempfile.TemporaryDirectory() as folder:
        vocab_size = _write_model(Path(folder), model, tiny, ends_s - time.monotonic())
        with Server(Path(folder), [*flags, *_device_flags(tiny), *more_flags]) as server:
            yield {"part": "start", "model": model, **server.until_ready(ends_s)}
            workload = WorkloadConfig(
                num_prompts=num_streams, input_len=prompt, output_len=output, vocab_size=vocab_size
            )
            row = run(_load(server, workload, ends_s))
            yield {"part": "http", "model": model, **row}


def measure_ready(model: str, tiny: bool, limit_s: float, more_flags: list[str]) -> dict[str, Any]:
    """From the start of the process to its first response, with weights in the page cache."""
    ends_s = time.monotonic() + limit_s
    flags = ["--max-model-len", "256" if tiny else "8192", *_device_flags(tiny), *more_flags]
    with tempfile.TemporaryDirectory() as folder:
        _write_model(Path(folder), model, tiny, limit_s, with_weights=True)
        num_bytes = sum(file.stat().st_size for file in Path(folder).glob("*.safetensors"))
        with Server(Path(folder), flags) as server:
            ready = server.until_ready(ends_s)
    return {"part": "ready", "model": model, "weight_bytes": num_bytes, **ready}


async def _load(server: "Server", workload: WorkloadConfig, ends_s: float) -> dict[str, Any]:
    limit_s = max(1.0, ends_s - time.monotonic())
    config = TargetConfig(
        base_url=server.base_url, model=server.model, ignore_eos=True, request_timeout_s=limit_s
    )
    raise_open_file_limit()
    async with HttpTarget(config) as target:
        await warm_up(target, workload, min(8, workload.num_prompts), None)
        before = server.metric("penstock_engine_busy_seconds_total")
        observed = await replay(target, make_requests(workload))
        busy_s = server.metric("penstock_engine_busy_seconds_total") - before
    if observed.failed:
        raise PartFailed(
            f"{len(observed.failed)} of {workload.num_prompts} requests failed, the first with: "
            f"{observed.failed[0].error}"
        )
    summary = summarize(observed, ReportConfig(percentiles=(50.0, 99.0)))
    return {
        "streams": workload.num_prompts,
        "tokens_per_s": summary["output_throughput"],
        "engine_idle_ratio": max(0.0, 1 - busy_s / observed.duration_s),
        "report": summary,
    }


class Server:
    """`penstock serve` of a folder, in another process: `with Server(folder, flags)`."""

    def __init__(self, folder: Path, flags: list[str]) -> None:
        with socket.create_server(("127.0.0.1", 0)) as listener:
            port = listener.getsockname()[1]
        self.base_url = f"http://127.0.0.1:{port}"
        self.model = "random"
        command = [sys.executable, "-m", "penstock", "serve", str(folder), "--port", str(port)]
        self._command = [*command, "--served-model-name", self.model, *flags]
        self._stack = contextlib.ExitStack()

    def __enter__(self) -> "Server":
        self._log = self._stack.enter_context(tempfile.TemporaryFile())
        self._started_s = time.monotonic()
        self._process = subprocess.Popen(self._command, stdout=self._log, stderr=self._log)
        return self

    def __exit__(self, *error: object) -> None:
        self._process.terminate()
        try:
            self._process.wait(timeout=20)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._stack.close()

    def until_ready(self, ends_s: float) -> dict[str, Any]:
        """Seconds from the start to the open port, to readiness, and to a first response."""
        port_s: float | None = None
        while True:
            status, _ = self._ask("/ready")
            if port_s is None and status:
                port_s = time.monotonic() - self._started_s
            if status == 200:
                break
            if self._process.poll() is not None or time.monotonic() > ends_s:
                state = "ended" if self._process.poll() is not None else "was not ready in time"
                raise PartFailed(f"the server {state}; its log: {self._tail()}")
            time.sleep(_POLL_S)
        body = {"model": self.model, "prompt": [FIRST_TOKEN_ID] * 4, "max_tokens": 1}
        status, answer = self._ask("/v1/completions", json.dumps(body).encode())
        if status != 200:
            raise PartFailed(f"the first response was {status}: {answer[:_TAIL_CHARS]}")
        ready_s = time.monotonic() - self._started_s
        return {"port_s": port_s, "ready_s": ready_s, "phases": self._phases()}

    def metric(self, name: str) -> float:
        """A sample without labels."""
        for line in self._ask("/metrics")[1].splitlines():
            if line.startswith(f"{name} "):
                return float(line.split()[1])
        raise PartFailed(f"/metrics has no {name}")

    def _phases(self) -> dict[str, float]:
        lines = self._ask("/metrics")[1].splitlines()
        found = [line for line in lines if line.startswith("penstock_startup_seconds{")]
        return {line.split('"')[1]: float(line.split()[-1]) for line in found}

    def _ask(self, path: str, body: bytes | None = None) -> tuple[int, str]:
        """Status and body; status 0 without a response."""
        headers = {"Content-Type": "application/json"}
        request = urllib.request.Request(self.base_url + path, body, headers)
        try:
            with urllib.request.urlopen(request, timeout=60) as reply:
                return reply.status, reply.read().decode()
        except urllib.error.HTTPError as error:
            return error.code, error.read().decode()
        except OSError:
            return 0, ""

    def _tail(self) -> str:
        self._log.seek(0)
        return self._log.read()[-_TAIL_CHARS:].decode(errors="replace")


def _device_flags(tiny: bool) -> list[str]:
    return (
        ["--device", "cpu", "--dtype", "float32", "--num-threads", "1"]
        if tiny
        else ["--device", "cuda"]
    )


def _write_model(
    folder: Path, model: str, tiny: bool, limit_s: float, *, with_weights: bool = False
) -> int:
    """config.json, a tokenizer and optional weights; returns the size of the vocabulary."""
    command = [sys.executable, "-m", "tests.bench.engine", "model-dir", model, str(folder)]
    command += ["--tiny"] if tiny else []
    if with_weights:
        command.append("--weights")
        free = shutil.disk_usage(folder).free
        if not tiny and free < 17 * 10**9 + _SPARE_DISK:
            raise PartFailed(
                f"{folder} has {free / 1e9:.0f} GB free, and the weights take 17 GB; "
                "set TMPDIR to a folder with more, or leave the part `ready` out"
            )
    made = subprocess.run(command, capture_output=True, text=True, timeout=max(1.0, limit_s))
    if made.returncode:
        raise PartFailed(f"the model's folder was not made: {made.stderr[-_TAIL_CHARS:]}")
    vocab_size: int = json.loads((folder / "config.json").read_text())["vocab_size"]
    (folder / "tokenizer.json").write_text(json.dumps(_tokenizer(vocab_size)), encoding="utf-8")
    return vocab_size


def _tokenizer(vocab_size: int) -> dict[str, Any]:
    """A tokenizer.json in which every id is a separate word, so that all of them decode."""
    vocab = {f"w{index}": index for index in range(vocab_size)}
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [],
        "normalizer": None,
        "pre_tokenizer": {"type": "WhitespaceSplit"},
        "post_processor": None,
        "decoder": None,
        "model": {"type": "WordLevel", "vocab": vocab, "unk_token": "w0"},
    }


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.bench.gpu.http")
    parser.add_argument("part", choices=("http", "ready"))
    parser.add_argument("model", help="a folder of configs/models")
    parser.add_argument("--limit-s", type=float, default=120.0)
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--enforce-eager", action="store_true", help="without CUDA graphs")
    args = parser.parse_args(argv)
    flags = ["--enforce-eager"] if args.enforce_eager else []
    try:
        if args.part == "ready":
            print(json.dumps(measure_ready(args.model, args.tiny, args.limit_s, flags)), flush=True)
            return 0
        for row in measure_http(args.model, args.tiny, args.limit_s, flags):
            print(json.dumps(row), flush=True)
    except PartFailed as error:
        print(f"tests.bench.gpu.http: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
