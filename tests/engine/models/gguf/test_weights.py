"""Logits of a GGUF file are those of the model that it was made of."""

import logging
import math
from functools import partial
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
from gguf import GGMLQuantizationType as Type
from torch import Tensor

from penstock.engine.config import LoadFormat
from penstock.engine.files.gguf.file import open_gguf
from penstock.engine.hub.gguf import check_gguf
from penstock.engine.loading.weights import Widened, weight_bytes
from penstock.engine.models.config import ModelConfig
from penstock.engine.models.decoder.model import LlamaModel
from penstock.engine.models.division.stage import Stage
from penstock.engine.models.errors import InvalidModel
from penstock.engine.models.formats.kept import AsStored
from penstock.engine.models.gguf.weights import GgufWeights, loaded_bytes, weight_formats
from penstock.engine.models.layers.grouped import GroupedLinear
from penstock.engine.models.layers.linear import PlainLinear, StackedLinear
from penstock.engine.native.packing import FORMATS
from tests.support.compiler import needs_compiler
from tests.support.gguf_blocks import dequantized_blocks, quantized_blocks
from tests.support.gguf_files import (
    ARCHITECTURES,
    WRITTEN,
    Arrange,
    TypeOf,
    load_transformers,
    plain,
    quantized,
    with_fused_heads,
    with_gates_apart,
    write_gguf,
)
from tests.support.paths import STORIES
from tests.support.stories import needs_stories
from tests.support.tiny_models import Harness, make_model

PROMPT = torch.randint(0, 96, (50,), generator=torch.Generator().manual_seed(1))
IN_BLOCKS_OF_256 = (
    *(Type.Q2_K, Type.Q3_K, Type.Q4_K, Type.Q5_K, Type.Q6_K, Type.TQ1_0, Type.TQ2_0),
    *(Type.IQ1_S, Type.IQ1_M, Type.IQ2_XXS, Type.IQ2_XS, Type.IQ2_S, Type.IQ3_XXS, Type.IQ3_S),
    *(Type.IQ4_XS, Type.Q1_0),
)
QUANTIZED = (
    *(Type.Q8_0, Type.Q4_0, Type.Q4_1, Type.Q5_0, Type.Q5_1, Type.MXFP4, Type.NVFP4),
    *IN_BLOCKS_OF_256,
)


def logits(path: Path, prompt: Tensor = PROMPT, **options: Any) -> Tensor:
    harness = Harness(path, num_sequences=1, make_linear=PlainLinear, **options)
    harness.token_table[0, : len(prompt)] = prompt
    return harness.run([(0, 0, len(prompt))])[0]


def with_plain_values(name: str) -> Type:
    """Q5_0, but for the values' matrix."""
    return Type.F16 if "attn_v.weight" in name else quantized(Type.Q5_0)(name)


def kept_formats(keeps_codes: bool) -> AsStored:
    return AsStored(FORMATS if keeps_codes else ())


def source(path: Path, dtype: torch.dtype = torch.float32, *, keeps_codes: bool) -> GgufWeights:
    return GgufWeights(path, partial(torch.empty, dtype=dtype), kept_formats(keeps_codes).num_bytes)


@pytest.mark.parametrize("family", WRITTEN)
def test_logits_of_every_family_are_those_of_transformers(tmp_path: Path, family: str) -> None:
    model = make_model(family, **WRITTEN[family])
    path = write_gguf(tmp_path / "model.gguf", model)
    assert check_gguf(path) == ModelConfig.from_dir(path)
    with torch.inference_mode():
        expected = model(PROMPT.unsqueeze(0)).logits[0]
    torch.testing.assert_close(logits(path), expected, atol=1e-4, rtol=0)


@pytest.mark.parametrize(("rotated", "head_dim"), [(24, 24), (30, 44)])
def test_so_much_of_a_head_is_rotated_as_the_file_says(
    tmp_path: Path, rotated: int, head_dim: int
) -> None:
    """All of it where most models of the family have a quarter, or a share that is rounded."""
    share = math.nextafter(rotated / head_dim, 2.0)
    rope = {"rope_type": "default", "rope_theta": 50.0, "partial_rotary_factor": share}
    model = make_model("qwen3_5", head_dim=head_dim, rope_parameters=rope)
    path = write_gguf(tmp_path / "model.gguf", model)
    with torch.inference_mode():
        expected = model(PROMPT.unsqueeze(0)).logits[0]
    torch.testing.assert_close(logits(path), expected, atol=1e-4, rtol=0)


