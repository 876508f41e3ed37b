"""Grafana's dashboard format (10.4 and later): panels as dictionaries, and their layout.

This module knows no metrics. A panel is made with a width and a height; the layout of the rows
gives it a position and an id.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

Panel = dict[str, Any]
COLUMNS = 24
DATASOURCE = {"type": "prometheus", "uid": "${datasource}"}


@dataclass(frozen=True, slots=True)
class Query:
    """legend: holds {{label}} if the query returns several series. format: or heatmap, or table."""

    expr: str
    legend: str = ""
    format: str = "time_series"
    is_instant: bool = False


@dataclass(frozen=True, slots=True)
class Row:
    title: str
    panels: Sequence[Panel]


def stat(
    title: str, text: str, unit: str, query: Query, thresholds: Sequence[tuple[float, str]] = ()
) -> Panel:
    """One number above its graph. thresholds: (lower bound, colour)."""
    # At a height of 4, Grafana omits the graph.
    panel = _panel("stat", title, text, unit, [query], width=3, height=5)
    panel["fieldConfig"]["defaults"]["thresholds"] = _steps(thresholds)
    # Without requests a ratio or a quantile has no value, and the panel would be blank.
    panel["fieldConfig"]["defaults"]["noValue"] = "-"
    panel["options"] = {
        "colorMode": "value" if thresholds else "none",
        "graphMode": "area",
        "justifyMode": "auto",
        "orientation": "auto",
        "reduceOptions": {"calcs": ["lastNotNull"], "fields": "", "values": False},
        "textMode": "value",
    }
    return panel


def timeseries(
    title: str,
    text: str,
    unit: str,
    *queries: Query,
    width: int = 8,
    is_stacked: bool = False,
    maximum: float | None = None,
    limits: Sequence[str] = (),
    right: dict[str, str] | None = None,
    colors: dict[str, str] | None = None,
) -> Panel:
    """Lines over time, or stacked areas.

    limits: patterns of legends that are drawn dashed, as upper bounds.
    right: patterns of legends on the right axis, and its unit.
    colors: by pattern, for legends that appear in several panels or mean something good or bad.
    """
    panel = _panel("timeseries", title, text, unit, queries, width=width, height=8)
    defaults = panel["fieldConfig"]["defaults"]
    defaults["min"] = 0
    if maximum is not None:
        defaults["max"] = maximum
    defaults["custom"] = {
        "drawStyle": "line",
        "fillOpacity": 30 if is_stacked else 8,
        "lineWidth": 1,
        "showPoints": "never",
        "spanNulls": False,
        "stacking": {"group": "A", "mode": "normal" if is_stacked else "none"},
    }
    dashed = [
        ("custom.lineStyle", {"dash": [8, 6], "fill": "dash"}),
        ("custom.fillOpacity", 0),
        ("custom.lineWidth", 2),
    ]
    overrides = [_override(pattern, dashed) for pattern in limits]
    for pattern, right_unit in (right or {}).items():
        properties = [("custom.axisPlacement", "right"), ("unit", right_unit)]
        overrides.append(_override(pattern, properties))
    panel["fieldConfig"]["overrides"] = overrides + _colored(colors)
    panel["options"] = {
        # A table would take half of the panel and show only two of four quantiles.
        "legend": {"calcs": [], "displayMode": "list", "placement": "bottom"},
        "tooltip": {"mode": "multi", "sort": "desc"},
    }
    return panel


def heatmap(title: str, text: str, unit: str, query: Query, width: int = 8) -> Panel:
    """A histogram's buckets over time. unit: of the measured value; the colours show counts."""
    panel = _panel("heatmap", title, text, unit, [query], width=width, height=8)
    panel["options"] = {
        "calculate": False,
        "cellGap": 0,
        "cellValues": {"unit": "short"},
        "color": {"exponent": 0.4, "mode": "scheme", "scheme": "Oranges", "steps": 64},
        "filterValues": {"le": 1e-9},
        "legend": {"show": True},
        "rowsFrame": {"layout": "auto"},
        "tooltip": {"mode": "single", "showColorScale": False, "yHistogram": True},
        "yAxis": {"axisPlacement": "left", "reverse": False, "unit": unit},
    }
    return panel


def scatter(title: str, text: str, unit: str, x: Query, *ys: Query) -> Panel:
    """Points of each y against x, one for each moment of the time range."""
    panel = _panel("trend", title, text, unit, [x, *ys], width=8, height=8)
    panel["fieldConfig"]["defaults"]["min"] = 0
    panel["fieldConfig"]["defaults"]["custom"] = {
        "drawStyle": "points",
        "pointSize": 5,
        "showPoints": "always",
    }
    panel["fieldConfig"]["overrides"] = [
        _override(f"^{x.legend}$", [("unit", "short"), ("custom.axisLabel", x.legend)])
    ]
    # A trend panel requires one table, sorted by x.
    panel["transformations"] = [
        {"id": "joinByField", "options": {"byField": "Time", "mode": "inner"}},
        {"id": "organize", "options": {"excludeByName": {"Time": True}}},
        {"id": "sortBy", "options": {"sort": [{"field": x.legend}]}},
    ]
    panel["options"] = {
        "legend": {"calcs": [], "displayMode": "list", "placement": "bottom"},
        "tooltip": {"mode": "multi", "sort": "none"},
        "xField": x.legend,
    }
    return panel


