"""Blocks of a GPU's pool go to the host's memory and to a disk, and come back: by Triton's
interpreter. That no stream overtakes another is tested by `tests/scheduler/test_host_tier.py`."""

from collections import deque
from dataclasses import replace
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="Triton is not installed; pip install 'penstock[dev]'")

from penstock.engine.config import EngineConfig, KVCacheDtype
from penstock.engine.executors.cuda.device import Interpreter
from penstock.engine.executors.cuda.executor import CudaExecutor
from penstock.engine.loading.gpu_ranks import check_offload
from penstock.engine.memory.tiers.host_tier import HostTier
from penstock.engine.step.executor import PendingTokens
from penstock.scheduler.config import SchedulerConfig
from penstock.scheduler.errors import InvalidConfig
from penstock.scheduler.scheduler import Scheduler
from tests.support.executors import cuda_executor
from tests.support.kernels import ON_GPU
from tests.support.scheduling import make_request
from tests.support.tiny_models import SMALLEST, engine_config, make_model, save

pytestmark = pytest.mark.skipif(ON_GPU, reason="kernels are compiled here, not interpreted")
BLOCK_SIZE, MIB = 8, 2**20
# One gated delta net, and one attention.
HYBRID = SMALLEST | {
    "layer_types": ["linear_attention", "full_attention"],
    "linear_num_key_heads": 1,
    "linear_num_value_heads": 2,
    "linear_key_head_dim": 16,
}
FIRST, SECOND = [5, 6, 7, 8] * 5, [9, 8, 7] * 7


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(make_model("qwen3", **SMALLEST), tmp_path_factory.mktemp("tiny"))


def configured(model: Path, **changes: object) -> EngineConfig:
    settings: dict[str, object] = {
        "block_size": BLOCK_SIZE,
        "max_model_len": 24,
        "kv_cache_memory_bytes": MIB,
        "kv_offload_bytes": MIB,
        "scheduler": SchedulerConfig(max_num_seqs=1, max_num_batched_tokens=24),
    }
    return engine_config(model, **(settings | changes))


class Served:
    """An engine of few blocks, whose steps are launched ahead."""

    def __init__(self, config: EngineConfig, num_blocks: int = 3) -> None:
        self.executor: CudaExecutor = cuda_executor(config, Path(config.model), Interpreter())
        info = self.executor.info
        groups = [replace(group, num_blocks=num_blocks) for group in info.kv_groups]
        tier = self.executor.tier
        assert tier is None or isinstance(tier, HostTier)
        self.tier = tier
        self.scheduler = Scheduler(
            config.scheduler,
            groups=groups,
            block_size=info.block_size,
            max_model_len=info.max_model_len,
            tier=tier,
        )
        self._num_requests = 0

    def ask(self, prompt: list[int]) -> tuple[list[int], int]:
        """The answer, and how much of the prompt was not computed."""
        self._num_requests += 1
        self.scheduler.add(make_request(str(self._num_requests), prompt, max_tokens=2))
        token_ids: list[int] = []
        launched: deque[PendingTokens] = deque()
        num_cached = 0
        while self.scheduler.has_work or launched:
            if self.tier:
                self.tier.work()
            batch = self.scheduler.schedule(0.0)
            if batch:
                launched.append(self.executor.execute(batch))
            if launched and (not batch or len(launched) > 1):
                for output in self.scheduler.update(launched.popleft().wait()):
                    token_ids += output.token_ids
                    num_cached = output.num_cached_tokens
        if self.tier:
            self.tier.work()
        return token_ids, num_cached

    @property
    def ready(self) -> HostTier:
        assert self.tier
        return self.tier


@pytest.mark.parametrize(
    "kind", [KVCacheDtype.AUTO, pytest.param(KVCacheDtype.INT8, marks=pytest.mark.slow)]
)
def test_answers_are_the_same_from_the_hosts_memory(tiny: Path, kind: KVCacheDtype) -> None:
    config = configured(tiny, kv_cache_dtype=kind)
    served = Served(config)
    expected = served.ask(FIRST)[0]
    served.ask(SECOND)  # in the same blocks
    assert served.ask(FIRST) == (expected, 16)
    memory = served.ready.stats().memory
    assert memory and memory.hit_blocks_total and not memory.damaged_blocks_total
    served.ask(SECOND)
    for piece in served.ready._ready[0].values():
        [run] = served.ready._pieces.runs(0, [piece.slot])
        run.numpy()[0, 5] ^= 4
    assert served.ask(FIRST) == (expected, 0)
    memory = served.ready.stats().memory
    assert memory and memory.damaged_blocks_total


@pytest.mark.slow
def test_a_server_that_starts_again_finds_the_blocks_in_the_directory(
    tiny: Path, tmp_path: Path
) -> None:
    config = configured(tiny, kv_offload_dir=str(tmp_path / "blocks"))
    expected = Served(config).ask(FIRST)[0]
    again = Served(config)
    assert again.ask(FIRST) == (expected, 16)
    disk = again.ready.stats().disk
    assert disk and disk.hit_blocks_total == 2


@pytest.mark.slow
def test_layers_with_a_window_have_blocks_of_their_own_there(tmp_path: Path) -> None:
    options = SMALLEST | {
        "num_hidden_layers": 2,
        "layer_types": ["sliding_attention", "full_attention"],
    }
    path = save(make_model("gemma3", **options), tmp_path)
    served = Served(configured(path), num_blocks=4)
    assert len(served.ready._ready) == 2
    expected = served.ask(FIRST)[0]
    served.ask(SECOND)
    served.ask(SECOND[1:])
    assert served.ask(FIRST) == (expected, 16)


@pytest.mark.slow
def test_recurrent_states_come_back_from_the_hosts_memory_and_from_the_directory(
    tmp_path: Path,
) -> None:
    path = save(make_model("qwen3_5", **HYBRID), tmp_path / "model")
    config = configured(path, kv_offload_dir=str(tmp_path / "blocks"))
    served = Served(config, num_blocks=4)
    blocks, states = served.ready._pieces.num_slots
    # As a conversation of 4,096 tokens has: two snapshots, and 512 blocks of 8.
    assert 200 < blocks / states < 300
    expected = served.ask(FIRST)[0]
    for prompt in (SECOND, SECOND[1:], SECOND[2:]):
        served.ask(prompt)
    assert served.ask(FIRST) == (expected, 8)
    memory = served.ready.stats().memory
    assert memory and memory.hit_blocks_total and not memory.damaged_blocks_total
    again = Served(config)
    assert again.ask(FIRST) == (expected, 8)
    disk = again.ready.stats().disk
    assert disk and disk.hit_blocks_total == 2


def test_what_a_gpu_has_no_room_for_or_cannot_do_is_said_before_the_start(
    tiny: Path, tmp_path: Path
) -> None:
    directory = tmp_path / "blocks"
    for changes, message in (
        ({"kv_offload_bytes": 2**60}, "is of this machine's memory, of which .* set it to less"),
        ({"kv_offload_bytes": 100}, "has no room for one block of this model.*raise it"),
    ):
        with pytest.raises(InvalidConfig, match=message):
            cuda_executor(
                configured(tiny, kv_offload_dir=str(directory), **changes), tiny, Interpreter()
            )
    assert not directory.exists()
    ranks = configured(tiny, tensor_parallel_size=2)
    with pytest.raises(InvalidConfig, match=r"--tensor-parallel-size 2 .* with --kv-offload-gb"):
        check_offload(ranks)
