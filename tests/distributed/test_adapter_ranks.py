"""LoRA adapters on several ranks: the answers of one rank, with two adapters and without in one
batch, and all ranks or none have an adapter."""

import asyncio
import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from penstock.engine.config import AdapterSource, EngineConfig, LoraConfig
from penstock.engine.errors import AdapterRefused
from penstock.engine.executors.cpu import CpuExecutor
from penstock.engine.executors.first_rank import FirstRank
from penstock.engine.executors.followers import Followers, layout_of
from penstock.engine.ipc.supervisor import EndCause
from penstock.engine.loading import cpu
from penstock.engine.loading.ranks import build_ranks
from penstock.engine.models.config import ModelConfig
from penstock.engine.models.lora.weights import max_adapter_bytes
from penstock.engine.models.parts.adapter import Adapter
from penstock.engine.process.phases import Phases
from penstock.scheduler.types import Request, RequestId, RequestOutput
from tests.support.adapters import ALL, OF_DELTA_NETS, LinearShapes, save_adapter
from tests.support.executors import cpu_executor
from tests.support.parallel_answers import assert_close, parallel_config, requests
from tests.support.paths import DEMO_MODEL
from tests.support.quantized_checkpoints import FORMATS, save_quantized
from tests.support.rank_processes import ids_of, rank_of, started
from tests.support.rank_threads import RankThreads, memberships
from tests.support.scheduling import make_request
from tests.support.stepping import SteppedEngine
from tests.support.tiny_models import make_model, save

# Names of adapters, and what each changes; the last, layers of one stage alone.
ADAPTERS: dict[str, dict[str, Any]] = {
    "first": {"rank": 4},
    "second": {"rank": 11, "targets": ("q_proj", "o_proj", "down_proj")},
    "third": {"layers": [0]},
}


def saved(family: str, path: Path, codes: str | None = None, **options: Any) -> EngineConfig:
    """A model, with its adapters below it. codes: a format of its weights."""
    model = make_model(family, max_position_embeddings=512, **options)
    if codes is None:
        save(model, path)
    else:
        save_quantized(model, path, FORMATS[codes])
    config = parallel_config(path, lora=LoraConfig(max_rank=16))
    for seed, (name, settings) in enumerate(ADAPTERS.items()):
        shapes = LinearShapes(ModelConfig.from_dir(path))
        save_adapter(shapes, path / name, seed=seed, alpha=16, **settings)
    return config


def load(executor: CpuExecutor | FirstRank[CpuExecutor], path: str, name: str) -> str:
    """The id of the adapter that is below the path."""
    source = AdapterSource(name=name, path=f"{path}/{name}")
    return executor.adapters.load(source).result(timeout=60).id


def answers(
    config: EngineConfig, executor: CpuExecutor | FirstRank[CpuExecutor], num_tokens: int
) -> list[list[RequestOutput]]:
    """Each request with every adapter, and without one."""
    ids = [None, *(load(executor, config.model, name) for name in ADAPTERS)]
    asked = [
        replace(request, id=RequestId(f"{request.id}-{number}"), adapter=adapter)
        for request in requests(num_tokens)[2:]
        for number, adapter in enumerate(ids)
    ]
    return SteppedEngine(config, executor).run(asked)


