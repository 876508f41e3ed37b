"""The GPU suite's ladder with simulated failures: what is lost, and how the later parts run.

`make test-ladder` climbs the real rungs at toy sizes, and simulates every failure at each.
"""

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from tests.bench.gpu import triton_cache
from tests.bench.gpu.parts import PARTS, estimates
from tests.bench.gpu.probe import Climb
from tests.bench.gpu.record import Log, Record
from tests.bench.gpu.rungs import LAST, RUNGS
from tests.bench.gpu.suite import main
from tests.bench.gpu.ways import Way, way_for

BEST, NO_PDL = Way(), Way(overlaps=False)
NO_GRAPHS, PLAIN = Way(graphs=False), Way(overlaps=False, graphs=False)
# What follows from the failure of one rung alone.
AFTER: dict[str, Way] = {
    "kernel": BEST,
    **{rung.name: BEST for rung in RUNGS if rung.kernels},
    "kernel-pdl": NO_PDL,
    "graph": BEST,
    "graph-pdl": NO_PDL,
    "graph-memset-pdl": NO_PDL,
    "model": BEST,
    "model-pdl": NO_PDL,
    "decode-graphs": BEST,
    "decode-graphs-pdl": NO_PDL,
    "chunk-graphs": BEST,
    "chunk-graphs-pdl": NO_PDL,
    "waits": BEST,
    "start": BEST,
}
MESSAGES = {
    "hang": "waiting for the device",
    "refusal": "operation not permitted when stream is capturing",
    "abort": "an illegal memory access was encountered",
    "wrong": "it computes something else",
}


def test_every_rung_has_a_consequence_or_none() -> None:
    assert list(AFTER) == [rung.name for rung in RUNGS]


@pytest.mark.parametrize("failed", list(AFTER))
def test_without_one_rung_the_fastest_way_of_the_others_is_taken(failed: str) -> None:
    assert way_for(AFTER.keys() - {failed}) == AFTER[failed]


@pytest.mark.parametrize(
    ("failed", "way"),
    [
        ({"graph", "graph-pdl"}, NO_GRAPHS),
        ({"chunk-graphs", "chunk-graphs-pdl"}, NO_GRAPHS),
        ({"graph", "kernel-pdl"}, PLAIN),
        (set(AFTER), PLAIN),
    ],
)
def test_without_several_rungs_too(failed: set[str], way: Way) -> None:
    assert way_for(AFTER.keys() - failed) == way


class Climbed:
    """A climb in which all rungs pass but these."""

    def __init__(self, folder: Path, simulated: dict[str, str], patience: float = 1.0) -> None:
        self.rows: list[dict[str, Any]] = []
        self.failures: dict[str, str] = {}
        self.log = folder / "log.txt"
        climb = Climb(
            tiny=True,
            simulated={"all": "pass"} | simulated,
            note=self.rows.append,
            fail=self.failures.__setitem__,
            log=Log(self.log),
            patience=patience,
        )
        self.way = climb.way(time.monotonic() + 300)
        self.ran_in = {row["rung"]: row["simulated"] for row in self.rows}


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        (rung.name, ("abort", "refusal", "wrong")[number % 3])
        for number, rung in enumerate(RUNGS)
        if number % 2
    ],
)
def test_a_failure_loses_nothing_but_its_rung(tmp_path: Path, name: str, kind: str) -> None:
    climbed = Climbed(tmp_path, {name: kind})
    assert list(climbed.failures) == [name] and MESSAGES[kind] in climbed.failures[name]
    passed = {row["rung"] for row in climbed.rows if row["is_right"]}
    assert passed == AFTER.keys() - {name}
    assert climbed.way == AFTER[name]


def test_a_model_that_fails_says_which_of_its_kernels_failed_alone(tmp_path: Path) -> None:
    climbed = Climbed(
        tmp_path, {"kernel-decode": "wrong", "kernel-experts": "abort", "model": "wrong"}
    )
    assert set(climbed.failures) == {"kernel-decode", "kernel-experts", "model"}
    first, *_ = climbed.failures["model"].splitlines()
    # No layer of it has experts.
    assert first.endswith("(of its kernels, kernel-decode failed alone)")
    assert "failed alone" not in climbed.failures["kernel-decode"]


def test_a_model_that_fails_with_kernels_that_are_right_says_so(tmp_path: Path) -> None:
    climbed = Climbed(tmp_path, {"model": "abort"})
    first, *_ = climbed.failures["model"].splitlines()
    assert first.endswith("(each of its kernels was right alone)")


