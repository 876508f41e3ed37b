"""Ranks of the CUDA executor beside one of the CPU executor: logits within 1e-4 in float32, and the
same greedy answers. Two that split each layer, two stages of layers, and two stages of two.

They share a GPU, where there is one, or compute in Triton's interpreter; and have two GPUs and
NCCL, where there are so many.
"""

import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed; pip install 'penstock[dev]'")

from penstock.engine.config import AdapterSource, EngineConfig, LoraConfig, Quantization
from penstock.engine.executors.cuda.device import Interpreter
from penstock.engine.executors.cuda.executor import CudaExecutor
from penstock.engine.executors.first_rank import FirstRank
from penstock.engine.executors.followers import Followers
from penstock.engine.loading.gpu_ranks import SHARED_DEVICE, check_stages
from penstock.engine.loading.ranks import build_ranks
from penstock.engine.models.config import ModelConfig
from penstock.engine.models.division.shard import Shard
from penstock.engine.models.division.stage import Stage
from penstock.engine.models.formats.kept import OnGpu
from penstock.engine.process.phases import Phases
from penstock.engine.ranks.group import RankFailed
from penstock.engine.ranks.layout import RankLayout
from penstock.engine.step.executor import Executor
from penstock.scheduler.config import SchedulerConfig
from penstock.scheduler.errors import InvalidConfig
from penstock.scheduler.types import Request, RequestId, RequestOutput, SamplingParams
from tests.support.adapters import save_adapter
from tests.support.executors import cuda_executor
from tests.support.parallel_answers import assert_close
from tests.support.quantized_checkpoints import FORMATS, save_quantized
from tests.support.rank_processes import is_running
from tests.support.stepping import SteppedEngine, ids_of
from tests.support.tiny_models import engine_config, make_model, save

# Each starts a process, and interprets the largest step of a model.
pytestmark = pytest.mark.timeout(1200)
PLACES = [
    pytest.param(True, id="one-device"),
    pytest.param(
        False,
        id="two-gpus",
        marks=pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs"),
    ),
]
# Biases that rank 0 alone adds; a tied embedding that two ranks cannot divide, and norms of heads;
# norms over all heads; experts; recurrent states, of which stages have layers of one kind each; two
# shapes of KV heads, and experts beside an MLP.
FAMILIES: dict[str, dict[str, Any]] = {
    "llama_biases": {},
    "qwen3": {"vocab_size": 97},
    "olmo2": {},
    "qwen3_moe": {},
    "qwen3_5": {"layer_types": ["linear_attention", "full_attention"]},
    "gemma4_moe": {
        "layer_types": ["sliding_attention", "full_attention"],
        "num_global_key_value_heads": 2,
    },
}
# Of stages, besides: two groups of layers, of which the second stage has one alone.
IN_STAGES: dict[str, dict[str, Any]] = {
    **FAMILIES,
    "gemma3": {
        "num_hidden_layers": 3,
        "layer_types": ["full_attention", "sliding_attention", "sliding_attention"],
    },
}

# Of 32 columns on each of two ranks.
WHOLE_GROUPS: dict[str, Any] = {
    "head_dim": 16,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "max_position_embeddings": 256,
}


def config_of(path: Path, **changes: object) -> EngineConfig:
    settings: dict[str, object] = {
        "block_size": 16,
        "kv_cache_memory_bytes": 2**20,
        "scheduler": SchedulerConfig(max_num_seqs=2, max_num_batched_tokens=20),
    }
    return engine_config(path, **(settings | changes))


def requests(max_tokens: int) -> list[Request]:
    """One with logprobs of its prompt; and one whose prompt takes two steps, with more tokens than
    the kernels of few rows take."""
    generator = torch.Generator().manual_seed(5)
    prompts = [tuple(torch.randint(3, 90, (n,), generator=generator).tolist()) for n in (5, 21)]
    greedy = SamplingParams(max_tokens=max_tokens, temperature=0.0, num_logprobs=3)
    scored = replace(greedy, num_prompt_logprobs=2)
    return [
        Request(id=RequestId(str(i)), prompt_token_ids=ids, sampling=sampling, arrival_s=0.0)
        for i, (ids, sampling) in enumerate(zip(prompts, (scored, greedy), strict=True))
    ]


