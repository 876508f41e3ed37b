"""The dashboard, drawn by Grafana's own components with data of a real Prometheus."""

import copy
import json
from pathlib import Path
from typing import Any

import pytest

from tests.ops.picture.draw import build_page, draw
from tests.ops.picture.scene import DASHBOARD, record

Scene = dict[str, Any]


@pytest.fixture(scope="module")
def scene(tmp_path_factory: pytest.TempPathFactory) -> Scene:
    build_page()
    return record(tmp_path_factory.mktemp("prometheus"), load_s=20)


def test_every_panel_draws_without_an_error_and_has_data(scene: Scene, tmp_path: Path) -> None:
    drawn = draw(_dashboard(), scene, tmp_path)
    assert drawn == {"failed": {}, "empty": [], "console_errors": []}


def test_a_panel_that_cannot_be_drawn_is_reported(scene: Scene, tmp_path: Path) -> None:
    dashboard = _dashboard()
    panels = {panel["title"]: panel for panel in dashboard["panels"]}
    panels["Running"]["type"] = "statistic"
    panels["Queue time"]["fieldConfig"]["defaults"]["colour"] = {"mode": "fixed"}
    without_data = copy.deepcopy(scene)
    without_data["results"][panels["Waiting"]["id"]]["A"] = []
    drawn = draw(dashboard, without_data, tmp_path)
    assert set(drawn["failed"]) == {"Running", "Queue time"}
    assert drawn["empty"] == ["Waiting"]


def _dashboard() -> dict[str, Any]:
    dashboard: dict[str, Any] = json.loads(DASHBOARD.read_text())
    return dashboard
