"""A real Prometheus: finds or unpacks it, starts it with our configuration, and queries it."""

import contextlib
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import yaml

from tests.support.paths import ROOT
from tests.support.serving import free_port, wait_until

CONFIG = ROOT / "configs" / "prometheus" / "prometheus.yml"
_UNPACKED = ROOT / "build" / "prometheus"
_MISSING = (
    "Prometheus is not installed and could not be downloaded; run: apt-get install prometheus"
)


def program(name: str) -> str:
    """The path of `prometheus` or `promtool`; if missing, unpacks Debian's package in build/."""
    unpacked = _UNPACKED / "usr" / "bin" / name
    if found := shutil.which(name):
        return found
    if not unpacked.is_file():
        _unpack_debian_package()
    return str(unpacked)


def _unpack_debian_package() -> None:
    _UNPACKED.mkdir(parents=True, exist_ok=True)
    try:
        subprocess.run(
            ["apt-get", "download", "prometheus"], cwd=_UNPACKED, check=True, capture_output=True
        )
        package = next(_UNPACKED.glob("prometheus_*.deb"))
        subprocess.run(["dpkg", "-x", package, _UNPACKED], check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError, StopIteration) as error:
        raise AssertionError(_MISSING) from error


class Prometheus:
    def __init__(self, url: str) -> None:
        self.url = url

    def range(self, expr: str, seconds: float) -> list[dict[str, Any]]:
        """The series of a query over the last seconds, with one value per second."""
        now = float(self._get("/api/v1/query", query="time()")["result"][1])
        found = self._get(
            "/api/v1/query_range", query=expr, start=now - seconds, end=now, step="1s"
        )
        series: list[dict[str, Any]] = found["result"]
        return series

    def rules(self) -> list[dict[str, Any]]:
        groups = self._get("/api/v1/rules")["groups"]
        return [rule for group in groups for rule in group["rules"]]

    def is_up(self) -> bool:
        with contextlib.suppress(httpx.TransportError):
            return httpx.get(f"{self.url}/-/ready").status_code == 200
        return False

    def _get(self, path: str, **parameters: Any) -> Any:
        answer = httpx.get(self.url + path, params=parameters, timeout=30).json()
        assert answer["status"] == "success", (parameters, answer)
        return answer["data"]


@contextlib.contextmanager
def running_prometheus(target: str, home: Path) -> Iterator[Prometheus]:
    """Runs it with our configuration, with `target` as the server and intervals of one second."""
    port = free_port()
    config = yaml.safe_load(CONFIG.read_text())
    config["global"] = {"scrape_interval": "1s", "evaluation_interval": "1s"}
    config["rule_files"] = [str(CONFIG.parent / pattern) for pattern in config["rule_files"]]
    jobs = {job["job_name"]: job for job in config["scrape_configs"]}
    jobs["penstock"]["static_configs"] = [{"targets": [target]}]
    jobs["prometheus"]["static_configs"] = [{"targets": [f"127.0.0.1:{port}"]}]
    (home / "prometheus.yml").write_text(yaml.safe_dump(config))
    command = [
        program("prometheus"),
        f"--config.file={home / 'prometheus.yml'}",
        f"--storage.tsdb.path={home / 'data'}",
        f"--web.listen-address=127.0.0.1:{port}",
        "--log.level=warn",
    ]
    with (home / "prometheus.log").open("w") as log:
        process = subprocess.Popen(
            command, stdout=log, stderr=log, env={**os.environ, "GOMAXPROCS": "1"}
        )
    prometheus = Prometheus(f"http://127.0.0.1:{port}")
    try:
        wait_until(prometheus.is_up, timeout_s=30)
        yield prometheus
    finally:
        process.terminate()
        process.wait(timeout=30)