@pytest.mark.parametrize("is_compiled", [True, False])
@pytest.mark.parametrize(
    ("family", "tensor_size", "num_stages", "codes"),
    [
        ("llama3_gqa", 2, 1, None),  # one KV head, which both have
        ("qwen3", 1, 2, None),
        ("phi4", 2, 2, None),  # matrices that are fused in the checkpoint
        ("gemma4", 2, 1, None),  # layers with other heads than others
        ("qwen3", 2, 2, "fp8-block"),
        ("qwen3_5", 2, 1, None),  # gated delta nets, by their heads
        ("qwen3_5", 1, 4, None),  # of which one stage has none
    ],
)
def test_ranks_answer_as_one_with_two_adapters_and_without(
    family: str,
    tensor_size: int,
    num_stages: int,
    codes: str | None,
    is_compiled: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if family == "qwen3_5":
        monkeypatch.setitem(ADAPTERS, "first", {"targets": (*ALL, *OF_DELTA_NETS)})
        monkeypatch.setitem(ADAPTERS, "third", {"targets": OF_DELTA_NETS, "layers": [0]})
    if family == "phi4":
        monkeypatch.setitem(ADAPTERS, "second", {"targets": ("qkv_proj", "gate_up_proj")})
        monkeypatch.setitem(ADAPTERS, "third", {"targets": ("o_proj",), "layers": [0]})
        monkeypatch.setitem(ADAPTERS, "first", {"targets": ("qkv_proj", "o_proj", "down_proj")})
    if not is_compiled:
        monkeypatch.setattr(cpu, "load_library", lambda *_, **__: None)
    config = saved(family, tmp_path, codes)
    num_tokens = 60 if is_compiled else 12
    alone = cpu_executor(config, tmp_path)
    expected = answers(config, alone, num_tokens)
    config = replace(config, tensor_parallel_size=tensor_size, pipeline_parallel_size=num_stages)
    ranks = RankThreads(config, memberships(config))
    try:
        given = answers(config, ranks, num_tokens)
        assert {len(rank.adapters._held) for rank in ranks.ranks} == {len(ADAPTERS)}
    finally:
        ranks.close()
    for one, other in zip(expected, given, strict=True):
        assert_close(one, other)


def test_each_rank_has_its_part_of_an_adapter(tmp_path: Path) -> None:
    config = replace(saved("qwen3", tmp_path), tensor_parallel_size=2)
    ranks = RankThreads(config, memberships(config))
    try:
        load(ranks, config.model, "first")
        parts = [next(iter(rank.adapters._held.values())).loaded for rank in ranks.ranks]
    finally:
        ranks.close()
    whole = max_adapter_bytes(ModelConfig.from_dir(tmp_path), 4, 4)
    assert [part.rank for part in parts] == [4, 4]
    assert all(whole / 2 < part.num_bytes < 0.8 * whole for part in parts)


@contextmanager
def running(config: EngineConfig) -> Iterator[FirstRank[CpuExecutor]]:
    """With the other ranks in processes."""
    followers = Followers(layout_of(config))
    try:
        yield build_ranks(config, Phases(), followers, on_gpus=False)
    finally:
        followers.close()


@pytest.mark.parametrize("sizes", [(2, 1), (1, 2)])
def test_an_adapter_that_one_rank_cannot_load_is_on_none(
    sizes: tuple[int, int], tmp_path: Path
) -> None:
    config = saved("qwen3", tmp_path)
    asked = requests(8)[2:4]
    alone = cpu_executor(config, tmp_path)
    ids = [load(alone, config.model, name) for name in ("first", "second")]
    named = [replace(each, adapter=id_) for each, id_ in zip(asked, ids, strict=True)]
    expected = SteppedEngine(config, alone).run(named)
    config = replace(config, tensor_parallel_size=sizes[0], pipeline_parallel_size=sizes[1])
    with running(config) as ranks:
        assert load(ranks, config.model, "second") == ids[1]
        store, file = ranks.adapters, tmp_path / "first" / "adapter_config.json"
        content, make = file.read_text(), store._make

        def make_late(adapter: Adapter) -> object:
            file.write_text(content + " ")  # after this rank has read it, before the other one
            return make(adapter)

        store._make = make_late
        with pytest.raises(AdapterRefused, match="not those that 'first' was loaded from"):
            load(ranks, config.model, "first")
        assert list(store._held) == [ids[1]]
        store._make = make
        file.write_text(content)
        assert load(ranks, config.model, "first") == ids[0]
        engine = SteppedEngine(config, ranks)
        for one, other in zip(expected, engine.run(named), strict=True):
            assert_close(one, other)
        # It goes from all ranks when no request has it, and may come back.
        store.unload(ids[0])
        assert list(store._held) == [ids[1]]
        assert load(ranks, config.model, "first") == ids[0]
        again = [replace(each, id=RequestId(f"again-{each.id}")) for each in named]
        for one, other in zip(expected, engine.run(again), strict=True):
            assert_close(one, other)


async def test_adapters_are_loaded_while_ranks_compute_and_outlive_an_engine(
    tmp_path: Path,
) -> None:
    shapes = LinearShapes(ModelConfig.from_dir(DEMO_MODEL))
    for seed, name in enumerate(("first", "second")):
        save_adapter(shapes, tmp_path / name, seed=seed, size=0.3)
    first = AdapterSource(name="first", path=str(tmp_path / "first"))
    lora = LoraConfig(max_rank=16, adapters=(first,))

    def asked(adapter: str | None, number: int = 0) -> Request:
        request = make_request(f"{adapter}-{number}", 40, max_tokens=300, temperature=0.0)
        return replace(request, adapter=adapter)

    async with started(lora=lora, tensor_parallel_size=2) as client:
        base = asyncio.ensure_future(ids_of(client, asked(None)))
        with pytest.raises(AdapterRefused, match=r"has no adapter_config\.json"):
            await client.adapters.load("none", str(tmp_path))
        second = await client.adapters.load("second", str(tmp_path / "second"))
        assert not base.done()
        ids = [None, client.adapters.by_name["first"].id, second.id]
        alone = [await base, *[await ids_of(client, asked(each)) for each in ids[1:]]]
        assert len({str(each) for each in alone}) == 3
        mixed = asyncio.gather(*(ids_of(client, asked(each, 1)) for each in ids))
        await asyncio.sleep(0.1)
        client.adapters.unload("first")  # its request goes on with it
        os.kill(rank_of(client), signal.SIGKILL)
        assert await mixed == alone
        assert client.restarts == {EndCause.KILLED: 1}
        assert list(client.adapters.by_name) == ["second"]
        again = await client.adapters.load("first", first.path)
        assert await ids_of(client, asked(again.id, 2)) == alone[1]
