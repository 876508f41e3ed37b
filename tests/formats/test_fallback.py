"""All families by transformers' classes: our own, of which these are the reference inside the real
executor, and those that have no row."""

from pathlib import Path

import pytest

from penstock.engine.config import ModelImpl
from tests.support.fallback_runs import assert_greedy, greedy_answers, prompts
from tests.support.other_decoders import OTHER_DECODERS, make_other
from tests.support.tiny_models import (
    FAMILIES,
    LATENT_FAMILIES,
    MORE_FAMILIES,
    make_model,
    save,
)

# Those around a text model are not among transformers' decoders.
EVERY = (*FAMILIES, *MORE_FAMILIES, *LATENT_FAMILIES)
OURS = [name for name in EVERY if "_wrapped" not in name and "qwen3_vl" not in name]


@pytest.mark.parametrize("family", OURS)
def test_our_own_implementation_answers_as_the_class_of_transformers_does(
    family: str, tmp_path: Path
) -> None:
    path = save(make_model(family), tmp_path)
    theirs = greedy_answers(path, ModelImpl.TRANSFORMERS)
    assert greedy_answers(path, ModelImpl.PENSTOCK) == theirs


@pytest.mark.parametrize("model_type", sorted(OTHER_DECODERS.keys() - {*EVERY}))
def test_in_chunks_preempted_and_with_cached_prefixes_answers_are_those_of_the_class_alone(
    model_type: str, tmp_path: Path
) -> None:
    model = make_other(model_type)
    answers = greedy_answers(save(model, tmp_path), ModelImpl.AUTO)
    for prompt, answer in zip([*prompts(), prompts()[0]], answers, strict=True):
        assert_greedy(model, prompt, answer)