@pytest.mark.parametrize(
    ("family", "arrange"),
    [
        ("qwen2", with_fused_heads),
        ("llama_biases", with_fused_heads),
        ("gemma4_moe", with_gates_apart),
    ],
)
def test_tensors_that_are_stacked_or_apart_are_the_same_model(
    tmp_path: Path, family: str, arrange: Arrange
) -> None:
    model = make_model(family)
    usual = write_gguf(tmp_path / "usual.gguf", model)
    other = write_gguf(tmp_path / "other.gguf", model, arrange=arrange)
    assert check_gguf(other) == check_gguf(usual)
    assert torch.equal(logits(other), logits(usual))


# How files were written before llama.cpp attended to latents.
OLDER = {
    "key_length": 20,
    "value_length": 20,
    **dict.fromkeys(("key_length_mla", "value_length_mla"), None),
    "head_count_kv": 4,
}


@pytest.mark.parametrize("family", ["deepseek_v3", "deepseek_v2_lite"])
@pytest.mark.parametrize("has_both", [False, True])
def test_older_files_have_keys_and_values_of_latents_in_one_matrix(
    tmp_path: Path, family: str, has_both: bool
) -> None:
    """Some have them in two beside it."""
    model = make_model(family, **WRITTEN[family])

    def older(tensors: dict[str, Any]) -> dict[str, Any]:
        matrices = model.state_dict().items()
        joined = {
            f"blk.{name.split('.')[2]}.attn_kv_b.weight": values.numpy()
            for name, values in matrices
            if name.endswith("kv_b_proj.weight")
        }
        assert len(joined) == model.config.num_hidden_layers
        others = {
            name: values
            for name, values in tensors.items()
            if has_both or not name.endswith(("attn_k_b.weight", "attn_v_b.weight"))
        }
        return joined | others

    metadata = {f"deepseek2.attention.{key}": value for key, value in OLDER.items()}
    usual = write_gguf(tmp_path / "usual.gguf", model)
    path = write_gguf(tmp_path / "older.gguf", model, metadata=metadata, arrange=older)
    assert check_gguf(path) == check_gguf(usual)
    assert torch.equal(logits(path), logits(usual))


