"""Draws a dashboard with Prometheus's results in Chromium, using Grafana's own components.

These are npm packages, installed into build/picture; Grafana itself is not needed.
"""

import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

from tests.support.browser import running_browser
from tests.support.paths import ROOT

WIDTH = 1600
_HERE = Path(__file__).parent
_BUILD = ROOT / "build" / "picture"
_MISSING = "node and npm are not installed; run: apt-get install nodejs npm"
_ESBUILD = (
    "--bundle",
    "--jsx=automatic",
    "--log-level=error",
    "--define:global=window",
    '--define:process.env.NODE_ENV="production"',
    "--loader:.woff=dataurl",
    "--loader:.woff2=dataurl",
    "--loader:.svg=dataurl",
    "--loader:.ttf=empty",
)


def build_page() -> None:
    """Installs the packages of package.json, once, and bundles the page."""
    assert shutil.which("node") and shutil.which("npm"), _MISSING
    _BUILD.mkdir(parents=True, exist_ok=True)
    wanted = (_HERE / "package.json").read_text()
    installed = _BUILD / "package.json"
    if not installed.is_file() or installed.read_text() != wanted:
        _install(wanted)
    for source in (*_HERE.glob("*.js"), *_HERE.glob("*.jsx"), _HERE / "page.html"):
        shutil.copy(source, _BUILD)
    _run("node_modules/.bin/esbuild", "page.jsx", "--outfile=bundle.js", *_ESBUILD)


def draw(dashboard: dict[str, Any], scene: dict[str, Any], home: Path) -> dict[str, Any]:
    """Writes home/dashboard.png. Returns {failed: {title: reason}, empty, console_errors}."""
    (_BUILD / "dashboard.js").write_text(f"window.DASHBOARD = {json.dumps(dashboard)};")
    (_BUILD / "scene.js").write_text(f"window.SCENE = {json.dumps(scene)};")
    with running_browser(home / "profile") as new_page:
        page = new_page()
        page.emulate(width=WIDTH, height=_height(dashboard), scheme="dark")
        page.open((_BUILD / "page.html").as_uri())
        page.wait("window.DRAWN", timeout_s=60)
        page.screenshot(home / "dashboard.png")
        drawn: dict[str, Any] = page.js("window.DRAWN")
        return drawn | {"console_errors": page.console_errors()}


def _height(dashboard: dict[str, Any]) -> int:
    """In pixels: rows of Grafana's grid are 30 pixels high and 8 apart."""
    places = [panel["gridPos"] for panel in dashboard["panels"]]
    lines: int = max(place["y"] + place["h"] for place in places)
    return lines * 38 + 8


def _install(wanted: str) -> None:
    shutil.rmtree(_BUILD / "node_modules", ignore_errors=True)
    staged = _BUILD / "package.json"
    staged.write_text(wanted)
    try:
        # Some of the packages still require an older React.
        _run(
            "npm",
            "install",
            "--no-audit",
            "--no-fund",
            "--no-package-lock",
            "--ignore-scripts",
            "--legacy-peer-deps",
        )
    except AssertionError:
        staged.unlink()
        raise


def _run(*command: str) -> None:
    run = subprocess.run(command, cwd=_BUILD, capture_output=True, text=True)
    assert run.returncode == 0, f"{command[0]} failed: {run.stderr}"