def requests_after_the_graph() -> list[Request]:
    """Greedy ones, which no graph samples: by a kernel after it, and by torch."""
    greedy = SamplingParams(max_tokens=5, temperature=0.0, num_logprobs=2)
    ways = (replace(greedy, repetition_penalty=1.5), replace(greedy, bad_words=((5, 6), (7,))))
    return [
        Request(id=RequestId(f"{i}"), prompt_token_ids=(9, 5, 8 + i), sampling=way, arrival_s=0.0)
        for i, way in enumerate(ways)
    ]


@contextmanager
def started(
    config: EngineConfig, shares_device: bool, tensor_size: int = 1, num_stages: int = 1
) -> Iterator[FirstRank[CudaExecutor]]:
    config = replace(config, tensor_parallel_size=tensor_size, pipeline_parallel_size=num_stages)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(SHARED_DEVICE, "1" if shares_device else "0")
        followers = Followers(RankLayout(tensor_size, num_stages))
        try:
            ranks = build_ranks(config, Phases(), followers, on_gpus=True)
            try:
                yield ranks
            finally:
                ranks.close()
        finally:
            followers.close()


@pytest.mark.parametrize("shares_device", PLACES)
@pytest.mark.parametrize("family", FAMILIES)
def test_two_ranks_answer_as_one(family: str, shares_device: bool, tmp_path: Path) -> None:
    options = {"num_hidden_layers": 2, "max_position_embeddings": 256} | FAMILIES[family]
    config = config_of(save(make_model(family, **options), tmp_path))
    asked = requests(15 if family == "llama_biases" else 5)
    alone = SteppedEngine(config)
    expected = alone.run(asked)
    with started(config, shares_device, 2) as ranks:
        answers = SteppedEngine(config, ranks).run(asked)
        for one, other in zip(expected, answers, strict=True):
            assert_close(one, other)
        whole, part = alone.executor.info, ranks.info
    assert part.tensor_parallel_size == 2 and part.vocab_size == whole.vocab_size
    assert part.num_parameters == whole.num_parameters
    assert 0.5 <= part.weight_bytes / whole.weight_bytes < 0.6
    assert 2 * part.attention[0].kv_bytes_per_token == whole.attention[0].kv_bytes_per_token


@pytest.mark.skipif(torch.cuda.is_available(), reason="one device is enough of this")
def test_two_ranks_of_a_model_with_inputs_of_each_layer_answer_as_one(tmp_path: Path) -> None:
    kinds = ["sliding_attention", "full_attention"]
    options: dict[str, Any] = {"num_hidden_layers": 3, "num_kv_shared_layers": 1}
    options |= {"max_position_embeddings": 256, "layer_types": [*kinds, kinds[1]]}
    model = make_model("gemma4_small_wrapped", **options)
    config = config_of(save(model, tmp_path))
    asked = requests(3)
    expected = SteppedEngine(config).run(asked)
    with started(config, True, 2) as ranks:
        for one, other in zip(expected, SteppedEngine(config, ranks).run(asked), strict=True):
            assert_close(one, other)


def test_stages_of_a_model_with_inputs_of_each_layer_are_refused(tmp_path: Path) -> None:
    save(make_model("gemma4_small_wrapped"), tmp_path)
    with pytest.raises(InvalidConfig, match="do not pass on what this model's per_layer_inputs"):
        check_stages(RankLayout(1, 2), ModelConfig.from_dir(tmp_path))