REFUSED: dict[str, tuple[str, dict[str, Any], str]] = {
    "biases": ("youtu_biases", {}, r"has the tensor 'blk\.0\.attn_q_a\.bias', which changes"),
    "scores": ("deepseek_v3", {"expert_gating_func": 4}, "'scoring_func' must be .*'4'"),
    "scores of GLM": ("glm4_moe", {"expert_gating_func": 1}, "'scoring_func' must be 'sigmoid'"),
    "normed softmax": ("deepseek_v2", {"expert_weights_norm": True}, "'norm_topk_prob' must be"),
    "scaled queries": ("deepseek_v3", {"attention.temperature_scale": 0.1}, "llama_4_scaling_beta"),
    "no corrections": ("deepseek_v2", {"expert_gating_func": 2}, r"lacks .*exp_probs_b\.bias"),
    "sizes": ("deepseek_v3", {"attention.key_length_mla": 8}, "'qk_nope_head_dim' must be a pos"),
    "no rank": ("deepseek_v3", {"attention.kv_lora_rank": None}, "'kv_lora_rank'"),
    "layers": ("deepseek_v3", {"leading_dense_block_count": 0}, r"lacks .*blk\.0\."),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_not_computed_of_latents_and_their_experts_is_refused_by_name(
    tmp_path: Path, case: str
) -> None:
    family, changes, expected = REFUSED[case]
    model = make_model(family)
    name = gguf.MODEL_ARCH_NAMES[ARCHITECTURES[model.config.model_type]]
    metadata = {f"{name}.{key}": value for key, value in changes.items()}
    path = write_gguf(tmp_path / "model.gguf", model, metadata=metadata)
    with pytest.raises(InvalidModel, match=expected):
        check_gguf(path)


def test_keys_that_another_layer_has_may_be_in_the_file(tmp_path: Path) -> None:
    """As in files of Gemma 4 E2B and E4B, whose last layers read those of layers before."""
    model = make_model("gemma4_small_wrapped")

    def with_keys(tensors: dict[str, Any]) -> dict[str, Any]:
        first = {name: values for name, values in tensors.items() if name.startswith("blk.1.attn")}
        unused = (name for name in first if name.split(".")[2] in ("attn_k", "attn_v"))
        return {name.replace("blk.1.", "blk.4."): first[name] for name in unused} | tensors

    usual = write_gguf(tmp_path / "usual.gguf", model)
    other = write_gguf(tmp_path / "other.gguf", model, arrange=with_keys)
    assert "blk.4.attn_k.weight" in open_gguf(other).tensors
    assert "blk.4.attn_k.weight" not in open_gguf(usual).tensors
    assert check_gguf(other) == check_gguf(usual)
    assert torch.equal(logits(other), logits(usual))


@pytest.mark.parametrize("kind", [Type.BF16, Type.Q8_0], ids=lambda kind: kind.name)
def test_a_table_stays_in_its_file_and_its_rows_are_its_numbers(tmp_path: Path, kind: Type) -> None:
    model = make_model("gemma4_small_wrapped", hidden_size_per_layer_input=32)
    path = write_gguf(tmp_path / "model.gguf", model, quantized(kind))
    name = "model.embed_tokens_per_layer.weight"
    whole = model.state_dict()[name.replace("model.", "model.language_model.")]
    packed = gguf.quants.quantize(whole.numpy(), kind)
    expected = torch.from_numpy(gguf.quants.dequantize(packed, kind).copy())
    ids = torch.tensor([0, 95, 7, 7])
    dtype = torch.bfloat16  # of the other weights: that of the table is its own
    rows = source(path, dtype, keeps_codes=True).table((2048, 7 * 32), name)(ids)
    assert torch.equal(rows.float(), expected[ids])
    assert loaded_bytes(path, dtype, kept_formats(True).num_bytes, one_stage(path)) < whole.nbytes


def one_stage(path: Path) -> Stage:
    return Stage(ModelConfig.from_dir(path), 0, 1)


@pytest.mark.parametrize(
    "native", [False, pytest.param(True, marks=(needs_compiler, pytest.mark.slow))]
)
@pytest.mark.parametrize(
    "family", ["phi4", "granite", "olmo2", "gemma3", "gemma4_moe", "deepseek_v3", "glm4_moe"]
)
def test_codes_have_the_logits_of_their_numbers(tmp_path: Path, family: str, native: bool) -> None:
    model = make_model(family, **WRITTEN[family])
    path = write_gguf(tmp_path / "model.gguf", model, quantized(Type.Q8_0))
    plainly = logits(path, kept=kept_formats(False))
    found = logits(path, kept=kept_formats(True), native=native, has_codes=native)
    torch.testing.assert_close(found, plainly, atol=1e-4, rtol=0)


def test_a_model_in_several_files_is_read_as_one(tmp_path: Path) -> None:
    whole = write_gguf(tmp_path / "whole.gguf", make_model("qwen3"))
    first = write_gguf(tmp_path / "parts.gguf", make_model("qwen3"), num_parts=3)
    assert first.name == "parts-00001-of-00003.gguf"
    assert torch.equal(logits(first), logits(whole))
    first.with_name("parts-00002-of-00003.gguf").unlink()
    with pytest.raises(InvalidModel, match=r"parts-00002-of-00003\.gguf does not exist"):
        check_gguf(first)


def dequantized(model: Any, type_of: TypeOf) -> Any:
    """The model with its weights rounded as the file has them, by llama.cpp's package."""
    architecture = gguf.MODEL_ARCH.QWEN2  # whose heads are not permuted
    names = gguf.get_tensor_name_map(architecture, model.config.num_hidden_layers)
    for name, parameter in model.named_parameters():
        kind = type_of(str(names.get_name(name, try_suffixes=(".weight", ".bias"))))
        if parameter.shape[-1] % gguf.GGML_QUANT_SIZES[kind][0]:
            kind = Type.F16
        packed = quantized_blocks(parameter.data.numpy(), kind)
        parameter.data = torch.from_numpy(dequantized_blocks(packed, kind).copy())
    return model


@pytest.mark.parametrize("keeps_codes", [True, False])
@pytest.mark.parametrize("kind", [Type.F16, Type.BF16, *QUANTIZED], ids=lambda kind: kind.name)
def test_quantized_weights_are_computed_as_the_numbers_they_stand_for(
    tmp_path: Path, kind: Type, keeps_codes: bool
) -> None:
    sizes = {"hidden_size": 256, "intermediate_size": 256} if kind in IN_BLOCKS_OF_256 else {}
    path = write_gguf(tmp_path / "model.gguf", make_model("qwen2", **sizes), quantized(kind))
    model = dequantized(make_model("qwen2", **sizes), quantized(kind))
    with torch.inference_mode():
        expected = model(PROMPT.unsqueeze(0)).logits[0]
    found = logits(path, kept=kept_formats(keeps_codes))
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=0)


