"""Which prompt stands before a text, as sentence-transformers' files say."""

import json
from pathlib import Path
from typing import Any

import pytest

from penstock.scheduler.errors import PenstockError
from penstock.server.errors import InvalidRequest
from penstock.server.prompt.words import NamedPrompts


def prompts_of(directory: Path, **config: Any) -> NamedPrompts:
    (directory / "config_sentence_transformers.json").write_text(json.dumps(config))
    return NamedPrompts.load(directory)


def test_a_default_stands_where_no_name_is_given_and_where_a_use_has_none(tmp_path: Path) -> None:
    prompts = prompts_of(tmp_path, prompts={"a": "A ", "query": "Q "}, default_prompt_name="a")
    found = [prompts.named(name, "task") for name in (None, "query", "document", "clustering")]
    assert found == ["A ", "Q ", "A ", "A "]


def test_a_model_without_prompts_reads_the_text_alone(tmp_path: Path) -> None:
    prompts = NamedPrompts.load(tmp_path)
    assert [prompts.named(name, "input_type") for name in (None, "search_query")] == ["", ""]
    with pytest.raises(InvalidRequest, match="has no prompts"):
        prompts.named("query", "prompt_name")


@pytest.mark.parametrize("wrong", [{"prompts": 7}, {"prompts": {"a": None}}, {}])
@pytest.mark.parametrize("default", [None, "a", ["a"]])
def test_files_without_usable_prompts_have_none(
    tmp_path: Path, wrong: dict[str, Any], default: Any
) -> None:
    assert prompts_of(tmp_path, **wrong, default_prompt_name=default).named(None, "input") == ""


def test_a_file_that_is_no_json_is_named(tmp_path: Path) -> None:
    (tmp_path / "config_sentence_transformers.json").write_text("{")
    with pytest.raises(PenstockError, match="config_sentence_transformers"):
        NamedPrompts.load(tmp_path)
