"""Real trained weights give exactly the golden ids, however the work is cut up and packed."""

import json
from pathlib import Path
from typing import Any

import pytest

from engine.config import Dtype, EngineConfig
from engine.torch_executor import TorchExecutor
from scheduler.config import SchedulerConfig
from scheduler.scheduler import Scheduler
from scheduler.types import Request, RequestId, SamplingParams

STORIES = Path(__file__).parents[2] / "shared" / "models" / "stories260K"
pytestmark = pytest.mark.skipif(
    not STORIES.exists(), reason="the stories260K weights are not beside the checkout"
)
Golden = list[dict[str, Any]]
LENGTH = 256  # of prompt and answer together, more than any of the golden ones


@pytest.fixture(scope="module")
def golden() -> Golden:
    entries: Golden = json.loads((STORIES / "golden.json").read_text())
    return entries


class Engine:
    """The scheduler and the executor, stepped by the test."""

    def __init__(self, config: SchedulerConfig, num_tokens: int = 64 * LENGTH) -> None:
        bytes_per_token = 2 * 5 * 4 * 8 * 4  # K and V, layers, KV heads, head dim, float32
        self.executor = TorchExecutor(
            EngineConfig(
                model=str(STORIES),
                dtype=Dtype.FLOAT32,
                max_model_len=LENGTH,
                kv_cache_memory_bytes=num_tokens * bytes_per_token,
                num_threads=1,
                scheduler=config,
            ),
            STORIES,
        )
        info = self.executor.info
        self.scheduler = Scheduler(
            config,
            num_blocks=info.num_blocks,
            block_size=info.block_size,
            max_model_len=info.max_model_len,
        )
        self.num_added = 0

    def answers(self, entries: Golden) -> list[list[int]]:
        """The ids of each, all asked for at once."""
        ids: dict[RequestId, list[int]] = {}
        for entry in entries:
            self.num_added += 1
            request = _request(f"{self.num_added}", entry)
            ids[request.id] = []
            self.scheduler.add(request)
        while batch := self.scheduler.schedule(0.0):
            for output in self.scheduler.update(self.executor.execute(batch).wait()):
                ids[output.request_id] += output.token_ids
        return list(ids.values())


def _request(name: str, entry: dict[str, Any]) -> Request:
    sampling = SamplingParams(max_tokens=len(entry["new_ids"]), temperature=0.0)
    prompt = tuple(entry["prompt_ids"])
    return Request(id=RequestId(name), prompt_token_ids=prompt, sampling=sampling, arrival_s=0.0)


def _expected(entries: Golden) -> list[list[int]]:
    return [entry["new_ids"] for entry in entries]


def test_alone(golden: Golden) -> None:
    engine = Engine(SchedulerConfig(max_num_seqs=1))
    assert [engine.answers([entry])[0] for entry in golden] == _expected(golden)


def test_in_a_batch_of_64(golden: Golden) -> None:
    engine = Engine(SchedulerConfig(max_num_seqs=64))
    entries = (golden * 64)[:64]
    assert engine.answers(entries) == _expected(entries)


def test_in_chunks_of_7_tokens(golden: Golden) -> None:
    engine = Engine(SchedulerConfig(max_num_seqs=4, max_num_batched_tokens=7))
    assert engine.answers(golden) == _expected(golden)


def test_with_prefix_hits(golden: Golden) -> None:
    engine = Engine(SchedulerConfig(max_num_seqs=8))
    # The answer so far becomes part of the prompt, as in the next turn of a conversation.
    longer = [
        entry
        | {
            "prompt_ids": entry["prompt_ids"] + entry["new_ids"][:40],
            "new_ids": entry["new_ids"][40:],
        }
        for entry in golden
    ]
    assert engine.answers(golden) == _expected(golden)
    assert engine.answers(longer) == _expected(longer)
    assert engine.scheduler.stats().prefix_hit_tokens_total >= 32 * len(golden)


def test_with_a_pool_so_small_that_sequences_are_preempted(golden: Golden) -> None:
    engine = Engine(SchedulerConfig(max_num_seqs=16), num_tokens=LENGTH + 64)
    entries = (golden * 16)[:16]
    assert engine.answers(entries) == _expected(entries)
    assert engine.scheduler.stats().preemptions_total > 0
