"""What is read of a GGUF file where that is not all of it, or not as it lies there: ranks' parts,
heads in another order, scales of whole matrices, layers that draft."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gguf import MODEL_ARCH_NAMES
from gguf import GGMLQuantizationType as Type
from numpy.typing import NDArray

from penstock.engine.hub.gguf import check_gguf
from penstock.engine.loading.weights import Widened
from penstock.engine.models.config import ModelConfig
from penstock.engine.models.decoder.model import LlamaModel
from penstock.engine.models.division.shard import Shard
from penstock.engine.models.division.stage import Stage
from penstock.engine.models.formats.kept import AsStored
from penstock.engine.models.gguf.weights import GgufWeights, loaded_bytes
from penstock.engine.models.layers.grouped import GroupedLinear
from penstock.engine.models.layers.linear import PlainLinear
from penstock.engine.native.packing import FORMATS
from tests.support.gguf_files import ARCHITECTURES, WRITTEN, quantized, write_gguf
from tests.support.tiny_models import Harness, make_model

PROMPT = torch.randint(0, 96, (50,), generator=torch.Generator().manual_seed(1))
WIDE = {"hidden_size": 256, "num_attention_heads": 8, "head_dim": 32, "vocab_size": 97}
# Sizes of whole blocks.
LATENTS = {
    **dict.fromkeys(("qk_nope_head_dim", "v_head_dim", "kv_lora_rank", "q_lora_rank"), 64),
    **{"moe_intermediate_size": 64, "hidden_size": 256, "rope_interleave": True},
}
# Columns of which a rank has one and a half blocks of 256.
PARTS: dict[str, tuple[str, Type, dict[str, Any]]] = {
    "permuted": ("llama_biases", Type.Q6_K, {**WIDE, "intermediate_size": 768}),
    "codebooks": ("qwen2", Type.IQ3_XXS, {**WIDE, "intermediate_size": 768}),
    "minima": ("qwen2", Type.Q2_K, {**WIDE, "intermediate_size": 768}),
    "half groups": ("qwen3", Type.Q8_0, {"intermediate_size": 112, "head_dim": 24}),
    "experts": ("qwen3_moe", Type.MXFP4, {"moe_intermediate_size": 64}),
    "experts in blocks": ("qwen2_moe", Type.Q4_K, {**WIDE, "moe_intermediate_size": 768}),
    "latents": ("deepseek_v3", Type.Q8_0, LATENTS),
    "latents in blocks": ("deepseek_v2", Type.Q4_K, {**LATENTS, "kv_lora_rank": 256}),
    "no latents of queries": ("youtu_direct", Type.Q4_0, LATENTS),
    "delta nets": ("qwen3_5", Type.Q4_0, {}),
    "delta nets in blocks": (
        "qwen3_5_moe",
        Type.IQ2_S,
        {**WIDE, "linear_value_head_dim": 128, "linear_num_value_heads": 6},
    ),
}


def logits(path: Path, **options: Any) -> torch.Tensor:
    harness = Harness(path, num_sequences=1, make_linear=PlainLinear, **options)
    harness.token_table[0, : len(PROMPT)] = PROMPT
    return harness.run([(0, 0, len(PROMPT))])[0]


def weights(path: Path, *formats: str, shard: Shard | None = None) -> GgufWeights:
    return GgufWeights(path, torch.empty, AsStored(formats).num_bytes, shard)


@pytest.mark.parametrize("name", PARTS)
def test_a_rank_reads_its_part_of_every_tensor(tmp_path: Path, name: str) -> None:
    """With codes, of the same numbers."""
    family, kind, options = PARTS[name]
    path = write_gguf(tmp_path / "model.gguf", make_model(family, **options), quantized(kind))
    config = ModelConfig.from_dir(path)
    whole = weights(path)
    num_coded = 0
    for rank in range(2):
        shard = Shard(config, rank, 2)
        own = weights(path, *FORMATS, shard=shard)
        for prefix, table in config.tables:
            matrices = {f"{layer}.weight" for layer, *_ in table.quantizable()}
            for tensor, shape in table.shapes():
                expected = shard.of(prefix + tensor, whole.read(shape, prefix + tensor))
                found = own.read(tuple(expected.shape), prefix + tensor)
                assert torch.equal(found, expected), tensor
                if tensor in matrices:
                    layer = prefix + tensor.removesuffix(".weight")
                    linear = own.quantized((expected.shape[0], expected.shape[1]), None, layer)
                    if isinstance(linear, GroupedLinear):
                        assert torch.equal(linear.weight(), expected), tensor
                        num_coded += 1
    assert num_coded > 10


@pytest.mark.parametrize("name", PARTS)
def test_its_memory_is_known_before_it_is_read(tmp_path: Path, name: str) -> None:
    family, kind, options = PARTS[name]
    path = write_gguf(tmp_path / "model.gguf", make_model(family, **options), quantized(kind))
    config, kept = ModelConfig.from_dir(path), AsStored(FORMATS)
    shard = Shard(config, 1, 2)
    stage = Stage(shard.config, 0, 1)
    foretold = loaded_bytes(path, torch.float32, kept.num_bytes, stage, shard)
    own = weights(path, *FORMATS, shard=shard)
    model = LlamaModel(
        shard.config,
        Widened(own, torch.empty, PlainLinear, kept),
        PlainLinear,
        max_model_len=8,
        device=torch.device("cpu"),
        shard=shard,
        dtype=torch.float32,
    )
    experts = sum(layer.experts.expert_bytes for layer in model.layers if layer.experts is not None)
    linear = own.quantized((shard.config.vocab_size, config.hidden_size), None, "lm_head")
    is_copy = not config.head.is_tied or linear is not None
    assert foretold == model.step_weight_bytes + experts + is_copy * model.embedding.nbytes


@pytest.mark.parametrize("family", ["qwen2_moe", "qwen3_moe", "qwen3_5_moe", "gpt_oss", "glm4_moe"])
@pytest.mark.parametrize("native", [True, False])
def test_experts_in_codes_are_computed_as_their_numbers(
    tmp_path: Path, family: str, native: bool
) -> None:
    """Those of gate and up, and of down, in types of their own; in float32 nothing is rounded."""
    sizes = "intermediate_size", "moe_intermediate_size", "shared_expert_intermediate_size"
    options = {"hidden_size": 256, **dict.fromkeys(sizes, 256), **WRITTEN[family]}
    if family in ("qwen3_moe", "glm4_moe"):
        options.pop("shared_expert_intermediate_size")
    if family == "gpt_oss":
        options = {
            key: options[key] for key in ("hidden_size", "intermediate_size", "swiglu_limit")
        }
    kinds = {"ffn_gate_exps": Type.Q3_K, "ffn_up_exps": Type.Q3_K, "ffn_down_exps": Type.MXFP4}

    def type_of(name: str) -> Type:
        kind = name.split(".")[-2] if name.endswith(".weight") else ""
        return kinds.get(kind, Type.Q8_0 if "shexp" in kind else Type.F32)

    path = write_gguf(tmp_path / "model.gguf", make_model(family, **options), type_of)
    check_gguf(path)
    found = logits(path, native=native, has_codes=True, kept=AsStored(FORMATS))
    torch.testing.assert_close(found, logits(path, kept=AsStored()), atol=1e-3, rtol=1e-3)


def test_a_scale_multiplies_its_matrix_or_an_expert(tmp_path: Path) -> None:
    model = make_model("qwen3_moe", moe_intermediate_size=64, head_dim=16)
    scales: dict[str, NDArray[Any]] = {
        "blk.0.attn_output.scale": np.array([0.75], np.float32),
        "blk.0.ffn_down_exps.scale": np.arange(1, 7, dtype=np.float32) / 3,
        "blk.0.ffn_down_exps.input_scale": np.ones(6, np.float32),
    }
    plain = weights(write_gguf(tmp_path / "plain.gguf", model, quantized(Type.NVFP4)))
    path = write_gguf(
        tmp_path / "model.gguf", model, quantized(Type.NVFP4), arrange=lambda own: own | scales
    )
    check_gguf(path)
    sources = weights(path), weights(path, *FORMATS)
    for name, shape, scale in (
        ("model.layers.0.self_attn.o_proj", (64, 64), 0.75),
        ("model.layers.0.mlp.experts.4.down_proj", (64, 64), 5 / 3),
        ("model.layers.1.mlp.experts.4.down_proj", (64, 64), 1.0),
    ):
        expected = plain.read(shape, f"{name}.weight") * scale
        numbers, coded = sources[0].read(shape, f"{name}.weight"), sources[1]
        torch.testing.assert_close(numbers, expected, atol=0, rtol=1e-6)
        linear = coded.quantized(shape, None, name)
        assert isinstance(linear, GroupedLinear)
        torch.testing.assert_close(linear.weight(), expected, atol=0, rtol=1e-6)


@pytest.mark.parametrize("family", ["qwen3_5", "glm4_moe", "glm4_moe_lite"])
def test_layers_that_draft_are_no_layers_of_the_model(tmp_path: Path, family: str) -> None:
    model = make_model(family)
    name = MODEL_ARCH_NAMES[ARCHITECTURES[model.config.model_type]]
    plain = write_gguf(tmp_path / "plain.gguf", model)
    num_layers = model.config.num_hidden_layers
    drafts: dict[str, NDArray[Any]] = {
        f"blk.{num_layers}.nextn.eh_proj.weight": np.ones((64, 128), np.float32)
    }
    path = write_gguf(
        tmp_path / "model.gguf",
        model,
        metadata={f"{name}.block_count": num_layers + 1, f"{name}.nextn_predict_layers": 1},
        arrange=lambda own: own | drafts,
    )
    assert check_gguf(path) == check_gguf(plain)
    assert torch.equal(logits(path), logits(plain))
