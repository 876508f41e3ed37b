"""The tables of the README that are made from the code, so that they cannot be wrong.

    python -m tests.docs.tables flags          prints one of them
    python -m tests.docs.tables --write        puts all into the README, between their marks

A test fails where the README has another text than this.
"""

import argparse
import re
import sys
from collections.abc import Callable, Sequence
from dataclasses import fields, replace
from typing import Any

from prometheus_client.core import Metric

from penstock.engine.executor import ModelInfo
from penstock.scheduler.errors import PenstockError
from tests.support.paths import ROOT

README = ROOT / "README.md"
_DEFAULT = re.compile(r"^(?P<what>.*?)\s*\((?P<default>default: .*)\)$", re.DOTALL)


class BadMarks(PenstockError):
    """It is not clear where a table goes."""


def flags() -> str:
    """All flags of `penstock serve`, a table for each group of its help."""
    from penstock.server.cli import add_serve_flags

    parser = argparse.ArgumentParser()
    add_serve_flags(parser)
    tables = []
    # Private, but argparse has no other way to tell which flag is in which group.
    for group in parser._action_groups:
        actions = [action for action in group._group_actions if action.dest != "help"]
        if actions and any(action.option_strings for action in actions):
            rows = [_flag_row(action) for action in actions]
            tables.append(f"**{group.title}**\n\n" + _table(("flag", "default", "what"), rows))
    return "\n".join(tables)


def _flag_row(action: argparse.Action) -> tuple[str, str, str]:
    what, default = split_default(action)
    return f"`{_usage(action)}`", default, what


def _usage(action: argparse.Action) -> str:
    """As it is typed."""
    names = " ".join(action.option_strings)
    if isinstance(action, argparse.BooleanOptionalAction):
        return names.replace(" --no-", ", --no-")
    if action.nargs == 0:
        return names
    values = "|".join(map(str, action.choices)) if action.choices else str(action.metavar or "N")
    return f"{names} {values}" + (" ..." if action.nargs == "+" else "")


def split_default(action: argparse.Action) -> tuple[str, str]:
    """A flag's help without its last words, and the default that these tell.

    Raises ValueError for a help that does not tell it.
    """
    told = (action.help or "") % {"default": action.default, "prog": "penstock serve"}
    found = _DEFAULT.match(told)
    if not found:
        raise ValueError(
            f"the help of {action.option_strings[-1]} must end with '(default: ...)': {told!r}"
        )
    return found["what"], found["default"].removeprefix("default: ")


def _table(header: tuple[str, ...], rows: Sequence[tuple[str, ...]]) -> str:
    lines = (header, ("---",) * len(header), *rows)
    return "".join(f"| {' | '.join(map(_cell, line))} |\n" for line in lines)


def _cell(words: str) -> str:
    return " ".join(words.split()).replace("|", "\\|")


def metrics() -> str:
    """All series of /metrics that are ours, as they are once a model is loaded."""
    rows = [_metric_row(family) for family in families()]
    return _table(("metric", "kind", "labels", "what"), rows)


def families() -> list[Metric]:
    """What a server tells whose device's peaks are known."""
    from penstock.server.observability.metrics import Metrics

    told = Metrics()
    told.on_response("/v1/completions", "POST", 200)
    told.on_ready(on_known_hardware())
    return list(told.families())


def on_known_hardware() -> ModelInfo:
    """A model on a device whose peaks are known."""
    from penstock.engine.executors.scripted import scripted_info

    info = scripted_info()
    peaks: dict[str, Any] = {
        field.name: 1.0 for field in fields(info) if field.name.endswith("_per_s")
    }
    return replace(info, load_seconds={"weights": 1.0}, **peaks)


def _metric_row(family: Metric) -> tuple[str, ...]:
    ending = {"counter": "_total", "info": "_info"}.get(family.type, "")
    labels = dict.fromkeys(label for sample in family.samples for label in sample.labels)
    shown = ", ".join(f"`{label}`" for label in labels if label != "le")
    return f"`{family.name}{ending}`", family.type, shown, family.documentation


def sizing() -> str:
    """How many sequences fit, of two models on two devices."""
    from penstock.engine.sizing import example_table

    return example_table()


TABLES: dict[str, Callable[[], str]] = {"flags": flags, "metrics": metrics, "sizing": sizing}


def with_tables(text: str) -> str:
    """The same text, with what is between the marks of each table made anew.

    Raises BadMarks where a table has only one of its marks, or has them twice.
    """
    for name, make in TABLES.items():
        begin, end = marks(name)
        if begin not in text and end not in text:
            continue
        if text.count(begin) != 1 or text.count(end) != 1:
            raise BadMarks(f"write the lines {begin} and {end} once each")
        before, rest = text.split(begin)
        text = f"{before}{begin}\n\n{make()}\n{end}{rest.split(end)[1]}"
    return text


def marks(name: str) -> tuple[str, str]:
    """Comments of markdown, which nobody sees who reads the page."""
    return f"<!-- {name}: made by `make readme` -->", f"<!-- {name}: end -->"


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tests.docs.tables", description="The README's tables."
    )
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("table", nargs="?", choices=TABLES, help="print this one")
    what.add_argument("--write", action="store_true", help="put all of them into the README")
    options = parser.parse_args(argv)
    if not options.write:
        print(TABLES[options.table](), end="")
        return 0
    try:
        README.write_text(with_tables(README.read_text(encoding="utf-8")), encoding="utf-8")
    except (OSError, BadMarks) as error:
        print(f"{README.name}: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