@pytest.mark.skipif(torch.cuda.is_available(), reason="one device is enough of this")
@pytest.mark.parametrize(("tensor_size", "num_stages"), [(2, 1), (1, 2)])
def test_ranks_answer_as_one_with_two_adapters_and_without(
    tensor_size: int, num_stages: int, tmp_path: Path
) -> None:
    model = make_model("qwen3", num_hidden_layers=2, max_position_embeddings=256)
    path = save(model, tmp_path)
    config = config_of(path, lora=LoraConfig(max_loras=2, max_rank=16))
    save_adapter(model, path / "first", rank=4, seed=1)
    save_adapter(model, path / "second", rank=16, seed=2, layers=[0])  # of one stage alone
    config = replace(config, scheduler=replace(config.scheduler, max_num_seqs=3))
    *_, request = requests(5)

    def answers(executor: Executor) -> list[list[RequestOutput]]:
        assert executor.adapters is not None
        asked = [request]
        for name in ("first", "second"):
            source = AdapterSource(name=name, path=str(path / name))
            adapter = executor.adapters.load(source).result(timeout=300).id
            asked.append(replace(request, id=RequestId(name), adapter=adapter))
        return SteppedEngine(config, executor).run(asked)

    expected = answers(SteppedEngine(config).executor)
    with started(config, True, tensor_size, num_stages) as ranks:
        for one, other in zip(expected, answers(ranks), strict=True):
            assert_close(one, other)


@pytest.mark.parametrize("shares_device", PLACES)
@pytest.mark.parametrize(
    ("name", "tensor_size", "num_stages"), [("fp8-block", 2, 1), ("awq", 2, 1), ("awq", 1, 2)]
)
def test_ranks_answer_as_one_with_codes(
    name: str, tensor_size: int, num_stages: int, shares_device: bool, tmp_path: Path
) -> None:
    model, codes = make_model("qwen3", **WHOLE_GROUPS), tmp_path / "codes"
    plain = save(save_quantized(model, codes, FORMATS[name]), tmp_path / "plain")
    config, asked = config_of(codes), requests(3)
    expected = SteppedEngine(config_of(plain)).run(asked)
    whole = ModelConfig.from_dir(codes)
    model_of_rank = Shard(whole, 0, tensor_size).config
    if num_stages > 1:
        model_of_rank = Stage(model_of_rank, num_stages - 1, num_stages).config
    with started(config, shares_device, tensor_size, num_stages) as ranks:
        for one, other in zip(expected, SteppedEngine(config, ranks).run(asked), strict=True):
            assert_close(one, other)
        held = ranks.info.weight_bytes
    kept = OnGpu(torch.device("meta")).num_bytes
    assert held == model_of_rank.step_weight_bytes(4, kept)


