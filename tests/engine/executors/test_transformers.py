"""A class of transformers over the paged pool: the reference of our own families inside the real
executor, and what serves the others."""

import json
import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from penstock.engine.config import (
    AttentionBackend,
    Dtype,
    KVCacheDtype,
    LoadFormat,
    ModelImpl,
    Quantization,
)
from penstock.engine.executors.cuda.device import Interpreter
from penstock.engine.loading.executor import build_executor
from penstock.engine.loading.load import load_executor
from penstock.engine.models.errors import InvalidModel
from penstock.engine.process.phases import Phases
from penstock.engine.step.executor import Executor
from penstock.scheduler.errors import InvalidConfig
from tests.support.fallback_runs import assert_greedy, greedy_answers, prompts
from tests.support.other_decoders import architecture_of, make_other
from tests.support.tiny_models import engine_config, make_model, save

# With experts, sinks and windows; with keys wider than values. All: `make test-models`.
FAMILIES = ("gpt_oss", pytest.param("deepseek_v3", marks=pytest.mark.slow))


def start(path: Path, **changes: Any) -> Executor:
    return build_executor(engine_config(path, **changes), Phases())


@pytest.mark.parametrize("model_type", FAMILIES)
def test_in_chunks_preempted_and_with_cached_prefixes_answers_are_those_of_the_class_alone(
    model_type: str, tmp_path: Path
) -> None:
    model = make_other(model_type)
    answers = greedy_answers(save(model, tmp_path), ModelImpl.TRANSFORMERS)
    for prompt, answer in zip([*prompts(), prompts()[0]], answers, strict=True):
        assert_greedy(model, prompt, answer)


def test_our_own_implementation_answers_as_the_class_of_transformers_does(tmp_path: Path) -> None:
    path = save(make_model("gemma3"), tmp_path)
    theirs = greedy_answers(path, ModelImpl.TRANSFORMERS)
    assert greedy_answers(path, ModelImpl.PENSTOCK) == theirs


@pytest.fixture(scope="module")
def moe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(make_other("olmoe"), tmp_path_factory.mktemp("moe"))


def test_a_start_says_whose_class_computes_the_model_and_counts_what_it_reads(
    moe: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        info = start(moe).info
    assert caplog.text.count("computed by the class OlmoeForCausalLM of transformers") == 1
    assert "its family has no implementation of ours" in caplog.text
    assert (info.model_impl, info.architecture) == ("transformers", "olmoe")
    model = make_other("olmoe")
    num_parameters = sum(p.numel() for p in model.parameters())
    of_experts = {n: p.numel() for n, p in model.named_parameters() if ".experts." in n}
    assert info.num_parameters == num_parameters
    assert info.weight_bytes == 4 * (num_parameters - 96 * 64 - sum(of_experts.values()))
    assert info.experts is not None
    assert info.experts.expert_bytes * 3 * 4 == 4 * sum(of_experts.values())
    # A token is routed to 2 of 4 experts in each of 3 layers; 5 tokens to nearly all of them.
    assert (info.experts.expected(1), info.experts.expected(5)) == (6, 12)


def test_in_bfloat16_and_with_a_cache_in_8_bits_it_starts_too(moe: Path) -> None:
    info = start(moe, dtype=Dtype.BFLOAT16, kv_cache_dtype=KVCacheDtype.INT8).info
    assert (info.dtype, info.kv_cache_dtype) == ("bfloat16", "int8")


def test_dummy_weights_need_only_config_json(tmp_path: Path) -> None:
    make_other("gpt2").config.save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    config["architectures"] = [architecture_of("gpt2")]
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert start(tmp_path, load_format=LoadFormat.DUMMY).info.max_model_len == 128


def test_on_a_gpu_the_pool_has_what_the_largest_step_leaves(moe: Path) -> None:
    """By the arithmetic of a GPU, on this machine's processor."""

    class SmallGpu(Interpreter):
        total_bytes = 2**20
        used = 2**18

        def used_bytes(self) -> int:
            self.used += 2**10  # of each call more than of the one before
            return self.used

    config = engine_config(moe, kv_cache_memory_bytes=None, max_model_len=64)
    info = load_executor(config, moe, None, SmallGpu(), Phases()).info
    assert info.device == SmallGpu.name
    held = 2**20 * 0.9 - (2**18 + 5 * 2**10) - 2**10
    assert info.num_blocks == held // (info.kv_bytes_per_token * info.block_size)
    changed = replace(config, gpu_memory_utilization=0.26)
    with pytest.raises(InvalidConfig, match="set --gpu-memory-utilization to at least"):
        load_executor(changed, moe, None, SmallGpu(), Phases())


@pytest.mark.parametrize(
    "changes",
    [{"quantization": Quantization.INT8}, {"attention_backend": AttentionBackend.TORCH}],
)
def test_what_only_our_own_implementations_have_is_refused_by_its_flag(
    moe: Path, changes: dict[str, Any]
) -> None:
    with pytest.raises(InvalidConfig, match="for the families that Penstock implements itself"):
        start(moe, **changes)


def test_weights_that_the_files_lack_are_named(tmp_path: Path) -> None:
    path = save(make_other("gpt2"), tmp_path)
    tensors = load_file(path / "model.safetensors")
    del tensors["transformer.h.1.mlp.c_fc.weight"]
    save_file(tensors, path / "model.safetensors", {"format": "pt"})
    with pytest.raises(InvalidModel, match=r"lack weights of GPT2LMHeadModel.*h\.1\.mlp\.c_fc"):
        start(path)


def test_weights_that_are_not_finite_are_refused(tmp_path: Path) -> None:
    path = save(make_other("gpt2"), tmp_path)
    tensors = load_file(path / "model.safetensors")
    tensors["transformer.h.1.mlp.c_fc.weight"].fill_(float("nan"))
    save_file(tensors, path / "model.safetensors", {"format": "pt"})
    with pytest.raises(InvalidModel, match=r"h\.1\.mlp\.c_fc.*not finite"):
        start(path)


def test_positions_that_change_with_the_longest_sequence_are_refused(tmp_path: Path) -> None:
    path = save(make_model("phi4_mini", original_max_position_embeddings=32), tmp_path)
    theirs = {"model_impl": ModelImpl.TRANSFORMERS}
    with pytest.raises(InvalidModel, match=r"longrope.*use --max-model-len 32"):
        start(path, **theirs)
    assert start(path, **theirs, max_model_len=32).info.max_model_len == 32
