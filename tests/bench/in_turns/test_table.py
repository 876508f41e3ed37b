"""The numbers of a comparison: medians, ranges, and ratios within a round."""

import json

import msgspec
import pytest

from penstock.loadtest.report.figures import Value
from penstock.loadtest.workload.config import PromptFormat
from tests.bench.in_turns.cases import parse_cases
from tests.bench.in_turns.machine import CpuUse
from tests.bench.in_turns.rounds import Measurement, Outcome, PeersConfig, order
from tests.bench.in_turns.server import ServerSpec
from tests.bench.in_turns.table import Table

SERVERS = [ServerSpec(name=name, command=f"{name} {{port}}") for name in ("penstock", "a", "b")]
CONFIG = PeersConfig(
    servers=SERVERS,
    cases=parse_cases("8x8@1"),
    num_rounds=3,
    model="",
    threads=2,
    is_busy=False,
    seed=0,
    prompt_format=PromptFormat.IDS,
    count=None,
    encode=None,
    ready_timeout_s=1.0,
    request_timeout_s=1.0,
)
OTHERS = {"cc1plus": 0.25, "kswapd0": 0.005}


def measured(server: str, number: int, rate: float, tpot_ms: float | None = 2.0) -> Measurement:
    summary = {"output_throughput": rate, "median_ttft_ms": 1000 / rate, "median_tpot_ms": tpot_ms}
    cpu = CpuUse(server=1.5, client=0.1, others=0.25, stolen=0.0, processes=OTHERS)
    return Measurement(
        round=number,
        server=server,
        case="8x8@1",
        summary=summary | {"duration": 4.0},
        cpu=cpu,
    )


def table(*measurements: Measurement, **failures: str) -> Table:
    return Table(CONFIG, Outcome(measurements=[*measurements], failures=failures))


def test_rounds_alternate_so_that_no_server_is_always_first() -> None:
    names = [[spec.name for spec in order(SERVERS, number)] for number in (1, 2, 3)]
    assert names == [["penstock", "a", "b"], ["b", "a", "penstock"], ["penstock", "a", "b"]]


def test_a_ratio_is_computed_within_each_round() -> None:
    """The machine was twice as fast in the second round: the medians' ratio would be another."""
    shown = table(
        *(measured("penstock", number, rate) for number, rate in ((1, 100), (2, 220), (3, 130))),
        *(measured("a", number, rate) for number, rate in ((1, 100), (2, 200), (3, 100))),
    )
    assert shown.ratio("8x8@1", "a", "output_throughput") == Value(1.1, 1.0, 1.3, 3)
    assert shown.value("8x8@1", "a", "output_throughput") == Value(100, 100, 200, 3)
    ttft = shown.ratio("8x8@1", "a", "median_ttft_ms")
    assert ttft is not None and ttft.middle == pytest.approx(1 / 1.1)
    (line,) = [line for line in shown.text().splitlines() if line.startswith("penstock/a")]
    assert "1.100 (1.000-1.300)" in line and "0.909 (0.769-1.000)" in line


def test_a_server_that_failed_keeps_what_it_has_and_has_no_row_if_that_is_nothing() -> None:
    shown = table(
        *(measured("penstock", number, 100.0) for number in (1, 2, 3)),
        measured("a", 1, 50.0),
        a="in round 2, it died",
        b="in round 1, there is no such model",
    )
    assert shown.ratio("8x8@1", "a", "output_throughput") == Value(2.0, 2.0, 2.0, 1)
    assert shown.ratio("8x8@1", "b", "output_throughput") is None
    lines = shown.text().splitlines()
    assert "a failed in round 2, it died" in lines
    assert "b failed in round 1, there is no such model" in lines
    assert not any(line.startswith("penstock/b") for line in lines)


def test_outputs_of_one_token_have_no_tpot() -> None:
    shown = table(measured("penstock", 1, 100.0, None), measured("a", 1, 100.0, None))
    assert shown.ratio("8x8@1", "a", "median_tpot_ms") is None
    (line,) = [line for line in shown.text().splitlines() if line.startswith("penstock/a")]
    assert line.split() == ["penstock/a", "1.000", "1.000", "-"]


def test_other_processes_and_their_cpu_are_named() -> None:
    text = table(measured("penstock", 1, 100.0), measured("a", 1, 100.0)).text()
    assert "Other processes meanwhile: cc1plus 2.0 s of CPU." in text
    (line,) = [line for line in text.splitlines() if line.startswith("a  ")]
    assert line.split()[-2:] == ["1.50", "0.25"]


def test_the_document_has_every_measurement_and_says_where_it_was_measured() -> None:
    shown = table(measured("penstock", 1, 100.0), measured("a", 1, 50.0), b="it died")
    document = json.loads(msgspec.json.encode(shown.document()))
    assert document["threads"] == 2 and document["processor"] and document["num_cores"] > 0
    (case,) = document["cases"]
    assert case["penstock_over"]["a"]["output_throughput"]["middle"] == 2.0
    assert case["values"]["a"]["output_throughput"]["middle"] == 50.0
    assert [each["server"] for each in document["measurements"]] == ["penstock", "a"]
    assert document["measurements"][0]["cpu"]["processes"] == OTHERS
    assert document["failures"] == {"b": "it died"}
