"""Every family on two ranks: logits within 1e-4 of one rank's in float32, the same greedy answers,
and the same bits on both ranks."""

from pathlib import Path

import pytest

from penstock.engine.loading import cpu
from tests.support.parallel_answers import assert_ranks_answer_alike, parallel_config
from tests.support.tiny_models import ALL_FAMILIES, make_model, save


@pytest.mark.parametrize("family", ALL_FAMILIES)
def test_two_ranks_answer_as_one_for_200_tokens(family: str, tmp_path: Path) -> None:
    path = save(make_model(family, max_position_embeddings=512), tmp_path)
    assert_ranks_answer_alike(parallel_config(path), 2)


@pytest.mark.parametrize("family", ALL_FAMILIES)
def test_so_they_do_where_torch_computes_them(
    family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cpu, "load_library", lambda *_, **__: None)
    path = save(make_model(family, max_position_embeddings=512), tmp_path)
    assert_ranks_answer_alike(parallel_config(path), 2, num_tokens=60)
