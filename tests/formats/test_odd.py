"""Ten of the random checkpoints in odd shapes: see `tests.formats.odd`, whose command runs more."""

import json
from pathlib import Path

import pytest

from penstock.engine.models.config import ModelConfig
from penstock.engine.models.families.families import FAMILIES as SERVED
from penstock.engine.models.families.families import WRAPPERS
from tests.formats.odd import examine, quieten
from tests.support.odd_models import FAMILIES, family_of, write_odd


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("seed", range(10))
def test_an_odd_shape_is_answered_as_transformers_does_or_refused(
    seed: int, tmp_path: Path
) -> None:
    quieten()
    outcome = examine(write_odd(seed, tmp_path))
    assert (outcome.computed_by == "refused") is (outcome.refused is not None)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("seed", range(4))
def test_an_odd_shape_in_a_gguf_file_is_the_same_model(seed: int, tmp_path: Path) -> None:
    quieten()
    outcome = examine(write_odd(seed, tmp_path, way="gguf"), 20)
    assert outcome.computed_by == "gguf"


@pytest.mark.filterwarnings("ignore")
def test_every_family_has_odd_shapes_and_its_turn(tmp_path: Path) -> None:
    turn = [family_of(seed) for seed in range(len(FAMILIES))]
    assert sorted(turn) == sorted(FAMILIES)
    drawn = set()
    for seed, family in enumerate(FAMILIES):
        write_odd(seed, tmp_path, family)
        config = json.loads((tmp_path / "config.json").read_text())
        drawn |= {config["model_type"], config.get("text_config", {}).get("model_type")}
        if config["model_type"] in SERVED.keys() | WRAPPERS.keys():
            ModelConfig.from_dir(tmp_path)
    assert SERVED.keys() | WRAPPERS.keys() <= drawn
