"""Layers with a window give blocks back: the same tokens as if they kept them, and never a read of
a block that was given back."""

import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from penstock.engine.config import AttentionBackend
from penstock.engine.executors.cpu import CpuExecutor
from penstock.engine.executors.cuda.device import Interpreter
from penstock.engine.executors.cuda.executor import CudaExecutor
from penstock.engine.memory import huge_pages
from penstock.engine.memory.pool.kv_memory import make_descriptor
from penstock.engine.memory.pool.kv_pool import KVPools
from penstock.engine.step.executor import Executor
from penstock.scheduler.config import SchedulerConfig
from penstock.scheduler.groups import KVGroup
from penstock.scheduler.scheduler import Scheduler
from penstock.scheduler.types import Request, RequestId, SamplingParams
from tests.support.executors import cpu_executor, cuda_executor
from tests.support.tiny_models import engine_config, make_model, save

ON_GPU = torch.cuda.is_available()
BLOCK_SIZE, NUM_BLOCKS, MAX_LEN = 16, 160, 320
FAMILIES = ("gemma3", "olmo3", "mistral_window")
# Mixtures of experts, two shapes of heads, and keys and values that layers share.
MORE = ("gpt_oss", "qwen3_moe", "gemma4_moe", "gemma4_small_wrapped")
CONFIG = SchedulerConfig(max_num_seqs=6, max_num_batched_tokens=50)


@pytest.fixture(
    scope="module",
    params=[*FAMILIES, *(pytest.param(name, marks=pytest.mark.slow) for name in MORE)],
)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = make_model(request.param, max_position_embeddings=512)
    return save(made, tmp_path_factory.mktemp("model"))


def pools_of(executor: Executor) -> KVPools:
    assert isinstance(executor, CpuExecutor | CudaExecutor)
    return executor.pool


class Run:
    """Requests in an engine whose scheduler sees some of the executor's blocks."""

    def __init__(
        self, executor: Executor, groups: Sequence[KVGroup], config: SchedulerConfig
    ) -> None:
        self.executor, self.groups = executor, groups
        self.scheduler = Scheduler(
            config,
            groups=groups,
            block_size=BLOCK_SIZE,
            max_model_len=MAX_LEN,
            journals=executor.journals,
        )
        self.ids: dict[tuple[str, int], list[int]] = {}
        self.cached: dict[str, int] = {}

    @torch.inference_mode()
    def run(self, requests: list[Request]) -> None:
        for request in requests:
            self.scheduler.add(request)
        # What was given back may be anything by now; a step may read what it gives back itself.
        while self._spoil_free_blocks() and (batch := self.scheduler.schedule(0.0)):
            for output in self.scheduler.update(self.executor.execute(batch).wait()):
                self.ids.setdefault((output.request_id, output.index), []).extend(output.token_ids)
                self.cached[output.request_id] = output.num_cached_tokens

    def _spoil_free_blocks(self) -> bool:
        for cache, pool in zip(
            self.scheduler._kv.groups, pools_of(self.executor).groups, strict=True
        ):
            free = torch.tensor(cache._free, dtype=torch.int64)
            for keys, values in pool.pairs():
                keys[:, free] = values[:, free] = torch.nan
        return True


def kv_groups(executor: Executor) -> list[KVGroup]:
    return [each for each in executor.info.kv_groups if isinstance(each, KVGroup)]


def groups_of(executor: Executor, *, num_blocks: int, releases: bool) -> list[KVGroup]:
    """releases: else no position is ever behind a window."""
    alignment = executor.info.read_alignment if releases else 2**20
    groups = kv_groups(executor)
    assert all(group.num_blocks >= num_blocks for group in groups)
    return [KVGroup(num_blocks, group.window, alignment) for group in groups]


