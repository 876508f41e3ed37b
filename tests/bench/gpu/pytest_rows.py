"""A plugin of pytest that prints a row when a test starts and when it has ended.

A test that loses the device ends the process, as everything after it would fail too. The tests in
the file that PENSTOCK_TESTS_DONE names, one node id a line, are left out.
"""

import json
import os
import sys
from pathlib import Path

import pytest

# Before pytest captures it.
_OUT = os.fdopen(os.dup(1), "w")
_LOST = ("CUDA error", "AcceleratorError", "Triton Error [CUDA]", "illegal memory access")
_MAX_CHARS = 1500


def _print(**row: object) -> None:
    # On a line of its own: pytest prints a dot for each test.
    print("\n" + json.dumps({"part": "test", **row}), file=_OUT, flush=True)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    file = os.environ.get("PENSTOCK_TESTS_DONE")
    done = set(Path(file).read_text(encoding="utf-8").splitlines()) if file else set()
    left_out = [item for item in items if item.nodeid in done]
    if left_out:
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if item.nodeid not in done]


def pytest_runtest_logstart(nodeid: str) -> None:
    _print(test=nodeid, state="started")


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    if report.when != "call" and report.outcome == "passed":
        return
    text = report.longreprtext
    if report.failed:
        print(f"{report.nodeid} failed:\n{text}", file=sys.__stderr__, flush=True)
    state, message = report.outcome, text[-_MAX_CHARS:] if report.failed else ""
    _print(test=report.nodeid, state=state, seconds=report.duration, message=message)
    if report.failed and any(word in text for word in _LOST):
        pytest.exit("the device is lost", returncode=3)
