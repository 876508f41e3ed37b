"""Rows in place of embedded tokens give the logits of transformers, in every family that takes
images, however prompts are chunked and batched."""

from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from tests.support.compiler import HAS_COMPILER, needs_compiler
from tests.support.image_models import (
    IMAGE_FAMILIES,
    WITH_SPANS,
    logits_of_transformers,
    made_prompt,
    make_image_model,
)
from tests.support.inserted_rows import InsertedPrompt
from tests.support.tiny_models import Harness, save

PROMPT_LEN = 70
TOLERANCE = 1e-4
# Through seven layers of random weights, rounding in float32 grows.
TOLERANCES = {"gemma4_small_wrapped": 5e-4}


class Case(NamedTuple):
    family: str
    path: Path
    ids: Tensor
    prompts: list[InsertedPrompt]
    expected: list[Tensor]


@pytest.fixture(params=IMAGE_FAMILIES, scope="module")
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Case:
    """Two prompts with images in different places."""
    model = make_image_model(request.param)
    path = save(model, tmp_path_factory.mktemp("model"))
    ids = torch.randint(0, 96, (2, PROMPT_LEN), generator=torch.Generator().manual_seed(1))
    hidden = model.config.get_text_config().hidden_size
    prompts = [made_prompt(request.param, hidden, first=first, seed=first + 1) for first in (5, 12)]
    expected = [logits_of_transformers(model, *each) for each in zip(ids, prompts, strict=True)]
    return Case(request.param, path, ids, prompts, expected)


@pytest.fixture(params=["torch", "native"])
def made(request: pytest.FixtureRequest, case: Case) -> Any:
    if request.param == "native" and not HAS_COMPILER:
        pytest.skip("there is no C++ compiler")
    return harness(case, native=request.param == "native")


def harness(case: Case, **options: Any) -> Harness:
    made = Harness(case.path, **options)
    made.token_table[:2, :PROMPT_LEN] = case.ids
    return made


def assert_close(case: Case, logits: Tensor, expected: Tensor) -> None:
    tolerance = TOLERANCES.get(case.family, TOLERANCE)
    torch.testing.assert_close(logits, expected, atol=tolerance, rtol=0)


def chunks(case: Case, size: int) -> list[tuple[int, int]]:
    """Ranges of the first prompt of so many tokens, but for images that are computed at once."""
    found, start = [], 0
    while start < PROMPT_LEN:
        end = min(start + size, PROMPT_LEN)
        for insert in case.prompts[0].inserts:
            if insert.is_whole and insert.start < end < insert.start + insert.num_tokens:
                end = insert.start + insert.num_tokens if insert.start == start else insert.start
        found.append((start, end))
        start = end
    return found


@pytest.mark.parametrize("size", [1, 7, 64, PROMPT_LEN])
def test_a_prompt_with_images_gives_the_logits_of_transformers(
    case: Case, made: Harness, size: int
) -> None:
    for start, end in chunks(case, size):
        rows = [(0, start, end - start)]
        [logits] = made.run(rows, prompts={0: case.prompts[0]})
        assert_close(case, logits, case.expected[0][start:end])


def test_prompts_with_images_give_the_same_logits_in_company(case: Case, made: Harness) -> None:
    prompts = dict(enumerate(case.prompts))
    made.token_table[2] = made.token_table[0]  # without images
    [text] = harness(case).run([(0, 0, PROMPT_LEN)])
    both = made.run([(0, 0, 33), (2, 0, 61), (1, 0, PROMPT_LEN)], prompts=prompts)
    for logits, expected in zip(both, (case.expected[0], text, case.expected[1]), strict=True):
        assert_close(case, logits, expected[: len(logits)])
    for step in range(2):  # the first's image is computed while others decode
        rows = [(2, 61 + step, 1), (0, 33 + step * 10, 2 if step == 0 else PROMPT_LEN - 43)]
        if step == 1:
            made.run([(0, 35, 8)], prompts=prompts)
        decode, chunk = made.run(rows, num_decodes=1, prompts=prompts)
        assert_close(case, decode[0], text[61 + step])
        assert_close(case, chunk, case.expected[0][rows[1][1] : rows[1][1] + rows[1][2]])


def test_decodes_after_images_give_the_same_logits(case: Case, made: Harness) -> None:
    prompts = dict(enumerate(case.prompts))
    made.run([(0, 0, 60), (1, 0, 61)], prompts=prompts)
    for step in range(9):
        rows = [(0, 60 + step, 1), (1, 61 + step, 1)]
        first, second = made.run(rows, num_decodes=2, prompts=prompts)
        assert_close(case, first[0], case.expected[0][60 + step])
        assert_close(case, second[0], case.expected[1][61 + step])


@needs_compiler
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_compiled_a_prompt_with_images_has_the_same_bits_in_chunks(
    case: Case, dtype: torch.dtype
) -> None:
    found = []
    for size in (7, PROMPT_LEN):
        made = harness(case, native=True, dtype=dtype)
        rows = [(0, start, end - start) for start, end in chunks(case, size)]
        prompts = {0: case.prompts[0]}
        found.append(torch.cat([made.run([row], prompts=prompts)[0] for row in rows]))
    assert torch.equal(*found)


def test_spans_and_positions_are_not_those_of_a_text(case: Case) -> None:
    """Without them, rows alone give other logits: so they are tested."""
    made = harness(case)
    inserts = [each._replace(is_whole=False) for each in case.prompts[0].inserts]
    if case.family not in WITH_SPANS:
        inserts = [each._replace(grid=(1, 1, each.num_tokens)) for each in inserts]
    changed = InsertedPrompt(
        inserts=tuple(inserts), rows=case.prompts[0].rows, deepstack=case.prompts[0].deepstack
    )
    [logits] = made.run([(0, 0, PROMPT_LEN)], prompts={0: changed})
    is_alike = torch.allclose(logits, case.expected[0], atol=TOLERANCES.get(case.family, TOLERANCE))
    assert is_alike == (case.family == "gemma4_small_wrapped")