@pytest.mark.slow
def test_a_rung_that_hangs_is_tried_again_for_twice_the_time_and_costs_no_more(
    tmp_path: Path,
) -> None:
    climbed = Climbed(tmp_path, {"graph-pdl": "hang"}, patience=0.1)
    assert list(climbed.failures) == ["graph-pdl"]
    assert MESSAGES["hang"] in climbed.failures["graph-pdl"]
    assert climbed.log.read_text().count(MESSAGES["hang"]) == 2
    assert climbed.way == NO_PDL


@pytest.mark.slow
def test_a_rung_that_is_late_has_found_nothing_wrong(tmp_path: Path) -> None:
    climbed = Climbed(tmp_path, {"graph-pdl": "late"}, patience=0.1)
    assert climbed.failures == {} and climbed.way == BEST


def test_the_last_rungs_run_in_the_way_that_the_others_allow(tmp_path: Path) -> None:
    climbed = Climbed(tmp_path, {"graph-pdl": "abort", "graph": "refusal", "kernel-pdl": "wrong"})
    for name in LAST:
        assert climbed.ran_in[name] == {"PENSTOCK_PDL": "0", "flags": ["--enforce-eager"]}
    assert climbed.ran_in["chunk-graphs"]["flags"] == []


def test_rungs_that_fail_beside_each_other_are_tried_again_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "cpu_count", lambda: 16)
    two = Climbed(tmp_path, {"graph": "abort", "graph-pdl": "abort", "model": "abort"})
    assert set(two.failures) == {"graph", "graph-pdl", "model"}
    assert two.log.read_text().count("illegal memory access") == 2 + 2 + 1


def _suite(folder: Path, *arguments: str) -> tuple[int, list[dict[str, Any]], dict[str, Any]]:
    """Exit status, rows and summary of the suite with all parts simulated."""
    out = folder / "out"
    status = main(["--out", str(out), "--simulate", "all=pass", *arguments])
    rows = [json.loads(line) for line in (out / "rows.jsonl").read_text().splitlines()]
    return status, rows, json.loads((out / "summary.json").read_text())


