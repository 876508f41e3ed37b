"""The result of a comparison, as text and as JSON: each server's numbers, and their ratios.

A value is the median of the rounds, with the lowest and the highest. A ratio is computed within
each round, between turns that are near to each other, and then treated the same.
"""

import math
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict
from datetime import datetime
from typing import Any

from penstock.loadtest.report.comparison import aligned, value_of
from penstock.loadtest.report.figures import Value
from penstock.loadtest.report.report import Summary
from penstock.loadtest.report.svg import short_number
from tests.bench.in_turns.cases import Case
from tests.bench.in_turns.machine import num_cores, processor_name
from tests.bench.in_turns.rounds import Measurement, Outcome, PeersConfig

PENSTOCK = "penstock"
# Heading, and the key in the summary and in JSON.
_METRICS = (
    ("output tok/s", "output_throughput"),
    ("TTFT p50, ms", "median_ttft_ms"),
    ("TPOT p50, ms", "median_tpot_ms"),
)
_CPU = (("own cores", "server"), ("other cores", "others"))
_MAX_NAMED, _MIN_NAMED_S = 5, 0.05


class Table:
    """What was measured, by server and case."""

    def __init__(self, config: PeersConfig, outcome: Outcome) -> None:
        self._config, self._outcome = config, outcome

    def value(self, case: str, server: str, key: str) -> Value | None:
        return value_of([*self._by_round(case, server, key).values()])

    def ratio(self, case: str, peer: str, key: str) -> Value | None:
        """Penstock's number over the peer's, in the rounds that have both."""
        ours, theirs = (self._by_round(case, server, key) for server in (PENSTOCK, peer))
        return value_of([ours[at] / theirs[at] for at in ours if theirs.get(at)])

    def cpu(self, case: str, server: str, key: str) -> Value | None:
        found = self._found(case, server)
        return value_of([getattr(measured.cpu, key) for measured in found])

    def _by_round(self, case: str, server: str, key: str) -> dict[int, float]:
        return {
            measured.round: value
            for measured in self._found(case, server)
            if (value := measured.summary[key]) is not None and math.isfinite(value)
        }

    def _found(self, case: str, server: str) -> list[Measurement]:
        return [
            measured
            for measured in self._outcome.measurements
            if (measured.case, measured.server) == (case, server)
        ]

    # As text.

    def text(self) -> str:
        lines = [_machine_line(self._config), *self._server_lines()]
        for case in self._config.cases:
            if len(rows := self._rows(case.name)) > 1:
                lines += ["", case_line(case), *aligned(rows)]
        return "\n".join([*lines, "", *self._closing_lines()])

    def _server_lines(self) -> list[str]:
        return [f"{spec.name}: {spec.command}" for spec in self._config.servers]

    def _rows(self, case: str) -> list[list[str]]:
        rows = [["", *(heading for heading, _ in (*_METRICS, *_CPU))]]
        names = [spec.name for spec in self._config.servers if self._found(case, spec.name)]
        for name in names:
            values = [_shown(self.value(case, name, key)) for _, key in _METRICS]
            values += [_shown_cores(self.cpu(case, name, key)) for _, key in _CPU]
            rows.append([name, *values])
        for name in names:
            if name != PENSTOCK:
                ratios = [self.ratio(case, name, key) for _, key in _METRICS]
                rows.append([f"{PENSTOCK}/{name}", *map(_shown_ratio, ratios), "", ""])
        return rows

    def _closing_lines(self) -> list[str]:
        lines = [
            "Medians of the rounds (lowest-highest). Better is a ratio above 1 for tok/s, below 1 "
            "for TTFT and TPOT.",
            f"Other processes meanwhile: {self._others()}.",
        ]
        return lines + [f"{name} failed {why}" for name, why in self._outcome.failures.items()]

    def _others(self) -> str:
        cpu_s: Counter[str] = Counter()
        for measured in self._outcome.measurements:
            for name, cores in measured.cpu.processes.items():
                cpu_s[name] += cores * measured.summary["duration"]
        named = [
            f"{name} {seconds:.1f} s of CPU"
            for name, seconds in cpu_s.most_common(_MAX_NAMED)
            if seconds >= _MIN_NAMED_S
        ]
        return ", ".join(named) or "none that used any CPU to speak of"

    # As JSON.

    def document(self) -> Summary:
        config = self._config
        return {
            "date": datetime.now().strftime("%Y%m%d-%H%M%S"),
            "processor": processor_name(),
            "num_cores": num_cores(),
            "threads": config.threads,
            "busy": config.is_busy,
            "model": config.model or None,
            "rounds": config.num_rounds,
            "seed": config.seed,
            "prompt_format": config.prompt_format,
            "servers": [asdict(spec) for spec in config.servers],
            "cases": [self._case_document(case) for case in config.cases],
            "measurements": [asdict(measured) for measured in self._outcome.measurements],
            "failures": self._outcome.failures,
            "is_interrupted": self._outcome.is_interrupted,
        }

    def _case_document(self, case: Case) -> dict[str, Any]:
        names = [spec.name for spec in self._config.servers]
        values = {
            name: {key: self.value(case.name, name, key) for _, key in _METRICS}
            | {f"{key}_cores": self.cpu(case.name, name, key) for _, key in _CPU}
            for name in names
        }
        ratios = {
            name: {key: self.ratio(case.name, name, key) for _, key in _METRICS}
            for name in names
            if name != PENSTOCK
        }
        return asdict(case) | {"values": values, "penstock_over": ratios}


def _machine_line(config: PeersConfig) -> str:
    busy = ", a busy process on each core beside" if config.is_busy else ""
    return (
        f"{processor_name()}, cores: {num_cores()}{busy}; threads of each server: "
        f"{config.threads}; rounds: {config.num_rounds}, each server in a turn of its own"
    )


def case_line(case: Case) -> str:
    if case.num_turns > 1:
        return (
            f"{case.name}: conversations of {case.num_turns} turns, each {case.input_len} new "
            f"tokens after all before and {case.output_len} out, {case.concurrency} at a time, "
            f"{case.num_requests} conversations; TTFT is that of turns 2 to {case.num_turns}"
        )
    shared = f", {case.num_shared} of them shared" if case.num_shared else ""
    return (
        f"{case.name}: prompts of {case.input_len} tokens{shared}, outputs of {case.output_len}, "
        f"{case.concurrency} at a time, {case.num_requests} requests"
    )


def _shown(value: Value | None) -> str:
    return _with_range(value, short_number)


def _shown_ratio(value: Value | None) -> str:
    return _with_range(value, "{:.3f}".format)


def _shown_cores(value: Value | None) -> str:
    return _with_range(value, "{:.2f}".format)


def _with_range(value: Value | None, form: Callable[[float], str]) -> str:
    if value is None:
        return "-"
    if value.num == 1:
        return form(value.middle)
    return f"{form(value.middle)} ({form(value.low)}-{form(value.high)})"
