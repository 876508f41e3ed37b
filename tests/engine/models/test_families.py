"""Every family agrees with transformers, however its prompts are chunked and batched."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor

from penstock.engine.models.layers.linear import PackedLinear, PlainLinear
from tests.support.compiler import HAS_COMPILER
from tests.support.paths import STORIES
from tests.support.stories import needs_stories
from tests.support.tiny_models import FAMILIES, Harness, make_model, save
from tests.support.weight_formats import NegatedLinear

PROMPT_LEN = 70  # beyond the llama3 configuration's original 32, and beyond every window
TOLERANCE = 1e-4
# Logits are up to 5. Both round to 11 bits, at different places; in bfloat16 they differ by 0.1.
HALF_TOLERANCE = 0.04


@pytest.fixture(params=FAMILIES, scope="module")
def family(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """(a directory with the model, transformers' logits of two prompts, the prompts)"""
    model = make_model(request.param)
    path = save(model, tmp_path_factory.mktemp("model"))
    prompts = torch.randint(0, 96, (2, PROMPT_LEN), generator=torch.Generator().manual_seed(1))
    with torch.inference_mode():
        return path, model(prompts).logits, prompts


@pytest.fixture(params=["torch", "native"])
def native(request: pytest.FixtureRequest) -> bool:
    if request.param == "native" and not HAS_COMPILER:
        pytest.skip("there is no C++ compiler")
    return bool(request.param == "native")


@pytest.fixture(scope="module")
def in_half(family: Any) -> Tensor:
    """transformers' logits of the first prompt, computed in float16."""
    path, _, prompts = family
    model = transformers.AutoModelForCausalLM.from_pretrained(
        path, dtype=torch.float16, attn_implementation="eager"
    )
    with torch.inference_mode():
        logits: Tensor = model(prompts[:1]).logits[0].float()
    return logits


def harness(path: Path, prompts: Tensor, **options: Any) -> Harness:
    made = Harness(path, **options)
    made.token_table[: len(prompts), :PROMPT_LEN] = prompts
    return made


def assert_close(logits: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(logits, expected, atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize("make_linear", [PackedLinear, PlainLinear, NegatedLinear])
def test_a_whole_prompt_gives_the_logits_of_transformers(family: Any, make_linear: Any) -> None:
    path, expected, prompts = family
    logits = harness(path, prompts, make_linear=make_linear).run([(0, 0, PROMPT_LEN)])
    assert_close(logits[0], expected[0])


@pytest.mark.parametrize("chunk", [1, 7, 16, PROMPT_LEN])
def test_a_prompt_in_chunks_gives_the_same_logits(family: Any, native: bool, chunk: int) -> None:
    path, expected, prompts = family
    made = harness(path, prompts, native=native)
    for start in range(0, PROMPT_LEN, chunk):
        size = min(chunk, PROMPT_LEN - start)
        assert_close(made.run([(0, start, size)])[0], expected[0, start : start + size])


def test_decodes_in_a_step_with_another_prompts_chunks_give_the_same_logits(
    family: Any, native: bool
) -> None:
    path, expected, prompts = family
    made = harness(path, prompts, native=native)
    made.token_table[2] = made.token_table[0]
    assert_close(made.run([(0, 0, 40), (2, 0, 61)])[1], expected[0, :61])
    for step in range(9):
        rows = [(2, 61 + step, 1), (0, 40 + step, 1), (1, 7 * step, 7)]
        late, early, chunk = made.run(rows, num_decodes=2)
        assert_close(late[0], expected[0, 61 + step])
        assert_close(early[0], expected[0, 40 + step])
        assert_close(chunk, expected[1, 7 * step : 7 * step + 7])


@pytest.mark.parametrize("chunk", [1, PROMPT_LEN])
def test_in_float16_the_logits_are_those_of_transformers_in_float16(
    family: Any, in_half: Tensor, native: bool, chunk: int
) -> None:
    path, _, prompts = family
    made = harness(path, prompts, native=native, dtype=torch.float16)
    for start in range(0, PROMPT_LEN, chunk):
        (logits,) = made.run([(0, start, min(chunk, PROMPT_LEN - start))])
        expected = in_half[start : start + len(logits)]
        torch.testing.assert_close(logits, expected, atol=HALF_TOLERANCE, rtol=0)


@needs_stories
def test_in_float16_trained_weights_give_the_logits_of_transformers_in_float16(
    native: bool,
) -> None:
    (story, *_) = json.loads((STORIES / "golden.json").read_text())
    ids = torch.tensor([[*story["prompt_ids"], *story["new_ids"]]])
    model = transformers.AutoModelForCausalLM.from_pretrained(STORIES, dtype=torch.float16)
    with torch.inference_mode():
        expected = model(ids).logits[0].float()
    made = Harness(STORIES, native=native, dtype=torch.float16)
    made.token_table[:1, : ids.shape[1]] = ids
    (logits,) = made.run([(0, 0, ids.shape[1])])
    # Logits are up to 22 here; in bfloat16 they differ by 0.18 or more.
    torch.testing.assert_close(logits, expected, atol=0.1, rtol=0)
