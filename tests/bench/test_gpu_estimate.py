"""The committed tables of launches and estimates are those of the code as it is.

Their commands run in processes of their own, where Triton's interpreter is on.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="Triton is not installed; pip install 'penstock[dev]'")

from tests.bench.gpu.cublas import Of, product_us
from tests.bench.gpu.goals import GOALS
from tests.bench.gpu.resources import known, sources

_FOLDER = Path(__file__).with_name("gpu")


def _printed(*command: str) -> str:
    done = subprocess.run(
        [sys.executable, *command],
        env=os.environ | {"TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_resources_are_of_the_kernels_as_they_are() -> None:
    assert known()["sources"] == sources(), "see the command in tests/bench/gpu/resources.py"


@pytest.mark.parametrize("name", ["grids", pytest.param("estimate", marks=pytest.mark.slow)])
def test_a_committed_table_is_what_the_launch_code_makes(name: str) -> None:
    text = {"grids": "GRIDS.md", "estimate": "ESTIMATE.md"}[name]
    committed = (_FOLDER / text).read_text(encoding="utf-8")
    command = f"tests.bench.gpu.{name}"
    assert _printed("-m", command) == committed, f"run `python -m {command} --write`"


def test_what_a_device_measured_stands_beside_each_goal_that_it_has_measured() -> None:
    committed = (_FOLDER / "ESTIMATE.md").read_text(encoding="utf-8")
    (line,) = (line for line in committed.splitlines() if "Qwen3-8B by HTTP" in line)
    assert line.endswith("| 17,249 |")


def test_the_shares_by_which_goals_are_scaled_are_those_of_the_estimate() -> None:
    committed = (_FOLDER / "ESTIMATE.md").read_text(encoding="utf-8")
    for goal in GOALS:
        (line,) = (line for line in committed.splitlines() if line.startswith(f"| {goal.what} |"))
        shares = [float(cell) for cell in line.split("|")[-4:-2]]
        assert shares == pytest.approx([goal.of_memory, goal.of_matrix], abs=0.05)


_BEFORE = """
from tests.bench.gpu.assumptions import *
from tests.bench.gpu.assumptions import _alone
from tests.bench.gpu.under_load import with_drafts, with_shared_prefix
from tests.support.multiprocessor import room_of
from dataclasses import replace
cublas = Work(name="cuBLAS", programs=0, fit=0, busy=0, product=(256, 6144, 4096))
product = Work(name="_skinny", programs=264, fit=2, busy=264, memory_bytes=43_000_000,
               in_flight=50_000, room=room_of(warps=4, registers=128, shared_bytes=100_000))
half = replace(product, programs=66, busy=66, in_flight=20_000)
empty = replace(product, programs=264 * 3)
given = replace(EXPECTED, read_share=1.0, latency=0.5, end=0.5)
decode = replace(product, name="_decode", memory_bytes=1024 * 256 * 4096, issued=1e6,
                 num_keys=1024 * 256, query_size=4096)
def gaps(*works, early=Early.AS_ROOM_ALLOWS):
    return [one.gap for one in timed(list(works), EXPECTED, early)]
