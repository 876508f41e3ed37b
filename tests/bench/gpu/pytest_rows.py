"""A plugin of pytest that prints a row when a test starts and when it has ended.

A test that loses the device ends the process, as everything after it would fail too. First comes a
row with the names of all tests that are to run. Of tests that differ in their `dtype` alone it is
the one of bfloat16, or the first: a server on a GPU computes in bfloat16. Of these, those
of part K of N are kept by PENSTOCK_TESTS_SHARE=K/N, and those in the file that PENSTOCK_TESTS_DONE
names, one node id a line, are left out.
"""

import json
import os
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

# Before pytest captures it.
_OUT = os.fdopen(os.dup(1), "w")
_LOST = ("CUDA error", "AcceleratorError", "Triton Error [CUDA]", "illegal memory access")
_MAX_CHARS = 1500
_NO_PARAMS = SimpleNamespace(params={})


def _print(**row: object) -> None:
    # On a line of its own: pytest prints a dot for each test.
    print("\n" + json.dumps({"part": "test", **row}), file=_OUT, flush=True)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    chosen = _share(of_one_type(items), os.environ.get("PENSTOCK_TESTS_SHARE", "0/1"))
    _print(tests=[item.nodeid for item in chosen])
    file = os.environ.get("PENSTOCK_TESTS_DONE")
    done = set(Path(file).read_text(encoding="utf-8").splitlines()) if file else set()
    kept = [item for item in chosen if item.nodeid not in done]
    config.hook.pytest_deselected(items=[item for item in items if item not in kept])
    items[:] = kept


def of_one_type(items: list[pytest.Item]) -> list[pytest.Item]:
    """Of those that differ in their `dtype` alone, the one of bfloat16, or the first."""
    chosen: dict[object, pytest.Item] = {}
    for item in items:
        params = dict(getattr(item, "callspec", _NO_PARAMS).params)
        dtype = str(params.pop("dtype", ""))
        key = (item.nodeid.partition("[")[0], repr(sorted(params.items())))
        # Without importing torch, whose types these are.
        same = key if dtype.startswith("torch.") else item
        if same not in chosen or dtype == "torch.bfloat16":
            chosen[same] = item
    return list(chosen.values())


def _share(items: list[pytest.Item], share: str) -> list[pytest.Item]:
    """Neighbours, which launch the same kernels."""
    index, count = map(int, share.split("/"))
    return items[index * len(items) // count : (index + 1) * len(items) // count]


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
