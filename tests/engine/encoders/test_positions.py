"""The positions of prompts with images, against those of transformers."""

import random
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5Model
from transformers.models.qwen3_vl.modeling_qwen3_vl import Qwen3VLModel

from penstock.engine.encoders.positions import insert_positions, reaches
from penstock.scheduler.types import Insert
from tests.support.inserted_rows import made_insert

_MERGE = 2


def random_inserts(seed: int, *, is_whole: bool = False) -> tuple[list[Insert], int]:
    """Up to four of them, and the length of the prompt that they are in."""
    numbers = random.Random(seed)
    inserts, at = [], numbers.randint(0, 3)
    for number in range(numbers.randint(1, 4)):
        grid = (1, numbers.randint(1, 5), numbers.randint(1, 5))
        inserts.append(made_insert(at, grid, number, is_whole=is_whole))
        at += inserts[-1].num_tokens + numbers.randint(1, 4)
    return inserts, at


def of_transformers(model: Any, inserts: list[Insert], num_tokens: int) -> Tensor:
    kinds = torch.zeros(1, num_tokens, dtype=torch.int32)
    for insert in inserts:
        kinds[0, insert.start : insert.start + insert.num_tokens] = 1
    sizes = [(t, h * _MERGE, w * _MERGE) for t, h, w in (insert.grid for insert in inserts)]
    vision = SimpleNamespace(spatial_merge_size=_MERGE)
    known = SimpleNamespace(config=SimpleNamespace(vision_config=vision))
    known.get_vision_position_ids = lambda *args, **how: model.get_vision_position_ids(
        known, *args, **how
    )
    found, _ = model.get_rope_index(
        known, torch.zeros(1, num_tokens, dtype=torch.int64), kinds, torch.tensor(sizes)
    )
    positions: Tensor = found[:, 0]
    return positions


@pytest.mark.parametrize("model", [Qwen3VLModel, Qwen3_5Model])
@pytest.mark.parametrize("seed", range(8))
def test_positions_are_those_of_transformers(model: Any, seed: int) -> None:
    inserts, num_tokens = random_inserts(seed)
    expected = of_transformers(model, inserts, num_tokens)
    assert torch.equal(insert_positions(inserts, 0, num_tokens), expected)


@pytest.mark.parametrize("size", [1, 7])
def test_positions_of_chunks_are_those_of_the_whole(size: int) -> None:
    inserts, num_tokens = random_inserts(3)
    whole = insert_positions(inserts, 0, num_tokens)
    for start in range(0, num_tokens, size):
        end = min(start + size, num_tokens)
        assert torch.equal(insert_positions(inserts, start, end), whole[:, start:end])


def test_text_after_the_last_insert_is_shifted_by_what_images_are_shorter() -> None:
    inserts = [made_insert(2, (1, 4, 3)), made_insert(20, (1, 1, 5))]
    after = insert_positions(inserts, 25, 28)
    assert after.tolist() == [[25 - 8, 26 - 8, 27 - 8]] * 3


def test_a_whole_insert_reaches_to_its_end() -> None:
    inserts = [made_insert(2, (1, 1, 4), is_whole=True), made_insert(7, (1, 1, 2), is_whole=True)]
    found = reaches(inserts, 0, 10)
    assert found is not None
    assert found.tolist() == [1, 2, 6, 6, 6, 6, 7, 9, 9, 10]
    assert reaches(inserts, 6, 9).tolist() == [7, 9, 9]  # type: ignore[union-attr]


def test_tokens_without_a_whole_insert_reach_no_further_than_themselves() -> None:
    whole, other = made_insert(2, (1, 1, 4), is_whole=True), made_insert(7, (1, 2, 2))
    assert reaches([whole, other], 6, 20) is None
    assert reaches([whole], 0, 2) is None
    assert reaches([], 0, 9) is None
