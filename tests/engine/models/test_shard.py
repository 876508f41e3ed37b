"""Which part of a model each rank has."""

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from penstock.engine.config import LoadFormat, Quantization
from penstock.engine.loading.ranks import check_parallel
from penstock.engine.loading.weights import weight_source
from penstock.engine.memory.pool.kv_shape import KVHeads
from penstock.engine.models.config import ModelConfig
from penstock.engine.models.decoder.model import read_layer
from penstock.engine.models.division.shard import Shard
from penstock.engine.models.errors import InvalidModel
from penstock.engine.models.formats.kept import AsStored
from penstock.engine.models.layers.linear import PlainLinear
from penstock.engine.models.parts.delta_net.config import DeltaNet
from penstock.engine.models.weights import Checkpoint
from penstock.engine.process.phases import LoadProgress, Phases
from penstock.scheduler.errors import InvalidConfig
from tests.support.changed_models import changed
from tests.support.tiny_models import engine_config, make_model, save

_GLOBAL = "num_global_key_value_heads"
FLOAT32 = partial(torch.empty, dtype=torch.float32)


def saved(path: Path, family: str, **options: Any) -> tuple[ModelConfig, dict[str, Tensor]]:
    save(make_model(family, **options), path)
    return ModelConfig.from_dir(path), load_file(path / "model.safetensors")


@pytest.mark.parametrize("family", ["llama_biases", "phi4", "olmo2", "llama3.2_tied", "qwen3_5"])
def test_the_parts_of_all_ranks_are_the_whole(family: str, tmp_path: Path) -> None:
    model, tensors = saved(tmp_path, family, vocab_size=97)
    shards = [Shard(model, rank, 2) for rank in range(2)]
    num_split, fused = 0, ("qkv_proj", "gate_up_proj", "in_proj_qkv", "conv1d")
    for name, whole in tensors.items():
        first, second = (shard.of(name, whole) for shard in shards)
        if first.shape == whole.shape:
            is_added = "o_proj.bias" in name or "down_proj.bias" in name
            assert first.equal(whole) and second.equal(whole * 0 if is_added else whole)
            continue
        num_split += 1
        dim = 1 if name.split(".")[-2] in ("o_proj", "out_proj", "down_proj") else 0
        joined = torch.cat((first, second), dim)
        if any(part in name for part in fused):  # parts of each of what is fused
            assert sorted(joined.flatten().tolist()) == sorted(whole.flatten().tolist())
        else:
            assert joined[: len(whole)].equal(whole) and not joined[len(whole) :].any()
    assert num_split >= 7 * model.num_layers if family != "phi4" else 4 * model.num_layers


def test_ranks_that_share_a_key_head_have_all_of_it(tmp_path: Path) -> None:
    model, tensors = saved(tmp_path, "llama3_gqa")
    name = "model.layers.0.self_attn.k_proj.weight"
    for rank in range(4):
        shard = Shard(model, rank, 4)
        assert (shard.config.num_heads, shard.config.attentions[0].num_kv_heads) == (1, 1)
        assert shard.of(name, tensors[name]).equal(tensors[name])


