"""Several stages give the answers of one. `tests/distributed` has all families."""

from pathlib import Path
from typing import Any

import pytest

from tests.support.compiler import needs_compiler
from tests.support.parallel_answers import assert_ranks_answer_alike, parallel_config
from tests.support.tiny_models import make_model, save

pytestmark = needs_compiler


def saved(family: str, path: Path, **options: Any) -> Path:
    return save(make_model(family, max_position_embeddings=512, **options), path)


def test_so_do_stages_that_torch_computes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("penstock.engine.loading.cpu.load_library", lambda *_, **__: None)
    config = parallel_config(saved("olmo2", tmp_path))
    ranks = assert_ranks_answer_alike(config, 1, 2, num_tokens=40)
    assert (ranks.info.computed_by or "").startswith("torch")


@pytest.mark.parametrize("family", ["qwen3", "gpt_oss"])
def test_two_stages_answer_as_one(family: str, tmp_path: Path) -> None:
    config = parallel_config(saved(family, tmp_path))
    ranks = assert_ranks_answer_alike(config, 1, 2, num_tokens=40)
    info = ranks.info
    assert (info.tensor_parallel_size, info.pipeline_parallel_size) == (1, 2)
    assert not (info.computed_by or "torch").startswith("torch")
