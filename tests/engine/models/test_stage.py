"""Which layers of a model each stage has, and which weights."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from penstock.engine.config import Quantization
from penstock.engine.loading.ranks import check_parallel
from penstock.engine.models.at_load.quantize import quantization_plan
from penstock.engine.models.config import ModelConfig
from penstock.engine.models.decoder.model import read_layer
from penstock.engine.models.division.stage import Stage, divided, layer_weights, stage_starts
from penstock.engine.models.layers.linear import PlainLinear
from penstock.engine.models.parts.per_layer_inputs.layer import PerLayerInputsTable
from penstock.engine.models.parts.reader import PartReader
from penstock.engine.models.weights import Checkpoint
from penstock.scheduler.errors import InvalidConfig
from tests.support.quantized_checkpoints import FORMATS, save_quantized
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
    assert isinstance(layer.mixer.output, PlainLinear) and stage.layers.start > 0
    assert layer.mixer.output.weight.equal(stored[name])


def test_layers_that_share_keys_and_values_are_in_the_stage_that_has_them(tmp_path: Path) -> None:
    model = model_of(tmp_path, "gemma4_small_wrapped")
    # Of 7 layers the last four read the keys and values of the second and of the third.
    assert model.kv_shape.sources[3:] == (2, 1, 2, 1) and stage_starts(model) == [1]
    first, last = (Stage(model, index, 2) for index in range(2))
    assert (first.layers, last.layers) == (range(1), range(1, 7))
    assert all(attention.has_keys for attention in first.config.attentions)
    assert last.config.kv_shape.sources == (0, 1, 1, 0, 1, 0)
    with pytest.raises(InvalidConfig, match="so it has at most 2 stages"):
        Stage(model, 0, 3)
    weights = [1, 1, 1, 1, 1, 0]
    assert divided(weights, 3, [1, 2]) == [range(1), range(1, 2), range(2, 5)]


def test_a_stage_reads_what_per_layer_inputs_of_its_layers_need(tmp_path: Path) -> None:
    model = model_of(tmp_path, "gemma4_small_wrapped")
    assert model.per_layer_inputs is not None
    whole, part = Checkpoint(tmp_path, torch.empty), Stage(model, 1, 2)
    ids, embedded = torch.tensor([3, 95]), torch.randn(2, model.hidden_size)
    of_all, own = (
        PerLayerInputsTable(
            config.per_layer_inputs,
            PartReader(source, PlainLinear, model.norm),
            maps_table=True,
        )
        for config, source in ((model, whole), (part.config, part.of(whole)))
        if config.per_layer_inputs is not None
    )
    assert own.shape == (6, 8)
    for expected, given in zip(of_all(ids, embedded)[1:], own(ids, embedded), strict=True):
        assert given.allclose(expected, atol=1e-6)


@pytest.mark.parametrize("family", ["llama2", "llama3.2_tied"])
def test_the_weights_of_all_stages_are_the_whole(family: str, tmp_path: Path) -> None:
    model = model_of(tmp_path, family)
    stages = [Stage(model, index, 3) for index in range(3)]
    held = sum(stage.config.weight_bytes(4) - stage.absent_bytes(4) for stage in stages)
    twice = model.vocab_size * model.hidden_size if model.head.is_tied else 0
    assert held == model.weight_bytes(4) + 4 * twice
    assert len(layer_weights(model)) == model.num_layers + 1


def test_a_block_takes_as_much_as_in_the_stage_with_most_layers_of_its_group(
    tmp_path: Path,
) -> None:
    model = model_of(tmp_path, "gpt_oss")  # a window in the first and the last of three layers
    layout = model.kv_layout(128)
    of_layer = 16 * 2 * model.attentions[0].num_kv_heads * model.head_dim * 4
    pools = Stage(model, 0, 3).pools(layout, 16, 4)
    assert [pool.block_bytes for pool in pools] == [of_layer, of_layer]
    assert Stage(model, 1, 3).layout(layout).group_of == (0,)


def test_every_stage_has_the_pools_of_both_kinds_of_layers(tmp_path: Path) -> None:
    model = model_of(tmp_path, "qwen3_5")  # attention in the last layer of four
    layout = model.kv_layout(128)
    assert layout.state is not None
    of_layer = layout.state.num_bytes // 3
    for num_stages, most in ((4, [1] * 4), (2, [2, 1])):
        stages = [Stage(model, index, num_stages) for index in range(num_stages)]
        assert [pool.block_bytes for pool in stages[0].pools(layout, 16, 4)][1] == most[
            0
        ] * of_layer
        states = [stage.layout(layout).state for stage in stages]
        nums = [sum(stage.config.recurrent) for stage in stages]
        assert [state.num_layers for state in states if state is not None] == nums
        assert len(states) == num_stages and None not in states
    assert not any(Stage(model, 3, 4).config.recurrent)


@pytest.mark.parametrize(
    ("changes", "wanted"),
    [
        (
            {"quantization": Quantization.INT8, "quantization_report": True},
            "cannot be combined with --quantization-report",
        ),
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


@pytest.mark.parametrize("family", ["llama2", "gemma4", "qwen3_5", "gpt_oss"])
def test_the_only_stage_is_the_model(family: str, tmp_path: Path) -> None:
    model = model_of(tmp_path, family)
    stage, source = Stage(model, 0, 1), Checkpoint(tmp_path, torch.empty)
    assert stage.config is model and stage.of(source) is source
    assert stage.layers == range(model.num_layers) and not stage.absent_bytes(2)


def test_rows_of_a_stages_layers_are_not_read_of_a_quantized_projection(tmp_path: Path) -> None:
    model = make_model("gemma4_small_wrapped")
    save_quantized(model, tmp_path / "codes", FORMATS["fp8-block"])
    with pytest.raises(InvalidConfig, match="per_layer_model_projection is quantized"):
        Stage(ModelConfig.from_dir(tmp_path / "codes"), 0, 2)
    plain = Stage(ModelConfig.from_dir(save(model, tmp_path / "plain")), 0, 2)
    with pytest.raises(
        InvalidConfig, match=r"--quantization is int8, .*per_layer_model_projection"
    ):
        quantization_plan(Quantization.INT8, plain.config, torch.bfloat16, stage=plain)
