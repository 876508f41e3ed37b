"""Pooling is read from the model's directory, in the layout of sentence-transformers."""

import json
import struct
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from penstock.engine.executors.scripted import scripted_info
from penstock.scheduler.errors import PenstockError
from penstock.scheduler.types import Pooling
from penstock.server.command_line.cli import main
from penstock.server.config import PoolerConfig
from penstock.server.errors import InvalidRequest, UnsupportedParameter
from penstock.server.output.pooling import Pooler

DEFAULTS = PoolerConfig()
TRANSFORMER = {"idx": 0, "path": "", "type": "sentence_transformers.models.Transformer"}
POOLING = {"idx": 1, "path": "1_Pooling", "type": "sentence_transformers.models.Pooling"}
NORMALIZE = {"idx": 2, "path": "2_Normalize", "type": "sentence_transformers.models.Normalize"}
DENSE = {"idx": 2, "path": "2_Dense", "type": "sentence_transformers.models.Dense"}
WORDS = {"idx": 2, "path": "2_BoW", "type": "sentence_transformers.models.BoW"}
MEAN = {"word_embedding_dimension": 4, "pooling_mode_mean_tokens": True}
LAST = {"pooling_mode_mean_tokens": False, "pooling_mode_lasttoken": True, "include_prompt": True}
STATE = struct.pack("<4f", 3.0, 0.0, 4.0, 12.0)


def pooler_of(
    directory: Path,
    modules: list[dict[str, Any]] | None = None,
    pooling: dict[str, Any] | None = None,
    model: dict[str, Any] | None = None,
    config: PoolerConfig = DEFAULTS,
    *,
    computes_whole: bool = False,
) -> Pooler:
    for path, value in (
        ("modules.json", modules),
        ("1_Pooling/config.json", pooling),
        ("config.json", model),
    ):
        if value is not None:
            (directory / path).parent.mkdir(exist_ok=True)
            (directory / path).write_text(json.dumps(value))
    info = replace(scripted_info(), pooled_size=4, computes_whole=computes_whole)
    return Pooler.load(directory, config).of(info)


def test_the_default_is_the_last_token_normalized(tmp_path: Path) -> None:
    pooler = pooler_of(tmp_path)
    assert (pooler.pooling, pooler.normalizes) == (Pooling.LAST, True)
    assert list(pooler.embedding(STATE)) == pytest.approx([3 / 13, 0, 4 / 13, 12 / 13])


def test_the_default_of_an_encoder_is_the_first_token(tmp_path: Path) -> None:
    assert pooler_of(tmp_path, computes_whole=True).pooling is Pooling.FIRST


@pytest.mark.parametrize(
    ("pooling", "expected"),
    [
        (MEAN, Pooling.MEAN),
        (LAST, Pooling.LAST),
        ({"pooling_mode": "mean"}, Pooling.MEAN),
        ({"pooling_mode_cls_token": True}, Pooling.FIRST),
    ],
)
@pytest.mark.parametrize(
    "modules",
    [None, [TRANSFORMER, POOLING, NORMALIZE], [TRANSFORMER, POOLING, DENSE, NORMALIZE]],
)
def test_the_mode_of_the_pooling_module_is_used(
    tmp_path: Path,
    modules: list[dict[str, Any]] | None,
    pooling: dict[str, Any],
    expected: Pooling,
) -> None:
    pooler = pooler_of(tmp_path, modules, pooling)
    assert (pooler.pooling, pooler.normalizes, pooler.problem) == (expected, True, None)


def test_modules_without_normalize_leave_the_state_unchanged(tmp_path: Path) -> None:
    pooler = pooler_of(tmp_path, [TRANSFORMER, POOLING], LAST)
    assert pooler.embedding(STATE).tolist() == [3.0, 0.0, 4.0, 12.0]


def test_the_pooler_config_overrides_the_model(tmp_path: Path) -> None:
    config = PoolerConfig(pooling=Pooling.LAST, normalize=False)
    pooler = pooler_of(tmp_path, [TRANSFORMER, POOLING, NORMALIZE], MEAN, config=config)
    assert (pooler.pooling, pooler.normalizes) == (Pooling.LAST, False)


@pytest.mark.parametrize(
    ("modules", "pooling", "culprit"),
    [
        ([TRANSFORMER, POOLING], MEAN | {"pooling_mode_max_tokens": True}, "max_tokens"),
        ([TRANSFORMER, POOLING], {"pooling_mode": "weightedmean"}, "weightedmean"),
        ([TRANSFORMER, POOLING, WORDS], MEAN, "BoW"),
    ],
)
def test_an_unsupported_pooling_is_refused_by_name(
    tmp_path: Path, modules: list[dict[str, Any]], pooling: dict[str, Any], culprit: str
) -> None:
    pooler = pooler_of(tmp_path, modules, pooling)
    with pytest.raises(InvalidRequest, match=culprit):
        pooler.check(None)
    overridden = pooler_of(tmp_path, config=PoolerConfig(pooling=Pooling.MEAN))
    overridden.check(None)


@pytest.mark.parametrize(
    ("model", "allowed", "refused"),
    [({"is_matryoshka": True}, [1, 3, 4], [5]), ({"matryoshka_dimensions": [2, 4]}, [2, 4], [3])],
)
def test_only_dimensions_that_the_model_was_trained_for_are_accepted(
    tmp_path: Path, model: dict[str, Any], allowed: list[int], refused: list[int]
) -> None:
    pooler = pooler_of(tmp_path, model=model)
    for dimensions in allowed:
        pooler.check(dimensions)
        assert len(pooler.embedding(STATE, dimensions)) == dimensions
    for dimensions in refused:
        with pytest.raises(InvalidRequest, match=f"dimensions is {dimensions}"):
            pooler.check(dimensions)
    assert list(pooler.embedding(STATE, 2)) == [1.0, 0.0]


def test_a_model_that_was_trained_for_none_refuses_dimensions(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedParameter, match="4 numbers"):
        pooler_of(tmp_path, model={}).check(2)


def test_a_file_that_is_not_json_is_named(tmp_path: Path) -> None:
    (tmp_path / "modules.json").write_text("[")
    with pytest.raises(PenstockError, match=r"modules\.json"):
        pooler_of(tmp_path)


@pytest.mark.parametrize("value", ['{"pooling_type": "MAX"}', "7", "[", '{"pooling": "MEAN"}'])
def test_an_unknown_pooler_config_is_an_error_of_the_command_line(
    value: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        main(["serve", "--pooler-config", value])
    assert "pooling_type" in capsys.readouterr().err