"""


# All in one process, whose imports take longer than all that it computes.
_FIGURES = {
    "cublas": "timed([product, cublas], EXPECTED)[1].us",
    "product": "_alone(product, EXPECTED).us",
    "half": "_alone(half, EXPECTED).us",
    "empty": "_alone(empty, EXPECTED).us",
    "given": "_alone(given=given, work=product).us",
    "first": "gaps(product)[0] - EXPECTED.between_steps",
    "late": "gaps(product, product)[1] - EXPECTED.start",
    "all early": "gaps(product, product, early=Early.ALL)[1] - EXPECTED.release",
    "none early": "gaps(product, product, early=Early.NONE)[1] - EXPECTED.gap_alone",
    "after cublas": "gaps(product, cublas, product)[2] - EXPECTED.gap_alone",
    "own of shared": "with_shared_prefix([decode], 512)[1].memory_bytes / decode.memory_bytes",
    "once of shared": "with_shared_prefix([decode], 512)[0].memory_bytes / decode.memory_bytes",
    "keys of drafts": "with_drafts([decode], 3)[0].memory_bytes / decode.memory_bytes",
    "keys again": "with_drafts([decode], 3, reads_again=True)[0].issued / decode.issued",
    "rows of drafts": "with_drafts([cublas], 3)[0].product[0]",
}


@pytest.fixture(scope="module")
def us() -> dict[str, float]:
    """Each of `_FIGURES`."""
    prints = "".join(f"print({each})\n" for each in _FIGURES.values())
    lines = _printed("-c", _BEFORE + prints).splitlines()
    return dict(zip(_FIGURES, map(float, lines), strict=True))


def test_a_product_of_cublas_takes_what_others_measured(us: dict[str, float]) -> None:
    assert product_us(256, 6144, 4096, Of.MEDIAN) == 22.1
    assert product_us(256, 6144, 4096, Of.SLOWEST) == 25.8
    assert us["cublas"] == 22.1


def test_between_two_measured_sizes_a_product_takes_its_share_of_both() -> None:
    def us(rows: int, outputs: int, columns: int) -> float:
        return product_us(rows, outputs, columns, Of.MEDIAN)

    assert us(640, 4096, 4096) == pytest.approx((us(513, 4096, 4096) + us(767, 4096, 4096)) / 2)
    wide = (us(256, 16384, 4096) + us(256, 51200, 4096)) / 2
    assert us(256, (16384 + 51200) // 2, 4096) == pytest.approx(wide)
    deep = (us(256, 4096, 12288) + us(256, 4096, 16384)) / 2
    assert us(256, 4096, 14336) == pytest.approx(deep)
    assert us(16384, 4096, 4096) == pytest.approx(2 * us(8192, 4096, 4096))


def test_a_product_takes_its_bytes_and_what_surrounds_them(us: dict[str, float]) -> None:
    assert us["given"] == pytest.approx(10 + 1)


def test_half_of_the_device_with_little_on_its_way_is_slower_than_the_memory(
    us: dict[str, float],
) -> None:
    assert us["half"] / us["product"] > 1.5


def test_programs_that_find_nothing_to_do_take_time(us: dict[str, float]) -> None:
    assert us["empty"] - us["product"] == pytest.approx(2 * 0.9)


@pytest.mark.parametrize("gap", ["first", "late", "all early", "none early", "after cublas"])
def test_before_a_launch_lies_what_is_assumed(us: dict[str, float], gap: str) -> None:
    """Two programs of `product` fill a multiprocessor, so no other has room beside them."""
    assert us[gap] == pytest.approx(0.0, abs=1e-6)


def test_a_shared_prefix_is_read_once(us: dict[str, float]) -> None:
    assert us["own of shared"] == pytest.approx(0.5)
    assert us["once of shared"] == pytest.approx(0.5 / 256, rel=1e-3)


def test_drafts_are_rows_of_products_and_read_keys_once_or_again(us: dict[str, float]) -> None:
    figures = us["rows of drafts"], us["keys of drafts"], us["keys again"]
    assert figures == (3 * 256, 1.0, 3.0)


def test_decode_steps_are_expected_to_take_about_what_an_h200_measured() -> None:
    committed = (_FOLDER / "ESTIMATE.md").read_text(encoding="utf-8")
    table = committed.split("## Early starts")[1].split("\n## ")[0]
    ratios = []
    for line in table.splitlines():
        cells = line.strip("| ").split(" | ")
        if ", batch " in cells[0]:
            none, as_room_allows, all_early = map(float, cells[1:4])
            assert none >= as_room_allows >= all_early
            measured = cells[5] if cells[4] == "-" or cells[5] != "-" else cells[4]
            ratios.append(as_room_allows / float(measured))
    assert len(ratios) == 5 and ratios == pytest.approx([1.0] * 5, abs=0.04)
