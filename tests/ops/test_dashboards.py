"""Dashboard, recording rules and alerts, against a real Prometheus that scrapes a real server."""

import contextlib
import json
import math
import re
import shutil
import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.support.load import load_on
from tests.support.paths import ROOT
from tests.support.prometheus import CONFIG, Prometheus, program, running_prometheus
from tests.support.serving import RunningServer

DASHBOARD = ROOT / "configs" / "grafana" / "penstock.json"
_LOAD_S = 40.0
_WINDOW_S = 30
# As an operator would select them.
_VARIABLES = {
    "$__rate_interval": "10s",
    "$__range": f"{_WINDOW_S}s",
    "$job": "penstock",
    "$instance": ".*",
    "$ttft_slo": "2.0",
    "$tpot_slo": "0.05",
}
# Long prompts in small chunks and a KV cache for two or three of them, which gives steps of every
# class and preemptions.
_FLAGS = (
    "--max-model-len=512",
    "--max-num-seqs=16",
    "--max-num-batched-tokens=64",
    "--dtype=bfloat16",  # hardware.toml has peaks for this type only
    "--kv-cache-memory-bytes=2097152",
    # What they add to the metrics is shown too. No request is refused for so far a target.
    "--scheduling-policy=fair",
    "--ttft-target-ms=600000",
)
# The empty name matches every device.
_LISTED = """
[[device]]
name = ""
bandwidth_bytes_per_s = 5.0e10
bf16_flops = 1.0e12
"""
# Exported metrics that no panel shows, with the reason.
_NOT_SHOWN = {
    "penstock_inference_time_seconds": "the sum of prefill and decode, which are shown",
    "penstock_request_computed_prompt_tokens": "the shares are shown; vLLM's dashboards use it",
    "penstock_request_answers": "mostly 1; vLLM's dashboards use it",
    "penstock_request_max_tokens": "generated tokens are shown; vLLM's dashboards use it",
    "penstock_request_preemptions": "preemptions are shown; vLLM's dashboards use it",
    "penstock_step_progress_tokens": "step_tokens is shown; vLLM's dashboards use it",
    "penstock_kv_cache_usage_ratio": "the blocks it is made of are shown",
    "penstock_invalid_logits": "0 unless a checkpoint is damaged; the outcome `failed` is shown",
    "penstock_resumed_requests": "restarts are shown; what became of them, the outcomes tell",
    "penstock_prefix_stateless_tokens": "0 but for models with recurrent states",
    "penstock_encoder_queries": "0 but for models that take images",
    "penstock_encoder_hits": "as above",
    "penstock_encoder_seconds": "as above",
    "penstock_engine_process_virtual_memory_bytes": "mostly the GPU's address space, not memory",
    "penstock_engine_process_start_time_seconds": "the same as the server process's",
    "penstock_engine_process_open_fds": "it opens only its socket",
    "penstock_engine_process_max_fds": "as above",
}


@dataclass(frozen=True, slots=True)
class Scene:
    """The state after the load."""

    prometheus: Prometheus
    metrics: str


@pytest.fixture(scope="module")
def scene(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Scene]:
    home = tmp_path_factory.mktemp("prometheus")
    with (
        _demo_server(home) as server,
        running_prometheus(f"127.0.0.1:{server.port}", home) as prometheus,
    ):
        with load_on(server.url):
            time.sleep(_LOAD_S)
        yield Scene(prometheus, server.get("/metrics").text)


def test_promtool_accepts_the_configuration_and_its_rules() -> None:
    _promtool("check", "config", str(CONFIG))


def test_each_alert_fires_for_the_failing_server_only() -> None:
    _promtool("test", "rules", str(Path(__file__).with_name("alerts_test.yml")))


def test_every_query_of_every_panel_returns_finite_values(scene: Scene) -> None:
    queries = _queries()
    assert len(queries) > 50
    empty = [
        f"{title}: {expr}"
        for title, expr in queries
        if not _is_finite(scene.prometheus.range(_substituted(expr), _WINDOW_S))
    ]
    assert not empty, "\n".join(empty)


