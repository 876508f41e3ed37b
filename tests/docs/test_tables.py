"""The docs say what the code does: their tables are made from it, their metrics exist."""

import argparse
import re

import pytest

from penstock.server.flags.serve_flags import add_serve_flags
from tests.docs.tables import (
    DOCS,
    TABLES,
    BadMarks,
    families,
    main,
    marks,
    page_of,
    with_table,
)
from tests.docs.tables import split_default as split


@pytest.mark.parametrize("name", TABLES)
def test_a_page_has_the_table_that_the_code_makes(name: str) -> None:
    text = page_of(name).read_text(encoding="utf-8")
    assert with_table(name, text) == text, "run `make docs`"


def flags() -> list[argparse.Action]:
    parser = argparse.ArgumentParser()
    add_serve_flags(parser)
    return [action for action in parser._actions if action.dest != "help"]


@pytest.mark.parametrize("flag", flags(), ids=lambda flag: flag.dest)
def test_the_help_of_every_flag_says_what_it_does_and_its_default(flag: argparse.Action) -> None:
    what, default = split(flag)
    assert what and default
    if flag.default and not isinstance(flag.default, bool | tuple) and flag.type is not None:
        assert default.startswith(str(flag.default)) or flag.dest == "pooler_config"


def test_every_flag_is_in_the_table() -> None:
    table = TABLES["flags"]()
    for flag in flags():
        for name in flag.option_strings:
            assert re.search(rf"\| `[^`]*{name}\b", table), name


def test_every_metric_that_the_docs_name_exists() -> None:
    exported = {sample.name for family in families() for sample in family.samples}
    exported |= {family.name for family in families()}
    pages = "".join(page.read_text(encoding="utf-8") for page in DOCS.glob("*.md"))
    named = set(re.findall(r"\bpenstock_[a-z_]+\b(?![*`]?\*)", pages))
    assert len(named) > 30
    assert named <= exported


def test_a_flag_whose_help_has_no_default_is_refused() -> None:
    parser = argparse.ArgumentParser()
    flag = parser.add_argument("--silent", help="says nothing of it")
    with pytest.raises(ValueError, match="the help of --silent must end with"):
        split(flag)


def test_a_page_with_wrong_marks_is_refused() -> None:
    begin, end = marks("flags")
    wrong = ("no table here", f"{begin}\n", f"{begin}\n{begin}\n{end}\n", f"{end}\n{begin}\n")
    for text in wrong:
        with pytest.raises(BadMarks, match="once each"):
            with_table("flags", text)


def test_each_table_can_be_printed(capsys: pytest.CaptureFixture[str]) -> None:
    for name, make in TABLES.items():
        assert main([name]) == 0
        assert capsys.readouterr().out == make()
