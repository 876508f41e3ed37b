"""A comparison as a table for the terminal, and the alignment of any table."""

from collections.abc import Callable, Sequence

from penstock.loadtest.report.comparison import Comparison, table


def comparison_text(comparison: Comparison) -> str:
    sides = [f"{side.name}  {side.described()}" for side in comparison.sides]
    head, rows = table(comparison, lambda low, high: f" ({low}-{high})")
    cells = [[cell.text for cell in row] for row in (head, *rows)]
    return "\n".join([*sides, "", *aligned(cells, lambda column: not head[column].is_number)])


def aligned(
    rows: Sequence[Sequence[str]], is_text: Callable[[int], bool] = lambda column: column == 0
) -> list[str]:
    """Columns of text to the left, of numbers to the right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(
            cell.ljust(width) if is_text(column) else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]