def test_every_recording_rule_returns_finite_values(scene: Scene) -> None:
    names = [r["name"] for r in scene.prometheus.rules() if r["type"] == "recording"]
    assert len(names) > 20
    empty = [name for name in names if not _is_finite(scene.prometheus.range(name, _WINDOW_S))]
    assert not empty, empty


def test_every_rule_is_evaluated_without_an_error(scene: Scene) -> None:
    rules = scene.prometheus.rules()
    assert rules and all(rule["health"] == "ok" for rule in rules), rules


def test_no_alert_fires_under_an_ordinary_load(scene: Scene) -> None:
    firing = [r["name"] for r in scene.prometheus.rules() if r.get("state") == "firing"]
    assert not firing


def test_no_query_names_a_metric_that_the_server_lacks(scene: Scene) -> None:
    exported = _sample_names(scene.metrics)
    exprs = [expr for _, expr in _queries()]
    exprs += [rule["query"] for rule in scene.prometheus.rules()]
    named = {name for expr in exprs for name in _names(expr)}
    assert named and named <= exported, named - exported


def test_every_exported_metric_is_shown_or_deliberately_omitted(scene: Scene) -> None:
    shown = {name for _, expr in _queries() for name in _names(expr)}
    families = text_string_to_metric_families(scene.metrics)
    missing = {
        family.name
        for family in families
        if family.name.startswith("penstock_")
        and not shown & {sample.name for sample in family.samples}
    }
    # Beside other programs, and for a page that says why MBU is what it is.
    assert missing - {"penstock_measured_peaks_are_doubtful"} == set(_NOT_SHOWN)


def test_the_load_caused_preemptions_cache_hits_and_disconnects(scene: Scene) -> None:
    """Otherwise the queries above would only see zeros."""
    samples = {
        (sample.name, sample.labels.get("outcome")): sample.value
        for family in text_string_to_metric_families(scene.metrics)
        for sample in family.samples
    }
    for name in ("preemptions", "recomputed_tokens", "cached_prompt_tokens"):
        assert samples[f"penstock_{name}_total", None] > 0, name
    for outcome in ("stop", "length", "abandoned"):
        assert samples["penstock_requests_total", outcome] > 0, outcome


def _promtool(*arguments: str) -> None:
    run = subprocess.run([program("promtool"), *arguments], capture_output=True, text=True)
    assert run.returncode == 0, run.stdout + run.stderr


@contextlib.contextmanager
def _demo_server(home: Path) -> Iterator[RunningServer]:
    """A server whose engine finds its device in hardware.toml, so that peaks and ratios exist."""
    package = home / "penstock"
    package.mkdir()
    for entry in (ROOT / "penstock").iterdir():
        if entry.name != "configs":
            (package / entry.name).symlink_to(entry.resolve())
    shutil.copytree(ROOT / "configs", package / "configs")
    (package / "configs" / "hardware.toml").write_text(_LISTED)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(home))  # the engine process imports this package
        server = RunningServer(*_FLAGS)
    try:
        server.wait_until_ready()
        yield server
    finally:
        server.stop()


def _queries() -> list[tuple[str, str]]:
    """(panel's title, expression)."""
    panels: list[dict[str, Any]] = json.loads(DASHBOARD.read_text())["panels"]
    return [
        (panel["title"], target["expr"]) for panel in panels for target in panel.get("targets", [])
    ]


def _substituted(expr: str) -> str:
    for variable, value in _VARIABLES.items():
        expr = expr.replace(variable, value)
    assert "$" not in expr, expr
    return expr


def _is_finite(series: list[dict[str, Any]]) -> bool:
    """True if there are series and each has a finite value."""
    return bool(series) and all(
        any(math.isfinite(float(value)) for _, value in one["values"]) for one in series
    )


def _names(expr: str) -> set[str]:
    """The server's metrics in an expression, without recorded ones, whose names have a colon."""
    return set(re.findall(r"(?<![\w:])(?:penstock|process|python)_\w+(?![\w:])", expr))


def _sample_names(text: str) -> set[str]:
    return {s.name for family in text_string_to_metric_families(text) for s in family.samples}
