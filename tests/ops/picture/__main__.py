"""`make dashboard-picture`: redraws configs/grafana/dashboard.png after a change of the dashboard.

It shows the rows that matter most to a newcomer, after five minutes of load on a demo server.
"""

import json
import tempfile
from pathlib import Path
from typing import Any

from PIL import Image

from tests.ops.picture.draw import build_page, draw
from tests.ops.picture.scene import DASHBOARD, record
from tests.support.browser import chromium

_PICTURE = DASHBOARD.with_name("dashboard.png")
_ROWS = ("Overview", "Latency", "Throughput", "Roofline")
_LOAD_S = 270
_MAX_BYTES = 400_000


def main() -> None:
    chromium()
    build_page()
    with tempfile.TemporaryDirectory() as folder:
        home = Path(folder)
        dashboard = _only(json.loads(DASHBOARD.read_text()), _ROWS)
        drawn = draw(dashboard, record(home, _LOAD_S), home)
        assert not any(drawn.values()), drawn
        _save(home / "dashboard.png", _PICTURE)
    print(f"{_PICTURE}: {_PICTURE.stat().st_size // 1000} kB")


def _only(dashboard: dict[str, Any], rows: tuple[str, ...]) -> dict[str, Any]:
    """The dashboard with only these rows, moved up to close the gaps."""
    kept: list[dict[str, Any]] = []
    gap = 0
    is_kept = True
    for panel in dashboard["panels"]:
        place = panel["gridPos"]
        if panel["type"] == "row":
            is_kept = panel["title"] in rows
            end = max((p["gridPos"]["y"] + p["gridPos"]["h"] for p in kept), default=0)
            gap = place["y"] - end
        if is_kept:
            kept.append(panel | {"gridPos": place | {"y": place["y"] - gap}})
    return dashboard | {"panels": kept}


def _save(screenshot: Path, picture: Path) -> None:
    """Saves with as many colours as fit into `_MAX_BYTES`."""
    image = Image.open(screenshot).convert("RGB")
    for colors in (256, 128, 64, 32):
        # By coverage, so that the few pixels of a thin line keep their colour beside the heatmaps.
        few = image.quantize(colors, Image.Quantize.MAXCOVERAGE, dither=Image.Dither.NONE)
        few.save(picture, optimize=True)
        if picture.stat().st_size <= _MAX_BYTES:
            return
    raise AssertionError(f"{picture} has more than {_MAX_BYTES} bytes; show fewer rows")


if __name__ == "__main__":
    main()
