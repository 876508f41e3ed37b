"""What a batch becomes as tensors."""

import torch

from penstock.engine.step.model_input import build_model_input
from tests.support.tiny_models import make_batch

TOKENS = torch.arange(300).view(3, 100)
TABLES = torch.tensor([[7, 2, 9], [1, 4, 5], [3, 0, 8]], dtype=torch.int32)


def test_tokens_of_all_rows_stand_one_after_the_other() -> None:
    batch = make_batch((2, 0), (5, 2), (1, 4), num_decodes=1, samples=(True, True))
    step = build_model_input(batch, TOKENS, TABLES, 4)
    assert step.token_ids.tolist() == [205, 2, 3, 4, 5]
    assert step.positions.tolist() == [5, 2, 3, 4, 5]
    assert step.kv_slots.tolist() == [1, 30, 31, 8, 9]
    assert step.block_tables.tolist() == [[3, 0, 8], [7, 2, 9]]
    assert step.query_starts == [0, 1, 5]
    assert step.context_lens == [6, 6]
    assert step.sample_rows.tolist() == [0, 4]


def test_only_rows_that_sample_reach_the_output_layer() -> None:
    batch = make_batch((1, 0), (3, 0), (1, 4), num_decodes=1, samples=(True, False))
    assert build_model_input(batch, TOKENS, TABLES, 4).sample_rows.tolist() == [0]


def test_a_step_of_decodes_alone_needs_no_expansion() -> None:
    batch = make_batch((1, 0), (3, 8), (1, 1), num_decodes=2)
    step = build_model_input(batch, TOKENS, TABLES, 4)
    assert step.token_ids.tolist() == [103, 8]
    assert step.kv_slots.tolist() == [7, 36]
