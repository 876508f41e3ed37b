"""Real trained weights give exactly the golden ids, however the work is cut up and packed."""

import json
import logging
from pathlib import Path
from typing import Any

import pytest

from penstock.engine.config import Dtype, EngineConfig
from penstock.engine.native.library import load_library
from penstock.scheduler.config import SchedulerConfig
from penstock.scheduler.types import Request, RequestId, SamplingParams
from tests.support.paths import STORIES
from tests.support.stepping import SteppedEngine, ids_of
from tests.support.stories import needs_stories

pytestmark = needs_stories
Golden = list[dict[str, Any]]
LENGTH = 256  # of prompt and answer together, more than any of the golden ones


@pytest.fixture(scope="module")
def golden() -> Golden:
    entries: Golden = json.loads((STORIES / "golden.json").read_text())
    return entries


def _engine(config: SchedulerConfig, num_tokens: int = 64 * LENGTH) -> SteppedEngine:
    bytes_per_token = 2 * 5 * 4 * 8 * 4  # K and V, layers, KV heads, head dim, float32
    return SteppedEngine(
        EngineConfig(
            model=str(STORIES),
            dtype=Dtype.FLOAT32,
            max_model_len=LENGTH,
            kv_cache_memory_bytes=num_tokens * bytes_per_token,
            num_threads=1,
            scheduler=config,
        )
    )


def _answers(engine: SteppedEngine, entries: Golden) -> list[list[int]]:
    return [ids_of(outputs) for outputs in engine.run([_request(entry) for entry in entries])]


def _request(entry: dict[str, Any]) -> Request:
    sampling = SamplingParams(max_tokens=len(entry["new_ids"]), temperature=0.0)
    prompt = tuple(entry["prompt_ids"])
    return Request(
        id=RequestId("golden"), prompt_token_ids=prompt, sampling=sampling, arrival_s=0.0
    )


def _expected(entries: Golden) -> list[list[int]]:
    return [entry["new_ids"] for entry in entries]


def test_alone(golden: Golden) -> None:
    engine = _engine(SchedulerConfig(max_num_seqs=1))
    assert [_answers(engine, [entry])[0] for entry in golden] == _expected(golden)


def test_by_torch_without_a_compiler_which_one_warning_says(
    golden: Golden,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setenv("CXX", str(tmp_path / "no-such-compiler"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    load_library.cache_clear()
    try:
        engine = _engine(SchedulerConfig(max_num_seqs=8))
    finally:
        load_library.cache_clear()
    assert _answers(engine, golden) == _expected(golden)
    [warning] = [record.message for record in caplog.records if record.levelno >= logging.WARNING]
    assert "torch's operators are used instead" in warning and "install g++ to fix it" in warning


def test_in_a_batch_of_64_on_each_kind_of_processor(golden: Golden, processor: str) -> None:
    if processor == "tiles":
        pytest.skip("they multiply bfloat16 alone")
    engine = _engine(SchedulerConfig(max_num_seqs=64))
    entries = (golden * 64)[:64]
    assert _answers(engine, entries) == _expected(entries)


def test_in_chunks_of_7_tokens(golden: Golden) -> None:
    engine = _engine(SchedulerConfig(max_num_seqs=4, max_num_batched_tokens=7))
    assert _answers(engine, golden) == _expected(golden)


def test_with_prefix_hits(golden: Golden) -> None:
    engine = _engine(SchedulerConfig(max_num_seqs=8))
    # The answer so far becomes part of the prompt, as in the next turn of a conversation.
    longer = [
        entry
        | {
            "prompt_ids": entry["prompt_ids"] + entry["new_ids"][:40],
            "new_ids": entry["new_ids"][40:],
        }
        for entry in golden
    ]
    assert _answers(engine, golden) == _expected(golden)
    assert _answers(engine, longer) == _expected(longer)
    assert engine.scheduler.stats().prefix_hit_tokens_total >= 32 * len(golden)


def test_with_a_pool_so_small_that_sequences_are_preempted(golden: Golden) -> None:
    engine = _engine(SchedulerConfig(max_num_seqs=16), num_tokens=LENGTH + 64)
    entries = (golden * 16)[:16]
    assert _answers(engine, entries) == _expected(entries)
    assert engine.scheduler.stats().preemptions_total > 0
