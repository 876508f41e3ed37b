"""`CpuExecutor` driven by hand-made batches."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from penstock.engine.config import Device, Dtype, LoadFormat
from penstock.engine.errors import UnknownAdapter
from penstock.engine.executors.cpu import CpuExecutor
from penstock.engine.executors.cuda.device import Interpreter
from penstock.engine.loading.executor import build_executor
from penstock.engine.models.config import ModelConfig
from penstock.engine.process.phases import Phases
from penstock.scheduler.errors import InvalidConfig
from penstock.scheduler.types import BlockCopy, SamplingParams, SlotAssignment, TableUpdate
from tests.support.compiler import needs_compiler
from tests.support.executors import cpu_executor, cuda_executor
from tests.support.paths import STORIES
from tests.support.scheduling import make_request
from tests.support.stories import needs_stories
from tests.support.tiny_models import (
    BLOCK_SIZE,
    GREEDY,
    engine_config,
    made_config,
    make_batch,
    make_model,
    save,
)
from tests.support.weight_formats import NegatedLinear, reversed_config


def assign(slot: int, token_ids: list[int], blocks: list[int]) -> SlotAssignment:
    return SlotAssignment(slot, tuple(token_ids), len(token_ids), (tuple(blocks),), GREEDY, seed=0)


def generate(
    executor: CpuExecutor, prompts: list[list[int]], num_new: int, chunk: int = 512
) -> list[list[int]]:
    """Greedy answers to all prompts, run together, each in its own slot and far-apart blocks."""
    stride = len(prompts)
    answers: list[list[int]] = [[] for _ in prompts]
    held = [0] * stride
    done = [0] * stride
    assignments = tuple(assign(slot, prompt, []) for slot, prompt in enumerate(prompts))
    while any(len(answer) < num_new for answer in answers):
        decodes = [slot for slot in range(stride) if answers[slot] and len(answers[slot]) < num_new]
        prefills = [slot for slot in range(stride) if not answers[slot]]
        counts = [1] * len(decodes) + [min(chunk, len(prompts[s]) - done[s]) for s in prefills]
        slots = decodes + prefills
        updates = []
        for slot, count in zip(slots, counts, strict=True):
            while held[slot] * BLOCK_SIZE < done[slot] + count:
                updates.append(TableUpdate(slot, held[slot], held[slot] * stride + slot))
                held[slot] += 1
        ends = [done[s] + n for s, n in zip(slots, counts, strict=True)]
        samples = tuple(end >= len(prompts[s]) for s, end in zip(slots, ends, strict=True))
        batch = make_batch(
            tuple(slots),
            tuple(done[slot] for slot in slots),
            tuple(counts),
            samples=samples,
            num_decodes=len(decodes),
            assignments=assignments,
            table_updates=tuple(updates),
        )
        assignments = ()
        sampled = executor.execute(batch).wait().token_ids
        sampling = [slot for slot, yes in zip(slots, samples, strict=True) if yes]
        for slot, token_id in zip(sampling, sampled, strict=True):
            answers[slot].append(token_id)
        for slot, end in zip(slots, ends, strict=True):
            done[slot] = end
    return answers


@pytest.fixture(scope="module")
def stories() -> Any:
    golden = json.loads((STORIES / "golden.json").read_text())
    return cpu_executor(engine_config(STORIES), STORIES), golden


@needs_stories
def test_each_golden_story_alone(stories: Any) -> None:
    executor, golden = stories
    for story in golden:
        num_new = len(story["new_ids"])
        assert generate(executor, [story["prompt_ids"]], num_new) == [story["new_ids"]]


@needs_stories
@pytest.mark.parametrize("chunk", [7, 512])
def test_golden_stories_in_a_batch_of_64(stories: Any, chunk: int) -> None:
    executor, golden = stories
    crowd = [golden[i % len(golden)] for i in range(64)]
    num_new = min(len(story["new_ids"]) for story in golden)
    answers = generate(executor, [story["prompt_ids"] for story in crowd], num_new, chunk)
    assert answers == [story["new_ids"][:num_new] for story in crowd]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(make_model("llama3.2_tied"), tmp_path_factory.mktemp("tiny"))


def test_a_copied_block_continues_as_its_source_did(tiny: Path) -> None:
    executor = cpu_executor(engine_config(tiny), tiny)
    prompt = [5, 6, 7, 8, 9, 10]
    batch = make_batch((0,), (0,), (6,), assignments=(assign(0, prompt, [3, 4]),))
    first = executor.execute(batch).wait().token_ids
    expected = executor.execute(make_batch((0,), (6,), (1,), num_decodes=1)).wait().token_ids
    fork = make_batch(
        (1,),
        (6,),
        (1,),
        num_decodes=1,
        assignments=(assign(1, prompt + first, [3, 4]),),
        table_updates=(TableUpdate(1, 1, 8),),
        copies=(BlockCopy(4, 8),),
    )
    assert executor.execute(fork).wait().token_ids == expected


def test_an_adapter_is_refused(tiny: Path) -> None:
    executor = cpu_executor(engine_config(tiny), tiny)
    with pytest.raises(UnknownAdapter, match="no adapter 'french'"):
        executor.prepare(make_request("a", 5, adapter="french"))


def test_a_chunk_that_does_not_end_its_prompt_samples_nothing(tiny: Path) -> None:
    executor = cpu_executor(engine_config(tiny), tiny)
    batch = make_batch((0,), (0,), (2,), samples=(False,), assignments=(assign(0, [5, 6, 7], [0]),))
    assert executor.execute(batch).wait().token_ids == []


def test_logprobs_come_for_the_rows_that_want_them(tiny: Path) -> None:
    executor = cpu_executor(engine_config(tiny), tiny)
    wanting = SamplingParams(max_tokens=4, temperature=0.0, num_logprobs=2)
    assignments = (
        assign(0, [5, 6], [0]),
        SlotAssignment(1, (5, 6), 2, ((1,),), wanting, seed=0),
    )
    sampled = executor.execute(make_batch((0, 1), (0, 0), (2, 2), assignments=assignments)).wait()
    assert sampled.logprobs is not None
    assert sampled.logprobs[0] is None
    assert sampled.logprobs[1] is not None
    assert sampled.logprobs[1].top[0] == (sampled.token_ids[1], sampled.logprobs[1].logprob)


def test_info_counts_the_tied_embedding_once(tiny: Path) -> None:
    info = cpu_executor(engine_config(tiny), tiny).info
    num_parameters = sum(p.numel() for p in make_model("llama3.2_tied").parameters())
    assert info.num_parameters == num_parameters
    assert info.weight_bytes == 4 * num_parameters
    assert info.kv_bytes_per_token == 2 * 3 * 2 * 16 * 4


@pytest.mark.parametrize("family", ["llama_biases", "qwen2_window", "qwen3_bias"])
def test_info_does_not_count_the_gathered_embedding_as_read(family: str, tmp_path: Path) -> None:
    model = make_model(family)
    info = cpu_executor(engine_config(save(model, tmp_path)), tmp_path).info
    num_parameters = sum(p.numel() for p in model.parameters())
    assert info.num_parameters == num_parameters
    assert info.weight_bytes == 4 * (num_parameters - 96 * 64)


@needs_compiler
@pytest.mark.parametrize("lacks", ["a feature", "a weight format"])
def test_torch_computes_what_the_compiled_step_does_not(
    lacks: str, tiny: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    config = engine_config(tiny)
    expected = generate(cpu_executor(config, tiny), [[5, 6, 7]], 5)
    assert not caplog.messages
    if lacks == "a feature":
        changed = reversed_config(ModelConfig.from_dir(tiny))
        monkeypatch.setattr(ModelConfig, "from_dir", lambda path: changed)
    else:
        monkeypatch.setattr("penstock.engine.loading.steps.PlainLinear", NegatedLinear)
    executor = cpu_executor(config, tiny)
    word = {"a feature": "Reversed", "a weight format": "'negated'"}[lacks]
    (message,) = caplog.messages
    assert message.startswith("torch's operators compute the model") and word in message
    assert generate(executor, [[5, 6, 7]], 5) == expected


def test_info_counts_the_bytes_that_a_weight_format_stores(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = make_model("llama_biases")
    config = engine_config(save(model, tmp_path))
    monkeypatch.setattr("penstock.engine.loading.steps.PlainLinear", NegatedLinear)
    monkeypatch.setattr("penstock.engine.loading.cpu.cpu_linear", lambda dtype: NegatedLinear)
    embedding = 96 * 64  # the rest of the matrices are linear layers, stored in float64
    matrices = sum(p.numel() for p in model.parameters() if p.dim() == 2) - embedding
    vectors = sum(p.numel() for p in model.parameters() if p.dim() == 1)
    assert cpu_executor(config, tmp_path).info.weight_bytes == 8 * matrices + 4 * vectors


@pytest.mark.parametrize("dtype", [Dtype.BFLOAT16, Dtype.HALF])
@pytest.mark.parametrize("family", ["llama2", "llama3.2_tied", "llama_biases", "qwen3_bias"])
def test_the_layers_have_as_many_bytes_as_config_json_says(
    family: str, dtype: Dtype, tmp_path: Path
) -> None:
    path = save(make_model(family), tmp_path)
    info = cpu_executor(engine_config(path, dtype=dtype), path).info
    config = ModelConfig.from_dir(path)
    assert info.weight_bytes == config.step_weight_bytes(2)
    assert config.weight_bytes(2) == 2 * info.num_parameters


def test_dummy_weights_need_only_config_json_and_are_the_same_every_time(tmp_path: Path) -> None:
    model = make_model("qwen3")
    model.config.save_pretrained(tmp_path)
    config = engine_config(tmp_path, load_format=LoadFormat.DUMMY)
    answers = [generate(cpu_executor(config, tmp_path), [[5, 6, 7]], 5) for _ in range(2)]
    assert answers[0] == answers[1]


def test_bfloat16_answers_are_near_float32s(tiny: Path) -> None:
    sampling = SamplingParams(max_tokens=1, temperature=0.0, num_logprobs=0)
    prompt = tuple(range(3, 43))
    blocks = tuple(range(10))
    logprobs = []
    for dtype in (Dtype.FLOAT32, Dtype.BFLOAT16):
        executor = cpu_executor(engine_config(tiny, dtype=dtype), tiny)
        assignment = SlotAssignment(0, prompt, 40, (blocks,), sampling, seed=0)
        sampled = executor.execute(make_batch((0,), (0,), (40,), assignments=(assignment,))).wait()
        assert sampled.logprobs is not None
        assert sampled.logprobs[0] is not None
        logprobs.append(sampled.logprobs[0].logprob)
    assert logprobs[0] == pytest.approx(logprobs[1], abs=0.1)


def test_a_pool_too_small_for_one_sequence_is_refused_with_what_would_fit(tiny: Path) -> None:
    needed = 128 * 2 * 3 * 2 * 16 * 4
    config = engine_config(tiny, max_model_len=128, kv_cache_memory_bytes=needed - 1)
    with pytest.raises(InvalidConfig, match=f"--kv-cache-memory-bytes to at least {needed} or "):
        cpu_executor(config, tiny)
    fits = engine_config(tiny, max_model_len=128, kv_cache_memory_bytes=needed)
    assert cpu_executor(fits, tiny).info.num_blocks == 32


def test_a_default_context_is_cut_to_the_pool(tiny: Path) -> None:
    config = engine_config(tiny, kv_cache_memory_bytes=64 * 2 * 3 * 2 * 16 * 4)
    assert cpu_executor(config, tiny).info.max_model_len == 64


def test_a_context_beyond_the_models_is_refused(tiny: Path) -> None:
    with pytest.raises(InvalidConfig, match="at most 128 positions"):
        cpu_executor(engine_config(tiny, max_model_len=129), tiny)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_cuda_without_a_gpu_is_refused(tiny: Path) -> None:
    with pytest.raises(InvalidConfig, match="use --device cpu"):
        build_executor(engine_config(tiny, device=Device.CUDA), Phases())


@needs_compiler
def test_auto_is_bfloat16_wherever_the_step_is_compiled(
    tiny: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("penstock.engine.loading.devices.computes_bfloat16", lambda device: False)
    config = engine_config(tiny, dtype=Dtype.AUTO)
    assert cpu_executor(config, tiny).info.dtype == "bfloat16"
    monkeypatch.setattr("penstock.engine.loading.cpu.load_library", lambda *_, **__: None)
    assert cpu_executor(config, tiny).info.dtype == "float32"


@pytest.mark.parametrize("dtype", [Dtype.FLOAT16, Dtype.HALF])
def test_gemma_3_in_float16_is_refused_before_its_weights_are_read(
    dtype: Dtype, tmp_path: Path
) -> None:
    made_config("gemma3_wrapped").save_pretrained(tmp_path)
    config = engine_config(tmp_path, dtype=dtype)
    with pytest.raises(InvalidConfig, match=f"--dtype is {dtype}.* gemma3_text .*--dtype bfloat16"):
        cpu_executor(config, tmp_path)
    with pytest.raises(InvalidConfig, match="above 65504, which float16 does not hold"):
        cuda_executor(config, tmp_path, Interpreter())
