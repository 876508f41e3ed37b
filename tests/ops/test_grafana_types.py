"""The dashboard checked against Grafana's own types (@grafana/schema) by the TypeScript compiler.

Grafana silently ignores an unknown option; the compiler does not. The versions are the oldest that
we support and the one in docker/compose.yaml.
"""

import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.support.paths import ROOT

_DASHBOARD = ROOT / "configs" / "grafana" / "penstock.json"
_BUILD = ROOT / "build" / "grafana"
_MISSING = "npm is not installed; run: apt-get install nodejs npm"
_VERSIONS = ("10.4.0", "12.2.0")
# In JSON an enum's values are strings, and Grafana fills in missing fields.
_PLAIN = """
type Plain<T> = T extends string ? `${T}` : T extends object ? {[K in keyof T]?: Plain<T[K]>} : T;
"""


@pytest.mark.parametrize("version", _VERSIONS)
def test_grafana_knows_every_option_of_the_dashboard(version: str) -> None:
    home = _installed(version)
    (home / "dashboard.ts").write_text(_typed(home, json.loads(_DASHBOARD.read_text())))
    run = _compile(home)
    assert run.returncode == 0, run.stdout


@pytest.mark.parametrize("version", _VERSIONS)
def test_an_unknown_option_is_reported(version: str) -> None:
    home = _installed(version)
    dashboard = json.loads(_DASHBOARD.read_text())
    panel = next(panel for panel in dashboard["panels"] if panel["type"] == "heatmap")
    panel["options"]["collor"] = {}
    (home / "dashboard.ts").write_text(_typed(home, dashboard))
    assert "'\"collor\"' does not exist" in _compile(home).stdout


def _installed(version: str) -> Path:
    home = _BUILD / version
    if not (home / "node_modules" / "typescript").is_dir():
        assert shutil.which("npm"), _MISSING
        home.mkdir(parents=True, exist_ok=True)
        packages = [f"@grafana/schema@{version}", "typescript@5.9"]
        command = ["npm", "install", "--no-audit", "--no-fund", "--prefix", str(home), *packages]
        run = subprocess.run(command, capture_output=True, text=True)
        assert run.returncode == 0, run.stderr
    return home


def _compile(home: Path) -> subprocess.CompletedProcess[str]:
    flags = ["--noEmit", "--strict", "--skipLibCheck", "--moduleResolution", "bundler"]
    command = ["node_modules/.bin/tsc", *flags, "--module", "esnext", "dashboard.ts"]
    return subprocess.run(command, cwd=home, capture_output=True, text=True)


def _typed(home: Path, dashboard: dict[str, Any]) -> str:
    """TypeScript that gives a type to the dashboard, each panel, its options and its queries."""
    panels = dashboard["panels"]
    dashboards = _declarations(home, "dashboard/x")
    lines = [_PLAIN, f'import type {{Dashboard, Panel, RowPanel}} from "{dashboards}";']
    kinds = sorted({panel["type"] for panel in panels} - {"row"})
    lines += [_import(home, f"{kind}/panelcfg", "Options", kind) for kind in kinds]
    drawn = ("timeseries", "trend")
    lines += [_import(home, f"{kind}/panelcfg", "FieldConfig", kind) for kind in drawn]
    if has_queries := _raw(
        home, "composable/prometheus"
    ).is_dir():  # in later versions a separate package
        lines.append(_import(home, "prometheus/dataquery", "PrometheusDataQuery", "prometheus"))
    lines.append(_constant("Dashboard", dashboard | {"panels": []}))
    for panel in panels:
        lines += _typed_panel(panel)
        if has_queries:
            queries = panel.get("targets", [])
            lines += [_constant("prometheus_PrometheusDataQuery", query) for query in queries]
    return "\n".join(lines)


def _typed_panel(panel: dict[str, Any]) -> list[str]:
    kind = panel["type"]
    if kind == "row":
        return [_constant("RowPanel", panel | {"panels": []})]
    custom = panel["fieldConfig"]["defaults"].get("custom")
    lines = [
        _constant("Panel", panel | {"options": {}, "targets": []}),
        _constant(f"{kind}_Options", panel["options"]),
    ]
    return lines + ([_constant(f"{kind}_FieldConfig", custom)] if custom else [])


def _import(home: Path, folder: str, name: str, prefix: str) -> str:
    module = _declarations(home, f"composable/{folder}/x")
    return f'import type {{{name} as {prefix}_{name}}} from "{module}";'


def _declarations(home: Path, folder: str) -> str:
    """The module of a folder, as TypeScript in `home` imports it."""
    file = next(_raw(home, folder).glob("*_types.gen.d.ts"))
    return "./" + str(file.relative_to(home)).removesuffix(".d.ts")


def _raw(home: Path, folder: str) -> Path:
    """The folder of the types that are generated from the schema, which differs by version."""
    dist = home / "node_modules" / "@grafana" / "schema" / "dist"
    root = dist / "types" if (dist / "types").is_dir() else dist / "esm"
    return root / "raw" / folder


def _constant(kind: str, value: Any) -> str:
    """In a block of its own, so that the name can be reused."""
    return f"{{ const value: Plain<{kind}> = {json.dumps(value)}; void value; }}"
