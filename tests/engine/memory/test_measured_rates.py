"""Rates of the machine: the best of undisturbed measurements, and whether others disturbed one."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from penstock.engine.memory.measured_rates import CpuTimes, RateMeter, processor_meter, rates_file

SLOW, FAST = (1e9, 1e10), (2e9, 1.5e10)


def quiet() -> CpuTimes:
    """Since then nobody else has worked."""
    now = CpuTimes.now()
    return now._replace(at_s=now.at_s - 1000)


def busy() -> CpuTimes:
    """Since then all cores have worked for others."""
    now = CpuTimes.now()
    return now._replace(at_s=now.at_s - 1, all_s=now.all_s - (os.cpu_count() or 1))


def meter(file: Path | None, measured: tuple[float, float]) -> RateMeter:
    return RateMeter(torch.bfloat16, lambda: measured, file)


def test_a_measurement_beside_others_is_doubtful_and_not_kept(tmp_path: Path) -> None:
    file = tmp_path / "rates.json"
    assert meter(file, SLOW).rates(busy()) == (*SLOW, True)
    assert not file.exists()


def test_the_best_of_undisturbed_starts_counts_in_later_ones(tmp_path: Path) -> None:
    file = tmp_path / "cache" / "rates.json"
    assert meter(file, FAST).rates(quiet()) == (*FAST, False)
    for before in (quiet(), busy()):
        assert meter(file, SLOW).rates(before) == (*FAST, False)
    assert meter(file, (3e9, 1e10)).rates(quiet()) == (3e9, FAST[1], False)
    assert meter(file, SLOW).rates(busy()) == (3e9, FAST[1], False)


def test_another_type_or_number_of_threads_has_rates_of_its_own(tmp_path: Path) -> None:
    file = tmp_path / "rates.json"
    meter(file, FAST).rates(quiet())
    of_float32 = RateMeter(torch.float32, lambda: SLOW, file)
    assert of_float32.rates(quiet()) == (*SLOW, False)
    assert len(json.loads(file.read_text())) == 2


@pytest.mark.parametrize("content", ["", "[", "[]", "3", '{"a": 1}', "null", "\x00\xff"])
def test_a_damaged_file_is_written_anew(tmp_path: Path, content: str) -> None:
    file = tmp_path / "rates.json"
    file.write_text(content, encoding="latin-1")
    assert meter(file, SLOW).rates(quiet()) == (*SLOW, False)
    assert meter(file, (1.0, 1.0)).rates(busy()) == (*SLOW, False)


def test_a_value_that_is_no_rate_is_not_used(tmp_path: Path) -> None:
    file = tmp_path / "rates.json"
    meter(file, FAST).rates(quiet())
    (key,) = json.loads(file.read_text())
    wrongs: list[object] = [None, [1.0], ["x", 2.0], {}]
    for wrong in wrongs:
        file.write_text(json.dumps({key: wrong}))
        assert meter(file, SLOW).rates(busy()) == (*SLOW, True)


def test_without_a_place_to_keep_them_rates_are_measured_alone(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for file in (None, tmp_path / "file" / "rates.json"):
        assert meter(file, FAST).rates(quiet()) == (*FAST, False)
        assert meter(file, SLOW).rates(busy()) == (*SLOW, True)


def test_a_program_beside_this_one_counts_as_another_until_it_has_been_waited_for() -> None:
    before = CpuTimes.now()
    spin = "import time\nwhile time.process_time() < 1: pass"
    with subprocess.Popen([sys.executable, "-c", spin]) as other:
        time.sleep(0.8)
        share = before.share_of_others(CpuTimes.now())
        other.wait()
    assert share > 0.1 / (os.cpu_count() or 1)
    assert CpuTimes.now().own_s - before.own_s > 0.9


def test_while_others_work_nothing_is_measured_when_idle(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    at_work = processor_meter(torch.float32)
    at_work._before = busy()
    assert at_work.when_idle() is None
    at_work._before = quiet()
    rates = at_work.when_idle()
    assert rates
    assert min(rates[:2]) > 1e8
    assert not rates.rates_are_doubtful
    kept = rates_file()
    assert kept
    assert kept.exists()