def test_rows_of_llama_are_put_back_in_every_format(tmp_path: Path) -> None:
    model = make_model("llama2")
    plainly = source(write_gguf(tmp_path / "a.gguf", model), keeps_codes=True)
    name = "model.layers.1.self_attn.q_proj"
    assert torch.equal(
        plainly.read((64, 64), f"{name}.weight"), model.state_dict()[f"{name}.weight"]
    )
    coded = source(write_gguf(tmp_path / "b.gguf", model, quantized(Type.Q4_0)), keeps_codes=True)
    linear = coded.quantized((64, 64), None, name)
    assert isinstance(linear, GroupedLinear)
    weight = model.state_dict()[f"{name}.weight"].numpy()
    rounded = gguf.quants.dequantize(gguf.quants.quantize(weight, Type.Q4_0), Type.Q4_0)
    assert torch.equal(linear.weight(), torch.from_numpy(rounded))


def test_layers_of_different_types_are_stacked(tmp_path: Path) -> None:
    def type_of(name: str) -> Type:
        kinds = {"attn_q": Type.Q5_0, "attn_k": Type.Q5_0, "attn_v": Type.Q4_1}
        return kinds.get(name.split(".")[-2], Type.Q8_0) if "norm" not in name else Type.F32

    model = make_model("qwen2")
    path = write_gguf(tmp_path / "model.gguf", model, type_of)
    prefix = "model.layers.0.self_attn."
    names = (f"{prefix}q_proj", f"{prefix}k_proj", f"{prefix}v_proj")
    bias = torch.arange(128.0)
    stacked = source(path, keeps_codes=True).quantized((128, 64), bias, *names)
    assert isinstance(stacked, StackedLinear)
    both, last = stacked.parts
    assert isinstance(both, GroupedLinear) and isinstance(last, GroupedLinear)
    assert (both.bits, last.bits, both.out_features) == (5, 4, 96)
    assert torch.equal(stacked(torch.zeros(1, 64))[0], bias)


def test_a_layer_is_plain_where_a_part_of_it_has_no_codes(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "model.gguf", make_model("qwen2"), with_plain_values)
    read = source(path, keeps_codes=True).quantized
    prefix = "model.layers.0."
    assert read((96, 64), None, *(f"{prefix}self_attn.{kind}_proj" for kind in "qkv")) is None
    assert isinstance(read((64, 64), None, f"{prefix}self_attn.o_proj"), GroupedLinear)


