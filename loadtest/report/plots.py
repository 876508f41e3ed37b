"""The report's figures as PNG files. Needs matplotlib, from the extra `penstock[plot]`."""

from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from penstock.loadtest.report.figures import PARTS, Figure, Timeline
from penstock.loadtest.report.svg import short_number
from penstock.scheduler.errors import InvalidConfig

if TYPE_CHECKING:
    from matplotlib.axes import Axes

SIZE_INCHES, DPI = (8.0, 4.5), 150
COLOURS = ("#2563eb", "#c2410c", "#059669", "#be123c", "#7c3aed")


def check_matplotlib() -> None:
    """Raises InvalidConfig if it is missing: before the load runs, not after it."""
    if find_spec("matplotlib") is None:
        raise InvalidConfig(
            "--plot-dir requires matplotlib; install it with: pip install 'penstock[plot]'"
        )


def save_plots(figures: list[Figure], directory: Path) -> list[Path]:
    """One file per figure, named by its slug."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure as Sheet

    directory.mkdir(parents=True, exist_ok=True)
    paths = []
    for figure in figures:
        sheet = Sheet(figsize=SIZE_INCHES, layout="constrained")
        FigureCanvasAgg(sheet)
        _draw(figure, sheet.subplots())
        paths.append(directory / f"{figure.slug}.png")
        sheet.savefig(paths[-1], dpi=DPI)
    return paths


def _draw(figure: Figure, axes: "Axes") -> None:
    axes.set_title(figure.title)
    axes.set_xlabel(figure.x_label)
    axes.grid(alpha=0.3)
    if isinstance(figure, Timeline):
        _draw_timeline(figure, axes)
        return
    axes.set_ylabel(figure.y_label)
    for series, colour in zip(figure.series, COLOURS, strict=False):
        if not series.xs:
            continue
        marker = "o" if series.has_marks else None
        axes.plot(
            series.xs,
            series.ys,
            label=series.name,
            color=colour,
            marker=marker,
            linestyle="-" if series.has_line else "",
        )
    axes.set_xlim(left=0)
    axes.set_ylim(bottom=0)
    for mark in figure.marks:
        label = f"{mark.name} {short_number(mark.x)}"
        axes.plot([mark.x], [mark.y], "o", color=COLOURS[1], label=label)
    if len(figure.series) > 1 or figure.marks:
        axes.legend()


def _draw_timeline(figure: Timeline, axes: "Axes") -> None:
    for part, colour in zip(PARTS, COLOURS, strict=False):
        spans = [
            (row, span)
            for row, spans in enumerate(figure.rows)
            for span in spans
            if span.part == part
        ]
        axes.barh(
            [row for row, _ in spans],
            [span.end_s - span.start_s for _, span in spans],
            left=[span.start_s for _, span in spans],
            height=0.8,
            color=colour,
            label=part,
        )
    axes.set_ylabel("requests")
    axes.invert_yaxis()
    axes.legend()