@pytest.mark.parametrize("shares_device", PLACES)
def test_ranks_round_their_own_weights(
    shares_device: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    path = save(make_model("qwen3", **WHOLE_GROUPS), tmp_path / "model")
    config, asked = config_of(path, quantization=Quantization.INT8), requests(3)
    gpu = None if torch.cuda.is_available() else Interpreter()
    expected = SteppedEngine(config, cuda_executor(config, path, gpu)).run(asked)
    with started(config, shares_device, 2) as ranks:
        for one, other in zip(expected, SteppedEngine(config, ranks).run(asked), strict=True):
            assert_close(one, other)
    assert len(list((tmp_path / "cache" / "penstock" / "quantized").iterdir())) == 1 + 2


@pytest.mark.parametrize("shares_device", PLACES)
def test_the_end_of_a_rank_is_one_sentence(shares_device: bool, tmp_path: Path) -> None:
    path = save(make_model("llama2", max_position_embeddings=512), tmp_path)
    config = config_of(path)
    with started(config, shares_device, 2) as ranks:
        (rank_1,) = ranks.followers.pids
        os.kill(rank_1, signal.SIGKILL)
        with pytest.raises(RankFailed, match=r"^rank 1 was ended by signal 9[^\n]*$"):
            SteppedEngine(config, ranks).run(requests(5))


@pytest.mark.parametrize("shares_device", PLACES)
@pytest.mark.parametrize("family", IN_STAGES)
def test_two_stages_answer_as_one(family: str, shares_device: bool, tmp_path: Path) -> None:
    options = {"num_hidden_layers": 2, "max_position_embeddings": 256} | IN_STAGES[family]
    config = config_of(save(make_model(family, **options), tmp_path))
    asked = [*requests(15 if family == "gemma3" else 5), *requests_after_the_graph()]
    alone = SteppedEngine(config)
    expected = alone.run(asked)
    with started(config, shares_device, num_stages=2) as ranks:
        engine = SteppedEngine(config, ranks)
        for one, other in zip(expected, engine.run(asked), strict=True):
            assert_close(one, other)
        whole, part = alone.executor.info, ranks.info
    assert part.pipeline_parallel_size == part.max_in_flight == 2
    assert (part.vocab_size, part.num_parameters) == (whole.vocab_size, whole.num_parameters)
    assert len(part.attention) == len(whole.attention)
    # The last stage reads the output layer besides its layers.
    assert part.weight_bytes < whole.weight_bytes
    assert len(engine.computed_s) > 10 and all(seconds > 0 for seconds in engine.computed_s)


@pytest.mark.parametrize("shares_device", PLACES)
def test_a_second_turn_goes_on_from_the_snapshot_of_each_stage(
    shares_device: bool, tmp_path: Path
) -> None:
    """It is taken by a decode, after 32 tokens. The first stage alone has a state."""
    options = {"num_hidden_layers": 2, "max_position_embeddings": 256} | FAMILIES["qwen3_5"]
    config = config_of(save(make_model("qwen3_5", **options), tmp_path))
    (_, first) = requests(12)
    (answer,) = SteppedEngine(config).run([first])
    turn = replace(
        first,
        prompt_token_ids=(*first.prompt_token_ids, *ids_of(answer), 7, 8),
        sampling=replace(first.sampling, max_tokens=4),
    )
    (expected,) = SteppedEngine(config).run([turn])
    with started(config, shares_device, num_stages=2) as ranks:
        engine = SteppedEngine(config, ranks)
        assert_close(answer, engine.run([first])[0])
        assert_close(expected, engine.run([turn])[0])
        assert engine.scheduler.stats().prefix_hit_tokens_total == 32


@pytest.mark.parametrize("shares_device", PLACES)
def test_the_end_of_a_stage_is_one_sentence_of_who_and_where(
    shares_device: bool, tmp_path: Path
) -> None:
    path = save(make_model("llama2", max_position_embeddings=512), tmp_path)
    config = config_of(path)
    with started(config, shares_device, num_stages=2) as ranks:
        engine = SteppedEngine(config, ranks)
        engine.run(requests(2))
        (rank_1,) = ranks.followers.pids
        os.kill(rank_1, signal.SIGKILL)
        killed_s = time.monotonic()
        message = r"^rank 1 \(stage 0\) was ended by signal 9[^\n]*$"
        with pytest.raises(RankFailed, match=message):
            engine.run(requests(5))
        assert time.monotonic() - killed_s < 20  # some ms, unless the machine is busy
    assert not is_running(rank_1)


@pytest.mark.skipif(torch.cuda.is_available(), reason="one device is enough of this")
def test_two_stages_of_two_ranks_answer_as_one(tmp_path: Path) -> None:
    options = {"num_hidden_layers": 2, "max_position_embeddings": 256}
    config = config_of(save(make_model("qwen3", **options), tmp_path))
    asked = requests(4)
    expected = SteppedEngine(config).run(asked)
    with started(config, True, 2, 2) as ranks:
        for one, other in zip(expected, SteppedEngine(config, ranks).run(asked), strict=True):
            assert_close(one, other)
        pids = ranks.followers.pids
    assert len(pids) == 3 and not any(map(is_running, pids))