def test_what_dequantized_weights_cost_is_logged(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = write_gguf(tmp_path / "model.gguf", make_model("llama2"), quantized(Type.Q5_0))
    with caplog.at_level(logging.INFO):
        source(path, torch.bfloat16, keeps_codes=False)
        source(path, torch.bfloat16, keeps_codes=True)
    without_codes, with_codes = caplog.messages
    assert without_codes.startswith(
        "20 matrices (20 of Q5_0) are dequantized to bfloat16: they take 0.0"
    )
    # The embedding.
    assert with_codes.startswith("1 matrix (1 of Q5_0) is dequantized to bfloat16: it takes 0.0")


def test_codes_of_fewer_than_four_bits_are_logged(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = make_model("qwen2", hidden_size=256, intermediate_size=256)
    kinds = {"ffn_down": Type.IQ2_XS, "attn_output": Type.Q2_K}
    path = write_gguf(
        tmp_path / "model.gguf", model, lambda name: kinds.get(name.split(".")[-2], Type.F16)
    )
    with caplog.at_level(logging.INFO):
        source(path, torch.bfloat16, keeps_codes=True)
    [line] = caplog.messages
    assert line.startswith("6 matrices (3 of Q2_K, 3 of IQ2_XS) are kept in codes of 4 bits: they")


def test_block_scales_that_are_one_number_more_are_no_matrices_that_grew(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = make_model("qwen2", hidden_size=256, tie_word_embeddings=False)
    embedding = "token_embd.weight"
    path = write_gguf(
        tmp_path / "model.gguf",
        model,
        lambda name: Type.F16 if name == embedding else quantized(Type.Q4_K)(name),
    )
    with caplog.at_level(logging.INFO):
        source(path, torch.bfloat16, keeps_codes=True)
    assert not caplog.messages


@pytest.mark.parametrize(
    "type_of",
    [*map(quantized, (Type.F32, Type.Q8_0, Type.Q5_0)), with_plain_values],
    ids=["F32", "Q8_0", "Q5_0", "mixed"],
)
@pytest.mark.parametrize("family", ["llama2", "qwen2", "phi4"])
@pytest.mark.parametrize("keeps_codes", [True, False])
def test_the_memory_of_weights_is_known_before_they_are_read(
    tmp_path: Path, family: str, type_of: TypeOf, keeps_codes: bool
) -> None:
    path = write_gguf(tmp_path / "model.gguf", make_model(family), type_of)
    config, dtype = ModelConfig.from_dir(path), torch.bfloat16
    kept = kept_formats(keeps_codes)
    foretold = weight_bytes(
        config, LoadFormat.AUTO, path, dtype, kept=kept, stage=Stage(config, 0, 1)
    )
    model = Harness(path, dtype=dtype, make_linear=PlainLinear, kept=kept).model
    assert isinstance(model, LlamaModel)
    is_copy = not config.head.is_tied or (weight_formats(path) and keeps_codes)
    embedding = model.embedding.nbytes if is_copy else 0
    assert foretold == model.step_weight_bytes + embedding


@pytest.mark.parametrize("family", ["llama2", "qwen2"])
def test_so_is_that_of_each_stage(tmp_path: Path, family: str) -> None:
    """The second is tied: its last stage has the embedding too, and the codes of the output."""
    path = write_gguf(tmp_path / "model.gguf", make_model(family), quantized(Type.Q8_0))
    config, dtype = ModelConfig.from_dir(path), torch.float32
    kept = kept_formats(True)
    reads = Widened(source(path, dtype, keeps_codes=True), torch.empty, PlainLinear, kept)
    for stage in (Stage(config, index, 3) for index in range(3)):
        foretold = weight_bytes(stage.config, LoadFormat.AUTO, path, dtype, kept=kept, stage=stage)
        model = LlamaModel(
            stage.config,
            stage.of(reads),
            PlainLinear,
            max_model_len=8,
            device=torch.device("cpu"),
            stage=stage,
            dtype=dtype,
        )
        assert foretold == model.step_weight_bytes + model.embedding.nbytes


@pytest.mark.parametrize(("dtype", "what"), [("float32", "not finite"), ("float16", "65504")])
def test_numbers_that_cannot_be_held_are_refused(tmp_path: Path, dtype: str, what: str) -> None:
    model = make_model("llama2")
    model.model.norm.weight.data[3] = float("nan") if dtype == "float32" else 1e5
    weights = source(
        write_gguf(tmp_path / "model.gguf", model), getattr(torch, dtype), keeps_codes=True
    )
    with pytest.raises(InvalidModel, match=f"'model.norm.weight' in .* {what}"):
        weights.read((64,), "model.norm.weight")


@needs_stories
def test_logits_of_a_trained_model_are_those_of_its_safetensors(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "m.gguf", load_transformers(STORIES), plain, tokenizer=STORIES)
    prompt = torch.tensor([1, 403, 407, 261, 378, 300, 20, 77])
    assert torch.equal(logits(path, prompt), logits(STORIES, prompt))
