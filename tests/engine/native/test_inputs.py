"""What comes before and after a step's products, in C++ as in torch."""

from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from penstock.engine.native.inputs import gather_input
from penstock.engine.native.library import load_library
from penstock.engine.native.model import NativeModel
from penstock.engine.sampling.sampler import INVALID_ID, Sampler
from penstock.engine.step.model_input import build_model_input
from penstock.scheduler.types import SamplingParams
from tests.support.compiler import needs_compiler
from tests.support.tiny_models import Harness, make_batch, make_model, save

pytestmark = needs_compiler

TOKENS = torch.arange(6 * 65).view(6, 65)
TABLES = torch.randperm(6 * 16, generator=torch.Generator().manual_seed(0)).view(6, 16)
TABLES = TABLES.to(torch.int32)


@st.composite
def rows_of_a_step(draw: st.DrawFn) -> list[tuple[int, int, int, bool]]:
    """Of different slots: the slot, its first token, how many there are, whether it samples."""
    slots = draw(st.lists(st.integers(0, 5), unique=True, min_size=1))
    starts = [draw(st.integers(0, 63)) for _ in slots]
    counts = [draw(st.integers(1, 64 - start)) for start in starts]
    return [(*row, draw(st.booleans())) for row in zip(slots, starts, counts, strict=True)]


@given(rows=rows_of_a_step())
def test_a_step_reads_the_tables_as_torch_does(rows: list[tuple[int, int, int, bool]]) -> None:
    library = load_library(torch.float32)
    assert library
    slots, starts, counts, samples = zip(*rows, strict=True)
    batch = make_batch(slots, starts, counts, samples=samples)
    ours = gather_input(library, batch, TOKENS, TABLES, 4)
    theirs = build_model_input(batch, TOKENS, TABLES, 4)
    for name in ("token_ids", "positions", "kv_slots", "sample_rows"):
        assert torch.equal(getattr(ours, name), getattr(theirs, name)), name
    assert ours.query_starts == theirs.query_starts
    assert ours.context_lens == theirs.context_lens
    for row, length in enumerate(ours.context_lens):
        used = -(-length // 4)
        assert torch.equal(ours.block_tables[row, :used], theirs.block_tables[row, :used])


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> NativeModel:
    directory: Path = tmp_path_factory.mktemp("model")
    save(make_model("llama2"), directory)
    model = Harness(directory, native=True).model
    assert isinstance(model, NativeModel)
    return model


OPTIONS: list[dict[str, float]] = [
    {"temperature": 0.0},
    {},
    {"temperature": 0.3},
    {"top_k": 3},
    {"top_k": 40, "top_p": 0.9},
    {"top_p": 0.95},
    {"top_p": 0.2, "temperature": 5.0},
    {"min_p": 0.05, "presence_penalty": 1.0},
]


@pytest.mark.parametrize("size", [1, 63, 64, 1023, 1024, 5000, 49152])
@pytest.mark.parametrize("num_rows", [1, 9, 80])
def test_the_ids_are_those_that_torch_draws(model: NativeModel, num_rows: int, size: int) -> None:
    generator = torch.Generator().manual_seed(size)
    logits = 2 * torch.randn(num_rows, size, generator=generator)
    history = torch.randint(size, (num_rows, 9), generator=generator)
    rows = list(range(num_rows))
    ids = []
    for draw in (None, model.draw):
        sampler = Sampler(num_rows, size, torch.device("cpu"), draw=draw)
        for row in rows:
            options = {"temperature": 1.0, **OPTIONS[row % len(OPTIONS)]}
            sampler.assign(row, SamplingParams(max_tokens=1, **options), row)  # type: ignore[arg-type]
        ids.append(sampler.sample_ids(logits, rows, [5] * num_rows, history, [2] * num_rows))
    # A uniform can fall between two sums that differ in rounding.
    assert (ids[0] == ids[1]).sum() >= num_rows - num_rows // 50


def likeliest(model: NativeModel, logits: Tensor) -> list[int]:
    """The ids of rows of temperature 0."""
    sampler = Sampler(len(logits), logits.shape[1], torch.device("cpu"), draw=model.draw)
    rows = list(range(len(logits)))
    history = torch.zeros(len(logits), 2, dtype=torch.int64)
    return sampler.sample_ids(logits, rows, rows, history, rows).tolist()


def test_of_equal_logits_the_first_is_the_likeliest(model: NativeModel) -> None:
    few = torch.randint(0, 4, (9, 3000), generator=torch.Generator().manual_seed(0)).float()
    assert likeliest(model, few) == few.max(-1).indices.tolist()
    assert likeliest(model, torch.full((1, 2000), -torch.inf)) == [0]
    assert likeliest(model, torch.tensor([[-1.0, -0.0, 0.0]])) == [1]


@pytest.mark.parametrize("value", [torch.nan, -torch.nan, torch.inf])
@pytest.mark.parametrize("place", [0, 17, 2048, 2999])
def test_a_row_with_an_invalid_logit_has_no_likeliest_id(
    model: NativeModel, place: int, value: float
) -> None:
    logits = torch.zeros(3, 3000)
    logits[1, place] = value
    logits[2, place] = 1.0
    assert likeliest(model, logits) == [0, INVALID_ID, place]
