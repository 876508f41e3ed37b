"""Encoders of text give the states of transformers' classes, each text in one chunk of a step."""

from pathlib import Path
from typing import Any

import pytest
import torch

from penstock.engine.models.config import ModelConfig
from penstock.engine.models.undeclared import check_tensors
from penstock.engine.step.model_input import as_encoder_input, build_model_input
from tests.support.compiler import HAS_COMPILER
from tests.support.encoder_models import ENCODERS, save_encoder, states_of
from tests.support.tiny_models import Harness, make_batch

LENGTHS = [40, 17, 1]


@pytest.fixture(params=ENCODERS, scope="module")
def encoder(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Any, Path]:
    path = tmp_path_factory.mktemp("encoder")
    return save_encoder(request.param, path), path


@pytest.mark.parametrize("way", ["torch", "native"])
def test_texts_of_one_step_have_the_states_of_transformers(
    encoder: tuple[Any, Path], way: str
) -> None:
    if way == "native" and not HAS_COMPILER:
        pytest.skip("there is no C++ compiler")
    model, path = encoder
    ids = torch.randint(3, 97, (3, 40), generator=torch.Generator().manual_seed(1))
    made = Harness(path, native=way == "native", max_len=64)
    made.token_table[:3, :40] = ids
    batch = make_batch((0, 1, 2), (0, 0, 0), tuple(LENGTHS))
    step = build_model_input(batch, made.token_table, made.block_tables, made.block_size)
    step = as_encoder_input(step)
    with torch.inference_mode():
        states = made.model.states(step, made.pool, torch.arange(sum(LENGTHS)))
    for own, of, length in zip(torch.split(states, LENGTHS), ids, LENGTHS, strict=True):
        torch.testing.assert_close(own, states_of(model, of[:length]), atol=1e-5, rtol=0)


def test_every_tensor_of_its_checkpoint_is_read_or_known(encoder: tuple[Any, Path]) -> None:
    _, path = encoder
    check_tensors(path, ModelConfig.from_dir(path))