def _ways(rows: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """The environment and the flags that each simulated part saw."""
    return {row["rung"]: row["simulated"] for row in rows if "simulated" in row}


def test_later_parts_run_in_the_way_that_the_probe_found_and_each_failure_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    status, rows, summary = _suite(
        tmp_path,
        *("--parts", "probe,compile,linear,http,ready"),
        *("--simulate", "chunk-graphs-pdl=abort", "--simulate", "linear=refusal"),
    )
    assert status == 1
    failures = {(row["of"], row["what"]) for row in summary["failures"]}
    assert failures == {("probe", "chunk-graphs-pdl"), ("linear", "")}
    assert summary["way"]["name"] == "kernels in graphs, without PDL"
    ways = _ways(rows)
    for part in ("compile", "http", "ready"):
        assert ways[part] == {"PENSTOCK_PDL": "0", "flags": []}
    printed = capsys.readouterr().out
    assert "FAILED probe, chunk-graphs-pdl: it was ended by SIGABRT" in printed
    assert "FAILED linear: it ended with 1" in printed


@pytest.mark.slow
def test_a_part_that_hangs_leaves_the_goals_behind_it_their_time(tmp_path: Path) -> None:
    limits = ("--patience", "0.2", "--minutes", "0.5")
    _, _, summary = _suite(tmp_path, "--parts", "http,ready", "--simulate", "http=hang", *limits)
    assert [row["of"] for row in summary["failures"]] == ["http"]
    assert list(summary["seconds"]) == ["http", "ready"]


@pytest.mark.slow
def test_a_simulated_rung_leaves_the_tests_as_they_are(tmp_path: Path) -> None:
    out = ("--out", str(tmp_path / "out"), "--tiny", "--parts", "tests")
    assert main([*out, "--simulate", "graph=abort"]) == 0
    text = (tmp_path / "out" / "rows.jsonl").read_text()
    assert text.count('"part": "tests"') == 2 and '"passed"' in text


def test_a_later_command_goes_on_with_what_an_earlier_one_found(tmp_path: Path) -> None:
    parts = ("--parts", "probe", "linear")
    _suite(tmp_path, *parts, "--simulate", "graph-pdl=abort", "--simulate", "linear=abort")
    file = tmp_path / "out" / "rows.jsonl"
    with file.open("a") as cut_off:
        cut_off.write('{"event": "start", "of": "compile"}\n{"part": "compi')
    status, rows, summary = _suite(tmp_path, "--resume", str(file), "--minutes", "0.5")
    assert status == 1
    # What ended is not run again, well or not; what was cut off is.
    assert [row["of"] for row in rows if row.get("event") == "end"] == [
        "probe", "linear", *(part.name for part in PARTS if part.name not in ("probe", "linear")),
    ]  # fmt: skip
    assert {row["what"] or row["of"] for row in summary["failures"]} == {"graph-pdl", "linear"}
    assert _ways(rows)["tables"] == {"PENSTOCK_PDL": "0", "flags": []}
    # A part that is named runs again, and what it said before no longer counts.
    status, _, summary = _suite(tmp_path, "--resume", str(file), "--parts", "linear")
    assert [row["what"] for row in summary["failures"]] == ["graph-pdl"]


def test_a_suite_that_is_ended_keeps_what_it_has_and_leaves_no_process(tmp_path: Path) -> None:
    out = tmp_path / "out"
    command = [sys.executable, "-m", "tests.bench.gpu.suite", "--out", str(out)]
    command += [
        "--parts",
        "device,linear",
        "--simulate",
        "device=pass",
        "--simulate",
        "linear=hang",
    ]
    suite = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    log = out / "log.txt"
    ends_s = time.monotonic() + 60
    while not (log.exists() and "waiting for the device" in log.read_text()):
        assert time.monotonic() < ends_s
        time.sleep(0.05)
    suite.send_signal(signal.SIGTERM)
    _, errors = suite.communicate(timeout=60)
    assert suite.returncode == 1, errors
    summary = json.loads((out / "summary.json").read_text())
    assert list(summary["seconds"]) == ["device"]
    assert [row["message"] for row in summary["failures"]] == ["interrupted"]
    (pid,) = re.findall(r"process (\d+) is waiting", log.read_text())
    assert not Path(f"/proc/{pid}").exists()


def test_what_comes_back_is_few_files_of_bounded_size(tmp_path: Path) -> None:
    log = Log(tmp_path / "log.txt")
    for _ in range(20):
        log.write(b"x" * 2**20)
    assert (tmp_path / "log.txt").stat().st_size <= 16 * 2**20
    _suite(tmp_path, "--parts", "device")
    names = {file.name for file in (tmp_path / "out").iterdir()}
    assert names == {
        "rows.jsonl", "log.txt", "summary.json", "summary.txt", "triton_cache.tar.xz",
    }  # fmt: skip


def test_estimates_add_up(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--list", "--parts", "probe,tests", "compile", "--minutes", "2"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[2].split() == ["tests", "150", "s", "250", "s", "may", "not", "fit"]
    assert lines[-1] == "together            250 s, of 120 s that --minutes allows"
    first = [part for part in PARTS if part.name in ("probe", "tests", "compile")]
    assert estimates(first, 9).count("may not fit") == 0


@pytest.mark.parametrize("wrong", ["linear", "linear=maybe", "everything=hang"])
def test_an_unknown_simulation_is_refused(
    wrong: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["--out", str(tmp_path / "out"), "--simulate", wrong]) == 2
    assert "NAME=KIND" in capsys.readouterr().err


def test_a_way_that_is_given_is_kept_whatever_the_probe_finds(tmp_path: Path) -> None:
    _, rows, summary = _suite(tmp_path, "--parts", "probe,linear", "--way", "eager")
    assert summary["failures"] == []
    assert _ways(rows)["linear"] == {"PENSTOCK_PDL": "0", "flags": ["--enforce-eager"]}


def test_what_was_compiled_comes_back_and_is_found_in_another_folder(tmp_path: Path) -> None:
    kernel, file = tmp_path / "here" / "KEY", tmp_path / "cache.tar.xz"
    kernel.mkdir(parents=True)
    paths = {name: str(kernel / name) for name in ("k.json", "k.cubin", "k.ttir")}
    for path in paths.values():
        Path(path).write_text("{}")
    (kernel / "__grp__k.json").write_text(json.dumps({"child_paths": paths}))
    assert triton_cache.pack(kernel.parent, file)
    there = tmp_path / "there"
    assert triton_cache.unpack(file, there) == 3  # not the compiler's own texts
    group = json.loads((there / "KEY" / "__grp__k.json").read_text())["child_paths"]
    assert group["k.cubin"] == str(there / "KEY" / "k.cubin")
    assert triton_cache.unpack(file, there) == 0


def test_a_file_that_cannot_be_read_is_no_run_to_go_on_from(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["--out", str(tmp_path / "out"), "--resume", str(tmp_path / "rows.jsonl")]) == 2
    assert "--resume" in capsys.readouterr().err


def test_a_failure_is_forgotten_when_its_part_runs_again(tmp_path: Path) -> None:
    record = Record(tmp_path)
    for message in ("first", "second"):
        record.event("start", of="linear")
        record.event("failure", of="linear", what="", message=message)
    assert [row["message"] for row in record.failures()] == ["second"]
