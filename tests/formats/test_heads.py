"""A tiny checkpoint of each model with a head on pooled states: many texts under a scheduler, and
EmbeddingGemma through HTTP."""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from penstock.scheduler.config import SchedulerConfig
from penstock.scheduler.types import Pooling
from tests.support.encoder_models import write_encoder_tokenizer
from tests.support.pooled_models import (
    DECODERS,
    ENCODERS,
    logits_of,
    make_classifier,
    mean_of,
    pooled_by,
    save_embedding_gemma,
    save_reranker,
    score_of,
)
from tests.support.serving import RunningServer
from tests.support.stepping import SteppedEngine
from tests.support.tiny_models import engine_config, save


def texts() -> list[list[int]]:
    """Of 1 to 60 tokens; some begin as others do, some are equal."""
    generator = torch.Generator().manual_seed(5)
    lengths = torch.randint(1, 61, (40,), generator=generator).tolist()
    made = [torch.randint(3, 96, (n,), generator=generator).tolist() for n in lengths]
    return [*made, *made[:5], *([*each[:-1], 7] for each in made[5:10])]


def check(path: Path, pooling: Pooling | None, expected: Callable[[list[int]], Tensor]) -> None:
    scheduler = SchedulerConfig(max_num_seqs=8, max_num_batched_tokens=70)
    engine = SteppedEngine(engine_config(path, scheduler=scheduler, max_model_len=64))
    pooling = engine.executor.info.pooling or pooling
    assert pooling is not None
    for ids, found in zip(texts(), pooled_by(engine, texts(), pooling), strict=True):
        torch.testing.assert_close(found, expected(ids), atol=1e-5, rtol=0)


@pytest.mark.parametrize("name", [*ENCODERS, *DECODERS])
def test_classifiers(name: str, tmp_path: Path) -> None:
    model = make_classifier(name)
    check(save(model, tmp_path), None, lambda ids: logits_of(model, ids))


def test_embedding_gemma(tmp_path: Path) -> None:
    model, layers = save_embedding_gemma(tmp_path)
    check(tmp_path, Pooling.MEAN, lambda ids: mean_of(model, layers, ids))


def test_qwen3_reranker(tmp_path: Path) -> None:
    model, path = save_reranker(tmp_path, "name")
    check(path, None, lambda ids: score_of(model, ids))


def test_embedding_gemma_through_http(tmp_path: Path) -> None:
    path = tmp_path / "gemma"
    model, layers = save_embedding_gemma(path, vocab_size=300)
    tokenizer = write_encoder_tokenizer(path)
    server = RunningServer(str(path), "--dtype", "float32", "--served-model-name", "gemma")
    try:
        server.wait_until_ready()
        given = ["hello world", "a longer text, of more tokens"]
        response = server.post("/v1/embeddings", {"model": "gemma", "input": given})
        assert response.status_code == 200, response.text
        entries: list[dict[str, Any]] = response.json()["data"]
        for text, entry in zip(given, entries, strict=True):
            vector = mean_of(model, layers, tokenizer.encode(text).ids)
            expected = torch.nn.functional.normalize(vector, dim=0)
            assert math.dist(entry["embedding"], expected.tolist()) < 1e-4
    finally:
        server.stop()