def shares(title: str, text: str, unit: str, query: Query, colors: dict[str, str]) -> Panel:
    """A donut chart. colors: as in `timeseries`."""
    panel = _panel("piechart", title, text, unit, [query], width=8, height=8)
    panel["fieldConfig"]["overrides"] = _colored(colors)
    panel["options"] = {
        "displayLabels": ["percent"],
        "legend": {"displayMode": "table", "placement": "right", "values": ["value", "percent"]},
        "pieType": "donut",
        "reduceOptions": {"calcs": ["lastNotNull"], "fields": "", "values": False},
        "tooltip": {"mode": "single", "sort": "none"},
    }
    return panel


def bars(title: str, text: str, unit: str, query: Query) -> Panel:
    """One bar for the latest value of each series."""
    panel = _panel("bargauge", title, text, unit, [query], width=8, height=8)
    panel["fieldConfig"]["defaults"]["min"] = 0
    panel["options"] = {
        "displayMode": "basic",
        "orientation": "horizontal",
        "reduceOptions": {"calcs": ["lastNotNull"], "fields": "", "values": False},
        "showUnfilled": True,
        "valueMode": "color",
    }
    return panel


def table(title: str, text: str, query: Query) -> Panel:
    """The labels of the latest samples; the values, always 1, are hidden."""
    panel = _panel("table", title, text, "short", [query], width=12, height=5)
    hidden = {"Time": True, "Value": True, "__name__": True, "job": True}
    panel["transformations"] = [{"id": "organize", "options": {"excludeByName": hidden}}]
    panel["options"] = {"cellHeight": "sm", "showHeader": True}
    return panel


def dashboard(
    uid: str, title: str, text: str, variables: list[Panel], rows: Sequence[Row]
) -> Panel:
    return {
        "uid": uid,
        "title": title,
        "description": text,
        "tags": ["penstock", "llm"],
        "schemaVersion": 39,
        "editable": True,
        "graphTooltip": 1,
        "refresh": "10s",
        "time": {"from": "now-30m", "to": "now"},
        "timezone": "browser",
        "templating": {"list": variables},
        "panels": _lay_out(rows),
    }


def datasource_variable() -> Panel:
    return {
        "name": "datasource",
        "label": "Datasource",
        "type": "datasource",
        "query": "prometheus",
        "refresh": 1,
    }


def label_variable(name: str, label: str, query: str) -> Panel:
    """A choice of several of a label's values. query: of Prometheus's datasource.

    "All" means all listed values, not any value, so that choosing a model limits the instances.
    """
    return {
        "name": name,
        "label": label,
        "type": "query",
        "datasource": DATASOURCE,
        "query": {"query": query, "refId": "A"},
        "refresh": 2,
        "sort": 1,
        "multi": True,
        "includeAll": True,
        "current": {"text": ["All"], "value": ["$__all"]},
    }


def choice_variable(name: str, label: str, choices: dict[str, str], chosen: str) -> Panel:
    """choices: the value of each displayed text."""
    return {
        "name": name,
        "label": label,
        "type": "custom",
        "query": ", ".join(f"{text} : {value}" for text, value in choices.items()),
        "options": [
            {"text": text, "value": value, "selected": text == chosen}
            for text, value in choices.items()
        ],
        "current": {"text": chosen, "value": choices[chosen], "selected": True},
        "multi": False,
        "includeAll": False,
    }


def _panel(
    kind: str,
    title: str,
    text: str,
    unit: str,
    queries: Sequence[Query],
    *,
    width: int,
    height: int,
) -> Panel:
    return {
        "type": kind,
        "title": title,
        "description": text,
        "datasource": DATASOURCE,
        "gridPos": {"w": width, "h": height},
        "fieldConfig": {"defaults": {"unit": unit}, "overrides": []},
        "targets": [_target(query, chr(ord("A") + i)) for i, query in enumerate(queries)],
    }


def _target(query: Query, ref_id: str) -> Panel:
    return {
        "refId": ref_id,
        "datasource": DATASOURCE,
        "editorMode": "code",
        "expr": query.expr,
        "format": query.format,
        "instant": query.is_instant,
        "range": not query.is_instant,
        "legendFormat": query.legend or "__auto",
    }


def _steps(thresholds: Sequence[tuple[float, str]]) -> Panel:
    steps: list[Panel] = [{"color": "green", "value": None}]
    steps += [{"color": color, "value": value} for value, color in thresholds]
    return {"mode": "absolute", "steps": steps}


def _override(pattern: str, properties: Sequence[tuple[str, Any]]) -> Panel:
    return {
        # Without slashes Grafana compares the whole name.
        "matcher": {"id": "byRegexp", "options": f"/{pattern}/"},
        "properties": [{"id": name, "value": value} for name, value in properties],
    }


def _colored(colors: dict[str, str] | None) -> list[Panel]:
    return [
        _override(pattern, [("color", {"mode": "fixed", "fixedColor": color})])
        for pattern, color in (colors or {}).items()
    ]


def _lay_out(rows: Sequence[Row]) -> list[Panel]:
    """The rows' headings and panels with ids and positions, from left to right, then down."""
    placed: list[Panel] = []
    x = y = height = 0
    for row in rows:
        heading: Panel = {"type": "row", "title": row.title, "panels": [], "collapsed": False}
        for panel in (heading | {"gridPos": {"w": COLUMNS, "h": 1}}, *row.panels):
            size = panel["gridPos"]
            if x + size["w"] > COLUMNS:
                x, y, height = 0, y + height, 0
            place = {"x": x, "y": y, "w": size["w"], "h": size["h"]}
            placed.append({"id": len(placed) + 1} | panel | {"gridPos": place})
            x += size["w"]
            height = max(height, size["h"])
    return placed
