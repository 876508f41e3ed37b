"""What load generators say of one server, measured in turns."""

import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.bench.in_turns.cases import parse_cases
from tests.bench.in_turns.machine import cores_of, snapshot
from tests.bench.load_generators import longest, measure, table
from tests.support.paths import DEMO_MODEL

BUSY_CHILD = "import subprocess, sys; subprocess.run([sys.executable, '-c', 'while True: pass'])"


@pytest.mark.parametrize(
    ("at_work", "part"),
    [
        ("", (0, 0)),
        ("....", (0, 0)),
        ("..####.", (2, 6)),
        ("#....####", (5, 9)),
        ("##..##", (0, 6)),
        ("###...##", (0, 3)),
    ],
)
def test_the_longest_part_at_work_may_pause_shortly(at_work: str, part: tuple[int, int]) -> None:
    assert longest([each == "#" for each in at_work]) == part


def test_the_cores_of_a_process_are_those_of_all_that_it_has_started() -> None:
    with subprocess.Popen([sys.executable, "-c", BUSY_CHILD], start_new_session=True) as process:
        try:
            time.sleep(0.3)
            before = snapshot()
            time.sleep(0.7)
            cores = cores_of(before, snapshot(), process.pid)
        finally:
            subprocess.run(["pkill", "-KILL", "-s", str(process.pid)], check=True)
    assert cores > 0.05


@pytest.mark.slow
def test_what_a_load_generator_says_stands_beside_the_servers_own_account(tmp_path: Path) -> None:
    cases = parse_cases("16x256@4:n=64")
    (turn,) = measure(
        ["penstock"], cases, model=str(DEMO_MODEL), into=tmp_path, rounds=1, threads=1
    )
    assert turn.said.output_throughput > 0 and turn.generator_cores > 0 < turn.server_cores
    assert turn.server.ttft_ms <= turn.said.ttft_ms
    assert turn.server.tpot_ms == pytest.approx(turn.said.tpot_ms, rel=0.5)
    assert "| 16x256@4 | penstock | " in table([turn])
