"""What a rank reads of a quantized checkpoint: codes of its rows and columns, and their scales."""

import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from penstock.engine.loading.ranks import check_parallel
from penstock.engine.models.config import ModelConfig
from penstock.engine.models.decoder.model import LlamaModel
from penstock.engine.models.division.shard import Shard
from penstock.engine.models.division.stage import Stage, layer_weights
from penstock.engine.models.errors import InvalidModel
from penstock.engine.models.layers.grouped import GroupedLinear
from penstock.engine.models.layers.linear import PlainLinear, StoredLinear
from penstock.engine.models.weights import Checkpoint, RandomWeights
from penstock.scheduler.errors import InvalidConfig
from tests.support.quantized_checkpoints import FORMATS, QuantizedFormat, fp8, save_quantized
from tests.support.tiny_models import engine_config, make_model

FLOAT32 = partial(torch.empty, dtype=torch.float32)
QKV = [f"model.layers.1.self_attn.{each}_proj" for each in "qkv"]
OUTPUT = "model.layers.1.self_attn.o_proj"
GATE_UP = ["model.layers.0.mlp.gate_proj", "model.layers.0.mlp.up_proj"]
DOWN = "model.layers.0.mlp.down_proj"


def saved(
    path: Path, quantized: QuantizedFormat, family: str = "llama2", **options: Any
) -> ModelConfig:
    """With 48 columns of down_proj in each of two ranks: one and a half groups of 32."""
    settings = {"intermediate_size": 96, "head_dim": 16} | options
    save_quantized(make_model(family, **settings), path, quantized)
    return ModelConfig.from_dir(path)


def read(path: Path, shard: Shard | None, shape: tuple[int, int], *names: str) -> StoredLinear:
    quantization = ModelConfig.from_dir(path).quantization
    linear = Checkpoint(path, FLOAT32, quantization, shard).quantized(shape, None, *names)
    assert linear is not None
    return linear


def weight_of(linear: StoredLinear, columns: int) -> Tensor:
    weight = torch.empty(linear.out_features, columns)
    linear.write_weight(weight)
    return weight


