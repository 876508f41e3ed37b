"""`penstock bench compare`: results of penstock or vLLM side by side. Owns the command line."""

from pathlib import Path

from penstock.loadtest.bench.config import check_writable
from penstock.loadtest.bench.results import say, show_text, write_file
from penstock.loadtest.command_line import BenchParser, exit_status
from penstock.loadtest.report.comparison import compare, comparison_text, read_sides
from penstock.loadtest.report.comparison_html import comparison_html


def main(argv: list[str]) -> int:
    """Returns the exit status: 2 for files that cannot be compared."""
    return exit_status(lambda: _compare(argv), "penstock bench")


def _compare(argv: list[str]) -> int:
    options = _parser().parse_args(argv)
    if options.html is not None:
        check_writable("--html", options.html)
    comparison = compare(read_sides(options.results))
    for note in comparison.notes:
        say(note)
    show_text(comparison_text(comparison))
    if options.html is not None:
        write_file(options.html, comparison_html(comparison).encode())
        say(f"comparison written to {options.html}")
    return 0


def _parser() -> BenchParser:
    parser = BenchParser(
        prog="penstock bench compare",
        description="""\
Show results of penstock bench or vllm bench serve side by side: their values,
the ratio to the first, and which of the two is better. With repeated runs, a
value is their median, and a difference counts only where the ranges of the
runs do not overlap.

  penstock bench compare before.json after.json --html compared.html
  penstock bench compare before1.json,before2.json after1.json,after2.json""",
    )
    parser.add_argument(
        "results",
        nargs="+",
        metavar="FILE",
        help="of --save-result, or of --append-result for repeated runs; commas join the files of "
        "repeated runs",
    )
    parser.add_argument("--html", type=Path, metavar="FILE", help="write a page too")
    return parser