def test_the_heads_of_a_gated_delta_net_stay_with_the_values_that_they_serve(
    tmp_path: Path,
) -> None:
    model, tensors = saved(tmp_path, "qwen3_5_moe", linear_num_value_heads=4)
    prefix, net = "model.layers.0.linear_attn.", model.layers[0].mixer
    assert isinstance(net, DeltaNet)
    assert (net.num_key_heads, net.key_dim, net.value_dim) == (2, 24, 32)
    queries, keys, values = torch.split(tensors[f"{prefix}in_proj_qkv.weight"], [48, 48, 128])
    taps = torch.split(tensors[f"{prefix}conv1d.weight"], [48, 48, 128])
    for size, rank in ((2, 1), (4, 2), (4, 3)):
        shard = Shard(model, rank, size)
        own = slice(24, 48)  # the second head of two, of which each of four ranks has one as well
        first, each = 128 * rank // size, 128 // size
        parts = (queries[own], keys[own], values[first : first + each])
        found = shard.of(f"{prefix}in_proj_qkv.weight", torch.cat((queries, keys, values)))
        assert found.equal(torch.cat(parts))
        of_taps = (taps[0][own], taps[1][own], taps[2][first : first + each])
        assert shard.of(f"{prefix}conv1d.weight", torch.cat(taps)).equal(torch.cat(of_taps))
        decay = tensors[f"{prefix}A_log"]
        own_decay = decay[4 * rank // size : 4 * (rank + 1) // size]
        assert shard.of(f"{prefix}A_log", decay).equal(own_decay)
        name = "model.layers.0.mlp.shared_expert.down_proj.weight"
        assert shard.of(name, tensors[name]).shape == (64, 40 // size)


def test_layers_are_split_by_their_own_heads_and_sizes(tmp_path: Path) -> None:
    save(make_model("gemma4_small_wrapped", num_global_key_value_heads=None), tmp_path)
    model = ModelConfig.from_dir(tmp_path)
    full = [layer.window is None for layer in model.layers]
    one = changed(model, mixer={"num_kv_heads": 1, "head_dim": 32}).layers
    layers = zip(full, one, model.layers, strict=True)
    model = replace(model, layers=tuple(a if is_full else b for is_full, a, b in layers))
    shard = Shard(model, 1, 2)
    heads = [attention.heads for attention in shard.config.attentions[:2]]
    assert heads == [KVHeads(1, 24), KVHeads(1, 32)]  # the second of two, and one that both have
    of_keys = (
        shard.of(f"model.layers.{layer}.self_attn.k_proj.weight", torch.arange(rows).view(-1, 1))
        for layer, rows in ((0, 48), (1, 32))
    )
    assert [rows.flatten().tolist() for rows in of_keys] == [list(range(24, 48)), list(range(32))]
    # The last four layers share keys and values, and have MLPs that are twice as wide.
    for layer, whole in ((0, 112), (6, 224)):
        part = shard.of(f"model.layers.{layer}.mlp.up_proj.weight", torch.zeros(whole, 8))
        assert len(part) == whole // 2
    table = torch.zeros(2048, 56)
    assert shard.of("model.embed_tokens_per_layer.weight", table) is table


def resident_bytes(path: Path) -> int:
    """Of a file, what this process has read through a mapping."""
    total, is_ours = 0, False
    for line in Path("/proc/self/smaps").read_text(encoding="ascii").splitlines():
        if "-" in line.split()[0]:
            is_ours = line.endswith(str(path))
        elif is_ours and line.startswith("Rss:"):
            total += int(line.split()[1]) * 1024
    return total


def test_a_rank_reads_its_rows_of_a_file_and_no_more(tmp_path: Path) -> None:
    model, _ = saved(tmp_path, "llama2")
    model = changed(
        model, hidden_size=8192, mixer={"num_heads": 2, "num_kv_heads": 2, "head_dim": 4096}
    )
    name, file = "model.layers.0.self_attn.q_proj.weight", tmp_path / "model.safetensors"
    save_file({name: torch.ones(8192, 8192, dtype=torch.float16)}, file)
    source = Checkpoint(tmp_path, FLOAT32, shard=Shard(model, 1, 2))
    assert source.read((4096, 8192), name).min() == 1
    assert 0.5 <= resident_bytes(file) / 2**27 < 0.6


def test_columns_are_not_copied_before_they_are_read(tmp_path: Path) -> None:
    model, tensors = saved(tmp_path, "llama2")
    name = "model.layers.0.self_attn.o_proj.weight"
    part = Shard(model, 1, 2).of(name, tensors[name])
    assert part.untyped_storage().data_ptr() == tensors[name].untyped_storage().data_ptr()
    assert part.numel() * 2 == tensors[name].numel()


def test_what_is_read_is_what_was_announced(tmp_path: Path) -> None:
    model, _ = saved(tmp_path, "llama_biases")
    shard = Shard(model, 0, 2)
    progress: list[LoadProgress] = []
    phases = Phases(progress.append)
    total = shard.config.weight_bytes(4)
    with phases.timed("weights", total=total):
        source = weight_source(
            LoadFormat.AUTO,
            tmp_path,
            shard.config,
            FLOAT32,
            phases,
            make_linear=PlainLinear,
            kept=AsStored(()),
            shard=shard,
        )
        for index in range(model.num_layers):
            read_layer(shard.config, source, PlainLinear, index)
        hidden, vocab = model.hidden_size, shard.config.vocab_size
        source.read((vocab, hidden), "model.embed_tokens.weight")
        source.read((vocab, hidden), "lm_head.weight")
        source.read((hidden,), "model.norm.weight")
    assert progress[-1].num_done == total < 0.6 * model.weight_bytes(4)


def test_random_weights_differ_between_ranks_where_the_model_is_split(tmp_path: Path) -> None:
    model, _ = saved(tmp_path, "qwen3_moe")
    first, second = (
        weight_source(
            LoadFormat.DUMMY,
            tmp_path,
            model,
            FLOAT32,
            Phases(),
            make_linear=PlainLinear,
            kept=AsStored(()),
            shard=Shard(model, rank, 2),
        )
        for rank in range(2)
    )
    layer = "model.layers.0."
    for name, differs in (("mlp.experts.0.up_proj.weight", True), ("mlp.gate.weight", False)):
        parts = [source.read((8, 8), layer + name) for source in (first, second)]
        assert parts[0].equal(parts[1]) is not differs


@pytest.mark.parametrize(
    ("size", "changes", "message"),
    [
        (3, {}, "num_attention_heads is 4, which is not a multiple of 3; use 1 or 2 or 4"),
        (2, {"mlp": {"size": 7}}, "intermediate_size is 7, .* use 1"),
        (
            4,
            {"mixer": {"num_heads": 12, "num_kv_heads": 6}},
            "num_key_value_heads is 6, which is neither",
        ),
        (
            4,
            {"mixer": {"num_heads": 12, "num_kv_heads": 6, "kv_heads_key": _GLOBAL}},
            f"{_GLOBAL} is 6, which is neither .*; use 1 or 2$",
        ),
    ],
)
def test_a_model_that_cannot_be_split_is_refused_with_the_sizes_that_can(
    size: int, changes: dict[str, Any], message: str, tmp_path: Path
) -> None:
    model, _ = saved(tmp_path, "llama2")
    with pytest.raises(InvalidConfig, match=f"--tensor-parallel-size {size}: .*{message}"):
        Shard(changed(model, **changes), 0, size)


@pytest.mark.parametrize(
    ("size", "changes", "message"),
    [
        (4, {}, "linear_num_value_heads is 6, which is not a multiple of 4; use 1 or 2"),
        (4, {"linear_num_key_heads": 3, "linear_num_value_heads": 12},
         "linear_num_key_heads is 3, which is neither a multiple of 4 nor a divisor; use 1"),
        (4, {"linear_num_value_heads": 4, "shared_expert_intermediate_size": 42},
         "shared_expert_intermediate_size is 42, .* use 1 or 2"),
    ],
)  # fmt: skip
def test_so_is_one_whose_recurrence_or_shared_expert_cannot_be_split(
    size: int, changes: dict[str, Any], message: str, tmp_path: Path
) -> None:
    model, _ = saved(tmp_path, "qwen3_5_moe", **changes)
    with pytest.raises(InvalidConfig, match=f"--tensor-parallel-size {size}: .*{message}"):
        Shard(model, 0, size)


@pytest.mark.parametrize("family", ["llama2", "gemma4", "qwen3_5_moe", "gpt_oss"])
def test_the_only_rank_has_the_model_as_it_is(family: str, tmp_path: Path) -> None:
    model, tensors = saved(tmp_path, family)
    shard = Shard(model)
    assert shard.config is model and not any(map(shard.splits, tensors))
    assert all(shard.of(name, tensor) is tensor for name, tensor in tensors.items())


@pytest.mark.parametrize("num_ranks", [2, 4])
@pytest.mark.parametrize(
    "family",
    [
        *("llama_biases", "phi4", "olmo2", "gemma4_moe", "qwen3_5_moe", "gpt_oss", "glm4_moe"),
        *("youtu_direct", "deepseek_v2"),
    ],
)
def test_the_parts_of_a_rank_have_the_shapes_that_their_tensors_are_cut_to(
    family: str, num_ranks: int, tmp_path: Path
) -> None:
    options = {"linear_num_value_heads": 4} if family == "qwen3_5_moe" else {}
    model, tensors = saved(tmp_path, family, **options)
    shard = Shard(model, num_ranks - 1, num_ranks)
    for index, layer in enumerate(shard.config.layers):
        for name, shape in layer.tensors.shapes():
            full = f"model.layers.{index}.{name}"
            if full in tensors:
                assert shard.of(full, tensors[full]).shape == shape, full


def test_a_tensor_of_another_size_than_config_json_implies_is_refused(tmp_path: Path) -> None:
    model, _ = saved(tmp_path, "llama2")
    with pytest.raises(
        InvalidModel, match=r"'lm_head.weight' has the shape \(90, 64\), .* 96 rows"
    ):
        Shard(model, 0, 2).of("lm_head.weight", torch.zeros(90, 64))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"tensor_parallel_size": 32}, "at most 16 ranks"),
        (
            {"quantization": Quantization.INT8, "quantization_report": True},
            "cannot be combined with --quantization-report",
        ),
    ],
)
def test_settings_that_several_ranks_do_not_have_are_refused(
    changes: dict[str, Any], message: str, tmp_path: Path
) -> None:
    saved(tmp_path, "llama2")
    config = engine_config(tmp_path, **({"tensor_parallel_size": 2} | changes))
    with pytest.raises(InvalidConfig, match=message):
        check_parallel(config, tmp_path)