@pytest.mark.parametrize("name", FORMATS)
def test_the_parts_of_all_ranks_are_the_whole(name: str, tmp_path: Path) -> None:
    model = saved(tmp_path, FORMATS[name])
    shards = [Shard(model, rank, 2) for rank in range(2)]
    for names, rows, columns in (([OUTPUT], 64, 64), ([DOWN], 64, 96)):
        whole = weight_of(read(tmp_path, None, (rows, columns), *names), columns)
        parts = [read(tmp_path, shard, (rows, columns // 2), *names) for shard in shards]
        assert torch.cat([weight_of(part, columns // 2) for part in parts], 1).equal(whole)
    for names, rows in ((QKV, 192), (GATE_UP, 192)):
        whole = weight_of(read(tmp_path, None, (rows, 64), *names), 64)
        parts = [read(tmp_path, shard, (rows // 2, 64), *names) for shard in shards]
        each = [torch.chunk(weight_of(part, 64), len(names)) for part in parts]
        joined = [torch.cat(of_ranks) for of_ranks in zip(*each, strict=True)]
        assert torch.cat(joined).equal(whole)


@pytest.mark.parametrize("name", [name for name in FORMATS if "act-order" not in name])
def test_a_rank_has_the_bytes_that_config_json_implies(name: str, tmp_path: Path) -> None:
    model = saved(tmp_path, FORMATS[name])
    shard = Shard(model, 1, 2)
    source = Checkpoint(tmp_path, FLOAT32, model.quantization, shard)
    config, cpu = shard.config, torch.device("cpu")
    for stage in (None, Stage(config, 0, 2), Stage(config, 1, 2)):
        loaded = LlamaModel(
            config if stage is None else stage.config,
            source if stage is None else stage.of(source),
            PlainLinear,
            max_model_len=8,
            device=cpu,
            shard=shard,
            stage=stage,
            dtype=torch.float32,
        )
        held = loaded.step_weight_bytes + loaded.embedding.nbytes
        if stage is None:
            assert held == config.weight_bytes(4)
            assert held < 0.55 * model.weight_bytes(4)
        else:
            assert held == stage.config.weight_bytes(4) - stage.absent_bytes(4)


def test_layers_that_are_not_quantized_are_divided_beside_those_that_are(tmp_path: Path) -> None:
    model = make_model("llama2", intermediate_size=96, head_dim=16)
    plain = ("lm_head", "k_proj", "layers.0.mlp.up_proj")
    save_quantized(model, tmp_path, FORMATS["ct-w4a16"], plain=plain)
    shard = Shard(ModelConfig.from_dir(tmp_path), 1, 2)
    for names, rows in ((QKV, 32), (GATE_UP, 48)):
        part = read(tmp_path, shard, (rows * len(names), 64), *names)
        assert part.weight_format == "stacked"
        own = [model.get_submodule(name).weight.detach()[rows:] for name in names]
        assert weight_of(part, 64).equal(torch.cat(own))


def test_made_up_codes_have_the_bytes_of_a_rank_and_differ_between_ranks(tmp_path: Path) -> None:
    model = saved(tmp_path, FORMATS["ct-mxfp4"])
    down = []
    for rank in range(2):
        shard = Shard(model, rank, 2)
        made = RandomWeights(FLOAT32, model.quantization, shard).quantized((64, 48), None, DOWN)
        assert isinstance(made, GroupedLinear)
        assert made.num_bytes == read(tmp_path, shard, (64, 48), DOWN).num_bytes
        down.append(made.codes)
    assert not down[0].equal(down[1])


def test_fused_matrices_and_blocks_that_ranks_divide_keep_their_values(tmp_path: Path) -> None:
    """Of 24 rows and 24 columns, which neither heads nor halves of the MLP are multiples of."""
    settings = FORMATS["fp8-block"].settings | {"weight_block_size": [24, 24]}
    quantized = QuantizedFormat("FP8", settings, fp8((24, 24), "weight_scale_inv"), "fp8")
    model = saved(tmp_path, quantized, "phi4")
    name = "model.layers.1.self_attn.qkv_proj"
    query, key, value = torch.split(
        weight_of(read(tmp_path, None, (128, 64), name), 64), [64, 32, 32]
    )
    for rank in range(2):
        part = read(tmp_path, Shard(model, rank, 2), (64, 64), name)
        own = [query[32 * rank :][:32], key[16 * rank :][:16], value[16 * rank :][:16]]
        assert weight_of(part, 64).equal(torch.cat(own))
    whole = weight_of(read(tmp_path, None, (64, 96), DOWN), 96)
    assert weight_of(read(tmp_path, Shard(model, 1, 2), (64, 48), DOWN), 48).equal(whole[:, 48:])


def test_an_output_layer_in_codes_has_zeros_beyond_the_vocabulary(tmp_path: Path) -> None:
    settings = FORMATS["ct-w8a16-asym"].settings | {"ignore": []}
    packed = FORMATS["ct-w8a16-asym"].pack
    model = make_model("llama2", vocab_size=97)
    save_quantized(model, tmp_path, QuantizedFormat("W8A16", settings, packed, "int8"), plain=())
    config = ModelConfig.from_dir(tmp_path)
    part = weight_of(read(tmp_path, Shard(config, 1, 2), (49, 64), "lm_head"), 64)
    assert part[:48].equal(model.lm_head.weight.detach()[49:]) and not part[48:].any()


def test_a_group_that_two_ranks_would_have_becomes_smaller_ones(tmp_path: Path) -> None:
    model = saved(tmp_path, FORMATS["ct-mxfp4"])
    part = read(tmp_path, Shard(model, 1, 2), (64, 48), DOWN)
    assert isinstance(part, GroupedLinear) and (part.group_size, part.in_features) == (16, 48)


@pytest.mark.parametrize("size", [56, 72])
def test_codes_that_cannot_be_divided_are_refused_with_the_sizes_that_can(
    size: int, tmp_path: Path
) -> None:
    """A rank would have 28 columns, with 4 of a group; and 36, with 4 of a group."""
    path = tmp_path / str(size)
    saved(path, FORMATS["ct-w8a16"], intermediate_size=size)
    message = rf"--tensor-parallel-size 2: a rank would have {size // 2} of the {size} columns"
    with pytest.raises(InvalidConfig, match=f"{message} .* multiples of 8: use 1"):
        check_parallel(engine_config(path, tensor_parallel_size=2), path)


def test_layers_of_a_stage_have_the_formats_of_their_names(tmp_path: Path) -> None:
    settings = FORMATS["ct-w4a16"].settings | {"ignore": ["lm_head", "model.layers.2"]}
    quantized = QuantizedFormat("W4A16", settings, FORMATS["ct-w4a16"].pack, "int4")
    save_quantized(make_model("llama2"), tmp_path, quantized, plain=("lm_head", "layers.2."))
    model = ModelConfig.from_dir(tmp_path)
    *of_layers, output = layer_weights(model)
    assert of_layers[0] == of_layers[1] < of_layers[2] / 3 and output == 2 * 96 * 64
    stages = [Stage(model, index, 2) for index in range(2)]
    assert [list(stage.layers) for stage in stages] == [[0, 1], [2]]
    first, last = (stage.config for stage in stages)
    assert len(list(first.quantized_layers())) == 2 * 7 and not list(last.quantized_layers())


def test_what_the_tensors_contradict_is_named(tmp_path: Path) -> None:
    model = saved(tmp_path, FORMATS["awq"])
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    name = f"{OUTPUT}.qweight"
    tensors[name] = tensors[name][:56].contiguous()
    save_file(tensors, file)
    with pytest.raises(InvalidModel, match=r"o_proj.qweight' .* shape \(56, 8\)"):
        read(tmp_path, Shard(model, 0, 2), (64, 32), OUTPUT)


def test_rows_that_share_an_integer_are_on_one_rank(tmp_path: Path) -> None:
    model = saved(tmp_path, FORMATS["awq"], head_dim=4, num_key_value_heads=2)
    content = json.loads((tmp_path / "config.json").read_text())
    assert content["num_key_value_heads"] == 2
    with pytest.raises(InvalidModel, match=r"k_proj.qweight' .* holds 8 rows in each integer"):
        read(tmp_path, Shard(model, 0, 2), (4, 64), QKV[1])
