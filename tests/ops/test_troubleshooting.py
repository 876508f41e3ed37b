"""docs/operations.md, "When something is wrong": what the table names exists, and says that."""

import argparse
import re
import subprocess
import sys
from collections.abc import Iterator

import pytest

from penstock.server.flags.serve_flags import add_serve_flags
from tests.support.paths import ROOT
from tests.support.serving import RunningServer, running_server

_TABLE = (ROOT / "docs" / "operations.md").read_text().partition("## When something is wrong")[2]
ROWS = [line for line in _TABLE.partition("\n## ")[0].splitlines() if line.startswith("| ")][1:]

_FLAG = re.compile(r"--[a-z][a-z-]+")
_BENCHMARK = re.compile(r"`python -m tests\.bench\.engine (\S+) ([^`]*)`")


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    blocks = tmp_path_factory.mktemp("blocks")  # whose metrics the table names
    with running_server(f"--kv-offload-dir={blocks}") as server:
        server.complete()
        yield server


def test_every_flag_in_the_table_exists() -> None:
    parser = argparse.ArgumentParser()
    add_serve_flags(parser)
    named = set(_FLAG.findall(_BENCHMARK.sub("", "\n".join(ROWS))))
    assert len(named) > 5
    assert named - set(parser._option_string_actions) == set()


def test_every_flag_of_a_benchmark_in_the_table_exists() -> None:
    [(part, arguments)] = _BENCHMARK.findall("\n".join(ROWS))
    command = [sys.executable, "-m", "tests.bench.engine", part, "--help"]
    text = subprocess.run(command, capture_output=True, text=True, check=True, cwd=ROOT).stdout
    assert all(flag in text for flag in _FLAG.findall(arguments))


def test_every_metric_in_the_table_is_exported(server: RunningServer) -> None:
    metrics = server.get("/metrics").text
    words = re.findall(r"/metrics \\\| grep (\w+)", "\n".join(ROWS))
    assert len(words) > 2
    assert [word for word in words if word not in metrics] == []


def test_penstock_top_shows_what_the_table_refers_to(server: RunningServer) -> None:
    command = [sys.executable, "-m", "penstock", "top", server.url, "--once", "--interval", "0.1"]
    shown = subprocess.run(command, capture_output=True, text=True, check=True, cwd=ROOT).stdout
    words = (
        "waiting queue preemptions recomputed length stop TTFT ITL p99 mixed MBU decode idle batch"
    )
    referred = " ".join(
        row.rpartition("`penstock top`: ")[2] for row in ROWS if "`penstock top`:" in row
    )
    assert [word for word in words.split() if word not in referred or word not in shown] == []


@pytest.mark.parametrize("row", [row for row in ROWS if "`penstock serve" in row])
def test_a_failing_start_prints_the_message_of_the_table(row: str) -> None:
    found = re.search(r"`penstock (serve [^`]+)` → `([^`]+)`", row)
    assert found, row
    command = [sys.executable, "-m", "penstock", *found[1].split()]
    ended = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=60)
    assert ended.returncode == 2
    last_line = ended.stderr.splitlines()[-1]
    assert all(part.strip() in last_line for part in found[2].split("...")), last_line
