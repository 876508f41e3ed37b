"""The bytes and operations of a step, computed by hand for one model of each kind."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from penstock.engine.loading.description import describe
from penstock.engine.memory.pool.kv_pool import PoolSize
from penstock.engine.models.config import ModelConfig
from penstock.engine.step.model_info import ModelInfo, RoutedExperts
from penstock.scheduler.batch import work_of
from penstock.scheduler.stats import StepWork
from tests.support.tiny_models import make_batch, make_model

# The tiny models': 3 layers of width 64, MLPs of 112, 4 query and 2 KV heads, 96 words.
HIDDEN, MLP, VOCAB = 64, 112, 96
# Two decodes at positions 29 and 4, and a chunk of 10 tokens at positions 20 to 29.
BATCH = make_batch((0, 1, 2), (29, 4, 20), (1, 1, 10), num_decodes=2)


def info_of(family: str, tmp_path: Path) -> ModelInfo:
    make_model(family).config.save_pretrained(tmp_path)
    config = ModelConfig.from_dir(tmp_path)
    size = PoolSize(8, 128)
    num_bytes = config.step_weight_bytes(torch.float32.itemsize)
    return describe(
        config,
        torch.float32,
        "cpu",
        size,
        16,
        load_seconds={},
        weight_bytes=num_bytes,
        expert_bytes=0,
        kv_dtype=torch.float32,
    )


@pytest.mark.parametrize(
    ("family", "head_dim", "context_of_layers", "pairs_of_layers"),
    [
        # No window: contexts of 30, 5 and 30; the chunk's queries see 21 to 30 keys.
        ("llama3.2_tied", 16, (65, 65, 65), (290, 290, 290)),
        # A window of 9: contexts of 9, 5 and 8 + 10; every query of the chunk sees 9 keys.
        ("mistral_window", 32, (32, 32, 32), (104, 104, 104)),
        # A window of 7 from the second layer on: 7, 5 and 6 + 10 keys; 7 for each of the 10.
        ("qwen2_window", 16, (65, 28, 28), (290, 82, 82)),
    ],
)
def test_a_layer_reads_and_computes_no_more_than_its_window(
    family: str,
    head_dim: int,
    context_of_layers: tuple[int, ...],
    pairs_of_layers: tuple[int, ...],
    tmp_path: Path,
) -> None:
    info = info_of(family, tmp_path)
    work = work_of(BATCH, info.windows)
    kv_bytes = 2 * 2 * head_dim * 4  # K and V, KV heads, width, float32: one position of one layer
    assert info.kv_bytes_per_token == 3 * kv_bytes
    assert info.step_bytes(work) == info.weight_bytes + kv_bytes * sum(context_of_layers)
    # Query and output projections have 4 heads, keys and values 2 each; a multiply and an add.
    matrices = HIDDEN * ((4 + 4 + 2 + 2) * head_dim + 3 * MLP)
    assert info.step_flops(work) == (
        2 * 12 * 3 * matrices + 2 * 3 * HIDDEN * VOCAB + 2 * 2 * 4 * head_dim * sum(pairs_of_layers)
    )


def test_a_mixture_reads_the_experts_that_its_tokens_were_routed_to(tmp_path: Path) -> None:
    experts = RoutedExperts(num_layers=3, num_experts=8, num_experts_per_token=2, expert_bytes=100)
    dense = info_of("llama3.2_tied", tmp_path)
    mixture = replace(dense, experts=experts)

    def expert_bytes(work: StepWork) -> int:
        return mixture.step_bytes(work) - dense.step_bytes(work)

    one, three = make_batch((0,), (4,), (1,), num_decodes=1), make_batch((0,), (0,), (3,))
    assert expert_bytes(work_of(one, dense.windows)) == 100 * 3 * 2
    # Where it is not known, as if all were equally likely: 8 * (1 - 0.75 ** 3) in each layer.
    assert expert_bytes(work_of(three, dense.windows)) == 100 * 14
    assert expert_bytes(work_of(BATCH, dense.windows)) == 100 * 23
    routed = work_of(BATCH, dense.windows)._replace(num_experts=17)
    assert expert_bytes(routed) == 100 * 17


def test_a_step_reads_its_adapters_besides_the_model(tmp_path: Path) -> None:
    info = info_of("llama3.2_tied", tmp_path)
    work = work_of(BATCH, info.windows)
    adapted = work._replace(adapter_bytes=1000)
    assert info.step_bytes(adapted) - info.step_bytes(work) == 1000
    assert info.amounts(adapted).weight_bytes - info.amounts(work).weight_bytes == 1000


def test_a_step_reads_and_writes_the_state_of_each_sequence(tmp_path: Path) -> None:
    info = info_of("llama3.2_tied", tmp_path)
    recurrent = replace(info, state_bytes=1000)
    work = work_of(BATCH, info.windows)
    assert recurrent.step_bytes(work) - info.step_bytes(work) == 2 * 1000 * 3
    found, plain = recurrent.amounts(work), info.amounts(work)
    assert found.decode_kv_bytes - plain.decode_kv_bytes == 2 * 1000 * 2
    assert found.prefill_kv_bytes - plain.prefill_kv_bytes == 2 * 1000
