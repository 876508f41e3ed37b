"""Which layers of a model each stage has, and which weights."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from penstock.engine.config import LoraConfig, Quantization
from penstock.engine.executors.parallel import check_parallel
from penstock.engine.models.config import ModelConfig
from penstock.engine.models.layers.linear import PlainLinear
from penstock.engine.models.llama import read_layer
from penstock.engine.models.stage import Stage, divided, layer_weights
from penstock.engine.models.weights import Checkpoint
from penstock.scheduler.errors import InvalidConfig
from tests.support.tiny_models import engine_config, make_model, save


def model_of(path: Path, family: str = "llama2", **options: Any) -> ModelConfig:
    return ModelConfig.from_dir(save(make_model(family, **options), path))


def test_the_output_layer_counts_where_layers_are_divided() -> None:
    assert divided([10] * 8 + [0], 2) == [range(4), range(4, 8)]
    assert divided([10] * 8 + [40], 2) == [range(6), range(6, 8)]
    assert divided([10] * 8 + [1000], 3) == [range(3), range(3, 7), range(7, 8)]
    assert divided([10, 10, 30, 10, 10], 4) == [range(1), range(1, 2), range(2, 3), range(3, 4)]


def test_the_stages_have_every_layer_once_with_its_kind(tmp_path: Path) -> None:
    model = model_of(tmp_path, "gpt_oss")
    stages = [Stage(model, index, 3) for index in range(3)]
    assert [layer for stage in stages for layer in stage.layers] == list(range(model.num_layers))
    assert sum((stage.config.windows for stage in stages), ()) == model.windows
    assert all(stage.config.experts for stage in stages)


def test_a_stage_reads_its_own_layers(tmp_path: Path) -> None:
    model = model_of(tmp_path)
    stage, stored = Stage(model, 1, 2), load_file(tmp_path / "model.safetensors")
    source = stage.of(Checkpoint(tmp_path, torch.empty))
    layer = read_layer(stage.config, source, PlainLinear, 0)
    name = f"model.layers.{stage.layers.start}.self_attn.o_proj.weight"
    assert isinstance(layer.output, PlainLinear) and stage.layers.start > 0
    assert layer.output.weight.equal(stored[name])


@pytest.mark.parametrize("family", ["llama2", "llama3.2_tied"])
def test_the_weights_of_all_stages_are_the_whole(family: str, tmp_path: Path) -> None:
    model = model_of(tmp_path, family)
    stages = [Stage(model, index, 3) for index in range(3)]
    held = sum(stage.config.weight_bytes(4) - stage.absent_bytes(4) for stage in stages)
    twice = model.vocab_size * model.hidden_size if model.tied_embeddings else 0
    assert held == model.weight_bytes(4) + 4 * twice
    assert len(layer_weights(model)) == model.num_layers + 1


def test_a_block_takes_as_much_as_in_the_stage_with_most_layers_of_its_group(
    tmp_path: Path,
) -> None:
    model = model_of(tmp_path, "gpt_oss")  # a window in the first and the last of three layers
    layout = model.kv_layout(128)
    of_layer = 16 * 2 * model.num_kv_heads * model.head_dim * 4
    pools = Stage(model, 0, 3).pools(layout, 16, 4)
    assert [pool.block_bytes for pool in pools] == [of_layer, of_layer]
    assert Stage(model, 1, 3).layout(layout).group_of == (0,)


@pytest.mark.parametrize(
    ("changes", "wanted"),
    [
        ({"lora": LoraConfig()}, "cannot be combined with --enable-lora"),
        (
            {"quantization": Quantization.INT8, "quantization_report": True},
            "cannot be combined with --quantization-report",
        ),
        ({"kv_offload_dir": "/tmp/x"}, "cannot be combined with --kv-offload-dir"),
        ({"pipeline_parallel_size": 17}, "at most 16 ranks"),
        ({"pipeline_parallel_size": 5}, "use --pipeline-parallel-size 3 or less"),
        ({"pipeline_parallel_size": 8, "tensor_parallel_size": 4}, "with --pipeline-parallel-size"),
    ],
)
def test_what_stages_do_not_compute_is_refused_by_name(
    changes: dict[str, Any], wanted: str, tmp_path: Path
) -> None:
    model_of(tmp_path)
    config = replace(engine_config(tmp_path), **{"pipeline_parallel_size": 2, **changes})
    with pytest.raises(InvalidConfig, match="--pipeline-parallel-size") as refused:
        check_parallel(config, tmp_path)
    assert wanted in str(refused.value)


def test_a_model_with_recurrent_states_is_refused_by_the_name_of_what_it_has(
    tmp_path: Path,
) -> None:
    model = replace(model_of(tmp_path), attention_gates=True)
    with pytest.raises(InvalidConfig, match="attention_gates, which cannot be cut into stages"):
        Stage(model, 0, 2)
