"""penstock.json is generated from its module and consistent. `make test-ops` runs its queries."""

import json
import re
from typing import Any

import pytest
import yaml

from penstock.server.observability.exposition import REQUEST_SECONDS, STEP_SECONDS
from tests.ops.dashboard.build import TPOT_LIMITS, TTFT_LIMITS, build
from tests.ops.dashboard.panels import COLUMNS
from tests.support.paths import ROOT

CONFIGS = ROOT / "configs"
# Ids of Grafana's own units.
_UNITS = {"short", "s", "percentunit", "reqps", "bytes", "Bps", "flops"}


def _dashboard() -> dict[str, Any]:
    text = (CONFIGS / "grafana" / "penstock.json").read_text()
    dashboard: dict[str, Any] = json.loads(text)
    return dashboard


def _panels() -> list[dict[str, Any]]:
    """All but the rows' headings."""
    return [panel for panel in _dashboard()["panels"] if panel["type"] != "row"]


def test_the_file_is_up_to_date() -> None:
    """If this fails: make dashboard"""
    assert _dashboard() == json.loads(json.dumps(build()))


def test_ids_and_titles_are_unique() -> None:
    ids = [panel["id"] for panel in _dashboard()["panels"]]
    assert len(ids) == len(set(ids))
    titles = [(panel["title"], panel["type"]) for panel in _panels()]
    assert len(titles) == len(set(titles))


def test_panels_fit_the_grid_without_overlap() -> None:
    covered: set[tuple[int, int]] = set()
    for panel in _dashboard()["panels"]:
        place = panel["gridPos"]
        assert place["x"] + place["w"] <= COLUMNS
        columns, lines = range(place["x"], place["x"] + place["w"]), range(place["h"])
        cells = {(x, place["y"] + line) for x in columns for line in lines}
        assert not cells & covered, panel["title"]
        covered |= cells


def test_every_panel_has_a_unit_a_description_and_queries() -> None:
    for panel in _panels():
        assert panel["fieldConfig"]["defaults"]["unit"] in _UNITS, panel["title"]
        assert panel["description"].endswith("."), panel["title"]
        ref_ids = [target["refId"] for target in panel["targets"]]
        assert ref_ids and len(ref_ids) == len(set(ref_ids)), panel["title"]


def test_every_override_matches_a_legend_of_its_panel() -> None:
    """Grafana ignores an override that matches nothing."""
    for panel in _panels():
        legends = [
            re.sub(r"{{\w+}}", "decode", target["legendFormat"]) for target in panel["targets"]
        ]
        for rule in panel["fieldConfig"]["overrides"]:
            pattern = rule["matcher"]["options"]
            assert pattern.startswith("/") and pattern.endswith("/"), panel["title"]
            if rule["properties"][0]["id"] == "color":
                continue  # matches label values, which come with the data
            assert any(re.search(pattern[1:-1], legend) for legend in legends), pattern


def test_every_query_uses_the_selected_datasource_and_servers() -> None:
    for panel in _panels():
        assert panel["datasource"]["uid"] == "${datasource}"
        for target in panel["targets"]:
            assert target["datasource"]["uid"] == "${datasource}"
            selectors = target["expr"].count("{")
            assert selectors and target["expr"].count('{job=~"$job",instance=~') == selectors
    for variable in _dashboard()["templating"]["list"]:
        if variable["type"] == "query":
            assert variable["datasource"]["uid"] == "${datasource}"


def test_the_selectable_limits_are_bounds_of_buckets() -> None:
    assert set(TTFT_LIMITS.values()) <= set(map(str, REQUEST_SECONDS))
    assert set(TPOT_LIMITS.values()) <= set(map(str, STEP_SECONDS))


def test_the_dashboard_has_every_panel_that_the_runbook_names() -> None:
    runbook = (CONFIGS / "prometheus" / "RUNBOOK.md").read_text()
    named = set(re.findall(r'"([A-Z][^"\n]+)"', runbook))
    titles = {panel["title"] for panel in _panels()}
    assert len(named) > 5
    assert named <= titles


def _alerts() -> list[dict[str, Any]]:
    text = (CONFIGS / "prometheus" / "rules" / "alerts.yml").read_text()
    return [rule for group in yaml.safe_load(text)["groups"] for rule in group["rules"]]


@pytest.mark.parametrize("alert", _alerts(), ids=lambda alert: str(alert["alert"]))
def test_an_alert_has_annotations_a_runbook_section_and_a_test_case(alert: dict[str, Any]) -> None:
    assert alert["labels"]["severity"] in {"page", "ticket"}
    assert set(alert["annotations"]) == {"summary", "description", "runbook"}
    runbook = (CONFIGS / "prometheus" / "RUNBOOK.md").read_text()
    assert f"\n## {alert['alert']}\n" in runbook
    cases = (ROOT / "tests" / "ops" / "alerts_test.yml").read_text()
    assert f'ALERTS{{alertname="{alert["alert"]}"' in cases