def requests(num_tokens: int = 200) -> list[Request]:
    """A prompt, one that begins as it does, and another with three answers, sampled to the end."""
    generator = torch.Generator().manual_seed(5)
    first, second = (
        tuple(torch.randint(3, 96, (n,), generator=generator).tolist()) for n in (107, 40)
    )
    greedy = SamplingParams(max_tokens=num_tokens, temperature=0.0)
    return [
        Request(id=RequestId("a"), prompt_token_ids=first, sampling=greedy, arrival_s=0.0),
        Request(
            id=RequestId("b"),
            prompt_token_ids=(*first[:100], 7, 8, 9),
            sampling=greedy,
            arrival_s=0.0,
        ),
        Request(
            id=RequestId("c"),
            prompt_token_ids=second,
            sampling=replace(greedy, temperature=1.0, seed=3),
            arrival_s=0.0,
            n=3,
        ),
    ]


def build_cpu(model: Path) -> Executor:
    return cpu_executor(engine_config(model, block_size=BLOCK_SIZE, max_model_len=MAX_LEN), model)


@pytest.mark.parametrize("caching", [True, False], ids=["prefixes", "no prefixes"])
def test_answers_are_the_same_whether_blocks_are_given_back(model: Path, caching: bool) -> None:
    executor = build_cpu(model)
    plenty, few = 4 * 20, 24
    config = replace(CONFIG, enable_prefix_caching=caching)
    kept = Run(executor, groups_of(executor, num_blocks=plenty, releases=False), config)
    kept.run(requests())
    given_back = Run(executor, groups_of(executor, num_blocks=few, releases=True), config)
    given_back.run(requests())
    assert given_back.ids == kept.ids
    assert all(len(ids) == 200 for ids in kept.ids.values())
    if any(group.window is None for group in given_back.groups):
        assert given_back.scheduler.stats().preemptions_total > 0
    given_back.run([replace(each, id=RequestId(each.id * 2)) for each in requests()])
    again = {(name[0], index): ids for (name, index), ids in given_back.ids.items()}
    assert again == kept.ids
    if caching:
        # As much as was computed of the other prompt when it came: a short one has passed that.
        assert 64 <= given_back.cached["bb"] <= 96


@pytest.mark.skipif(not huge_pages.are_possible(), reason="memory that is kept is on huge pages")
def test_another_engine_finds_what_one_before_it_kept_in_every_group(model: Path) -> None:
    memory = make_descriptor()
    assert memory is not None
    config = engine_config(
        model,
        block_size=BLOCK_SIZE,
        max_model_len=MAX_LEN,
        kv_cache_memory_bytes=4 * 2**20,
        kv_memory=memory,
    )
    try:
        runs = []
        for _ in range(2):
            executor = cpu_executor(config, model)
            runs.append(Run(executor, kv_groups(executor), CONFIG))
            runs[-1].run(requests(40))
            assert len(executor.journals) == len(executor.info.kv_groups)
            del executor
        first, second = runs
        assert second.ids == first.ids and len(second.ids) == 5
        assert (first.cached["a"], second.cached["a"]) == (0, 96)
    finally:
        os.close(memory)


@pytest.mark.slow
@pytest.mark.parametrize("model", FAMILIES, indirect=True)
@pytest.mark.skipif(ON_GPU, reason="kernels are compiled here, not interpreted")
@pytest.mark.parametrize("backend", [AttentionBackend.TRITON, AttentionBackend.TORCH])
def test_a_gpus_path_reads_the_tables_of_each_group(model: Path, backend: AttentionBackend) -> None:
    config = engine_config(
        model,
        block_size=BLOCK_SIZE,
        max_model_len=MAX_LEN,
        attention_backend=backend,
        scheduler=SchedulerConfig(max_num_seqs=3, max_num_batched_tokens=50),
        kv_cache_memory_bytes=8 * 2**20,
    )
    executors = build_cpu(model), cuda_executor(config, model, Interpreter())
    # Greedy: for one seed, a GPU draws other numbers.
    greedy = SamplingParams(max_tokens=6, temperature=0.0)
    found = []
    for executor in executors:
        few = groups_of(executor, num_blocks=24, releases=True)
        found.append(Run(executor, few, config.scheduler))
        found[-1].run([replace(each, sampling=greedy) for each in requests(6)])
    assert found[1].ids == found[0].ids
    assert len(found[1].ids) == 5
