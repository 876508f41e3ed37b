"""Latent attention: from one vector of each token alone, as transformers computes it from the keys
and values of every head, with the same bits however a sequence is divided into steps."""

import json
import os
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor

from penstock.engine.config import ModelImpl, Quantization
from penstock.engine.errors import AdapterRefused
from penstock.engine.memory import huge_pages
from penstock.engine.memory.host import Arena
from penstock.engine.memory.pool.kv_codes import LIMITS, Codes, decode, encode, gather, store
from penstock.engine.memory.pool.kv_memory import make_descriptor
from penstock.engine.memory.pool.kv_pool import KVPool
from penstock.engine.memory.pool.kv_shape import KVHeads, KVShape
from penstock.engine.models.at_load.quantize import Rounder, quantization_plan
from penstock.engine.models.at_load.weights import QuantizedWeights
from penstock.engine.models.config import ModelConfig
from penstock.engine.models.division.shard import Shard
from penstock.engine.models.errors import InvalidModel, UnsupportedFeature
from penstock.engine.models.layers.linear import PlainLinear
from penstock.engine.models.lora.weights import read_adapter
from penstock.engine.models.parts.latent_attention.config import LatentAttention
from penstock.engine.models.weights import Checkpoint
from penstock.engine.native.features import check_features
from penstock.engine.native.model import NativeModel
from penstock.engine.process.phases import Phases
from penstock.scheduler.errors import InvalidConfig
from penstock.scheduler.types import Request, RequestId
from tests.support.adapters import merged, save_adapter
from tests.support.compiler import needs_compiler
from tests.support.executors import cpu_executor
from tests.support.fallback_runs import assert_greedy, greedy_answers, prompts
from tests.support.quantized_checkpoints import FORMATS, save_quantized
from tests.support.stepping import SteppedEngine, ids_of
from tests.support.tiny_models import (
    CPU,
    GREEDY,
    Harness,
    engine_config,
    make_model,
    save,
)

TOLERANCE = 1e-4
on_both_paths = pytest.mark.parametrize(
    "native", [False, pytest.param(True, marks=needs_compiler)], ids=["torch", "compiled"]
)
# As wide as groups of codes need, and blocks of FP8.
WIDE: dict[str, Any] = {
    "q_lora_rank": 64,
    "kv_lora_rank": 64,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 16,
    "v_head_dim": 16,
    "intermediate_size": 128,
}
IDS = torch.randint(3, 96, (50,), generator=torch.Generator().manual_seed(1))


def harness(path: Path, **options: Any) -> Harness:
    made = Harness(path, **options)
    made.token_table[:4, : len(IDS)] = IDS
    return made


def logits_of(model: Any) -> Tensor:
    with torch.inference_mode():
        logits: Tensor = model(IDS[None]).logits[0]
    return logits


def test_a_token_takes_its_latent_and_the_key_that_heads_share_and_no_more(tmp_path: Path) -> None:
    config = ModelConfig.from_dir(save(make_model("youtu"), tmp_path))
    assert config.kv_shape.bytes_per_token(2) == 3 * (40 + 8) * 2
    executor = cpu_executor(engine_config(tmp_path), tmp_path)
    assert executor.info.kv_bytes_per_token == 3 * (40 + 8) * 4
    [group] = executor.info.attention
    assert group.flops_per_pair == 3 * 2 * 4 * (48 + 40)


@pytest.mark.parametrize("dtype", [torch.float32, *LIMITS])
def test_values_are_the_beginning_of_keys(dtype: torch.dtype) -> None:
    pool = KVPool(KVShape((KVHeads(2, 8), KVHeads(1, 12, 8))), 5, 4, dtype, CPU)
    num_bytes = sum(each.nbytes for pair in pool.pairs() for each in pair)
    scales = 4 if dtype in LIMITS else 0
    assert num_bytes == 5 * 4 * (4 * (8 * dtype.itemsize + scales) + 12 * dtype.itemsize + scales)
    keys, values = pool.layer(1)
    generator = torch.Generator().manual_seed(0)
    slots, x = torch.randperm(20, generator=generator), torch.randn(20, 1, 12, generator=generator)
    store(keys, slots, x)
    pool.copy([(0, 3)])
    stored = torch.empty_like(x)
    stored[slots] = x if dtype is torch.float32 else decode(*encode(x, dtype))
    expected = stored.view(5, 4, 1, 12)[[0, 2, 0]].flatten(0, 1).transpose(0, 1)
    table = torch.tensor([[0, 2, 3]])
    assert torch.equal(gather(keys, table, torch.float32)[0], expected)
    assert torch.equal(gather(values, table, torch.float32)[0], expected[..., :8])
    assert isinstance(keys, Codes) is (dtype in LIMITS)


@needs_compiler
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_long_context_has_the_same_bits_when_threads_share_it(
    dtype: torch.dtype, tmp_path: Path
) -> None:
    sizes = {"max_position_embeddings": 2048, "num_hidden_layers": 1}
    model = make_model("youtu_direct", **sizes)
    path, length = save(model, tmp_path), 1030
    options: dict[str, Any] = {"native": True, "dtype": dtype, "max_len": 1040}
    alone = Harness(path, 1, threads=1, **options)
    shared = Harness(path, 1, threads=3, block_size=16, **options)
    ids = torch.randint(96, (length,), generator=torch.Generator().manual_seed(1))
    for each in (alone, shared):
        each.token_table[0, :length] = ids
    [expected] = alone.run([(0, 0, length)])
    shared.run([(0, 0, 500)])
    for start in [*range(500, 530), *range(1015, length)]:
        if start == 1015:
            shared.run([(0, 530, 485)])
        [logits] = shared.run([(0, start, 1)])
        assert torch.equal(logits[0], expected[start]), start
    if dtype is torch.float32:
        with torch.inference_mode():
            theirs = model(ids[None]).logits[0]
        torch.testing.assert_close(expected, theirs, atol=TOLERANCE, rtol=0)


@on_both_paths
def test_in_8_bits_the_logits_are_near(native: bool, tmp_path: Path) -> None:
    model = make_model("youtu")
    path = save(model, tmp_path)
    expected = logits_of(model)
    made = [harness(path, native=native, kv_dtype=torch.int8, threads=n) for n in (1, 2)]
    [whole] = made[0].run([(0, 0, 50)])
    assert (whole - expected).norm() < 0.03 * expected.norm()
    parts = [made[1].run([(0, start // 5, 1), (1, start, 5)]) for start in range(0, 50, 5)]
    for start, (_, five) in zip(range(0, 50, 5), parts, strict=True):
        if native:
            assert torch.equal(five, whole[start : start + 5])


@needs_compiler
@pytest.mark.parametrize("num_heads", [1, 3, 5, 130])
def test_any_number_of_heads_may_share_latents(num_heads: int, tmp_path: Path) -> None:
    sizes = {"num_attention_heads": num_heads, "num_key_value_heads": num_heads}
    model = make_model("youtu", hidden_size=72, num_hidden_layers=1, **sizes)
    path, expected = save(model, tmp_path), logits_of(model)
    [whole] = harness(path, native=True).run([(0, 0, 50)])
    torch.testing.assert_close(whole, expected, atol=TOLERANCE, rtol=0)
    made = harness(path, native=True)
    found = [made.run([(0, start, 10), (1, start, 10)])[0] for start in range(0, 50, 10)]
    assert torch.equal(torch.cat(found), whole)


@on_both_paths
@pytest.mark.parametrize("name", ["fp8-block", "ct-fp8-channel", "ct-w4a16", "ct-w8a8"])
def test_a_quantized_checkpoint_has_the_logits_of_its_values(
    name: str, native: bool, tmp_path: Path
) -> None:
    model = save_quantized(make_model("youtu", **WIDE), tmp_path, FORMATS[name])
    found = harness(tmp_path, native=native, has_codes=native).run([(0, 0, 50)])[0]
    torch.testing.assert_close(found, logits_of(model), atol=TOLERANCE, rtol=0)


@needs_compiler
@pytest.mark.parametrize("family", ["youtu", "youtu_direct"])
@pytest.mark.parametrize("method", [Quantization.INT8, Quantization.INT4, Quantization.FP8])
def test_rounded_at_load_the_compiled_step_computes_what_torch_does_of_the_same_codes(
    method: Quantization, family: str, tmp_path: Path
) -> None:
    sizes = WIDE | ({"q_lora_rank": None} if family == "youtu_direct" else {})
    path = save(make_model(family, **sizes, hidden_size=256), tmp_path)
    plan = quantization_plan(method, ModelConfig.from_dir(path), torch.float32)
    assert plan is not None
    names = {name for part in plan.parts for name in part.names}
    assert "model.layers.0.self_attn.o_proj" in names
    assert not any("kv_b_proj" in name for name in names)
    weights = Checkpoint(path, partial(torch.empty, dtype=torch.float32))

    def made(native: bool) -> Harness:
        rounder = Rounder(weights, plan, Arena().empty, Phases(), num_threads=1)
        source = QuantizedWeights(weights, plan.scheme.parts, rounder)
        options = {"weights": source, "make_linear": PlainLinear, "has_codes": native}
        return harness(path, native=native, **options)

    expected = made(False).run([(0, 0, 50)])[0]
    whole = made(True).run([(0, 0, 50), (1, 0, 9)])[0]
    # Beside int8 and int4 activations are rounded to 8 bits.
    bound = 1e-4 if method is Quantization.FP8 else 0.05
    assert (whole - expected).norm() < bound * expected.norm()
    one_by_one = made(True)
    found = [one_by_one.run([(0, position, 1)])[0] for position in range(50)]
    assert torch.equal(torch.cat(found), whole)


@on_both_paths
@pytest.mark.parametrize("family", ["youtu", "youtu_direct", "deepseek_v3"])
def test_adapters_change_what_reads_the_states_and_the_output(
    family: str, native: bool, tmp_path: Path
) -> None:
    """Beside experts, which none may change."""
    model = make_model(family)
    path = save(model, tmp_path / "base")
    of_mlp = () if family == "deepseek_v3" else ("up_proj",)
    targets = ("q_proj", "q_a_proj", "kv_a_proj_with_mqa", "o_proj", *of_mlp)
    adapter = save_adapter(model, tmp_path / "adapter", targets=targets)
    made = harness(path, native=native)
    read = read_adapter(adapter, ModelConfig.from_dir(path), torch.float32, CPU, max_rank=8)
    weights = made.model.packed_adapter(read) if isinstance(made.model, NativeModel) else read
    changed, plain = made.run([(0, 0, 50), (1, 0, 50)], adapters={0: weights})
    torch.testing.assert_close(plain, logits_of(model), atol=TOLERANCE, rtol=0)
    expected = logits_of(merged(model, adapter))
    torch.testing.assert_close(changed, expected, atol=TOLERANCE, rtol=0)
    assert (expected - logits_of(model)).abs().max() > 0.1


@pytest.mark.parametrize("target", ["q_b_proj", "kv_b_proj"])
def test_adapters_that_change_products_of_latents_are_refused_by_name(
    target: str, tmp_path: Path
) -> None:
    model = make_model("youtu")
    config = ModelConfig.from_dir(save(model, tmp_path / "base"))
    adapter = save_adapter(model, tmp_path / "adapter", targets=("o_proj", target))
    expected = rf"layers\.0\..*, a change of self_attn\.{target}, which is not supported; merge"
    with pytest.raises(AdapterRefused, match=expected):
        read_adapter(adapter, config, torch.float32, CPU, max_rank=8)


@on_both_paths
def test_answers_are_greedy_in_chunks_preempted_and_with_cached_prefixes(
    native: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not native:
        monkeypatch.setattr("penstock.engine.loading.cpu.load_library", lambda *_, **__: None)
    model = make_model("youtu")
    answers = greedy_answers(save(model, tmp_path), ModelImpl.PENSTOCK)
    for prompt, answer in zip([*prompts(), prompts()[0]], answers, strict=True):
        assert_greedy(model, prompt, answer)


@pytest.mark.skipif(not huge_pages.are_possible(), reason="memory that is kept is on huge pages")
def test_another_engine_finds_the_latents_of_the_one_before_it(tmp_path: Path) -> None:
    path, memory = save(make_model("youtu"), tmp_path), make_descriptor()
    assert memory is not None
    config = engine_config(path, kv_cache_memory_bytes=2**20, kv_memory=memory)
    ids = tuple(IDS.tolist())
    request = Request(id=RequestId("a"), prompt_token_ids=ids, sampling=GREEDY, arrival_s=0.0)
    found = []
    for _ in range(2):
        engine = SteppedEngine(config)
        found.append(engine.run([request])[0])
        del engine
    first, second = found
    assert ids_of(second) == ids_of(first)
    assert (first[0].num_cached_tokens, second[0].num_cached_tokens) == (0, 48)
    os.close(memory)


def test_ranks_divide_heads_and_each_has_the_latent(tmp_path: Path) -> None:
    config = ModelConfig.from_dir(save(make_model("youtu"), tmp_path))
    own = Shard(config, 1, 2).config
    assert own.kv_shape == config.kv_shape
    [mixer] = {layer.mixer for layer in own.layers}
    assert isinstance(mixer, LatentAttention) and mixer.num_heads == 2
    with pytest.raises(InvalidConfig, match="num_attention_heads is 4, which is not a multiple"):
        Shard(config, 0, 3)


_DEEPSEEK_V3: dict[str, Any] = {
    "architectures": ["DeepseekV3ForCausalLM"],
    "aux_loss_alpha": 0.001,
    "ep_size": 1,
    "first_k_dense_replace": 3,
    "hidden_size": 7168,
    "intermediate_size": 18432,
    "max_position_embeddings": 163840,
    "model_type": "deepseek_v3",
    "moe_intermediate_size": 2048,
    "moe_layer_freq": 1,
    "n_group": 8,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "norm_topk_prob": True,
    "num_attention_heads": 128,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 61,
    "num_key_value_heads": 128,
    "num_nextn_predict_layers": 1,
    "q_lora_rank": 1536,
    "rms_norm_eps": 1e-06,
    "rope_scaling": {
        "beta_fast": 32,
        "beta_slow": 1,
        "factor": 40,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
        "original_max_position_embeddings": 4096,
        "type": "yarn",
    },
    "rope_theta": 10000,
    "routed_scaling_factor": 2.5,
    "scoring_func": "sigmoid",
    "seq_aux": True,
    "topk_group": 4,
    "topk_method": "noaux_tc",
    "vocab_size": 129280,
}
_V2_LITE: dict[str, Any] = {
    **_DEEPSEEK_V3,
    "architectures": ["DeepseekV2ForCausalLM"],
    "first_k_dense_replace": 1,
    "hidden_size": 2048,
    "intermediate_size": 10944,
    "model_type": "deepseek_v2",
    "moe_intermediate_size": 1408,
    "n_group": 1,
    "n_routed_experts": 64,
    "n_shared_experts": 2,
    "norm_topk_prob": False,
    "num_attention_heads": 16,
    "num_experts_per_tok": 6,
    "num_hidden_layers": 27,
    "num_key_value_heads": 16,
    "q_lora_rank": None,
    "rope_scaling": {**_DEEPSEEK_V3["rope_scaling"], "mscale": 0.707, "mscale_all_dim": 0.707},
    "routed_scaling_factor": 1.0,
    "scoring_func": "softmax",
    "topk_group": 1,
    "topk_method": "greedy",
    "vocab_size": 102400,
}


@pytest.mark.parametrize(
    ("published", "billions", "token_bytes"),
    [(_DEEPSEEK_V3, 671, 61 * 1152), (_V2_LITE, 15.7, 27 * 1152)],
    ids=["DeepSeek-V3", "DeepSeek-V2-Lite"],
)
def test_a_published_config_has_the_size_that_transformers_gives_it(
    published: dict[str, Any], billions: float, token_bytes: int, tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(published))
    config = ModelConfig.from_dir(tmp_path)
    theirs = transformers.AutoConfig.from_pretrained(tmp_path)
    with torch.device("meta"):
        model: Any = getattr(transformers, published["architectures"][0])(theirs)
    size = sum(tensor.numel() for tensor in model.state_dict().values())
    assert config.num_parameters == size == pytest.approx(billions * 1e9, rel=0.003)
    assert config.kv_shape.bytes_per_token(2) == token_bytes
    assert config.max_model_len == 163840


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"num_key_value_heads": 2},
            "'num_key_value_heads' must be num_attention_heads .4., not 2",
        ),
        ({"attention_bias": True, "q_lora_rank": None}, "'attention_bias' must be false where"),
        ({"qk_rope_head_dim": 7}, "qk_rope_head_dim is 7; it must be even"),
        ({"kv_lora_rank": 0}, "'kv_lora_rank' must be a positive integer, not 0"),
        ({"rope_scaling": {"rope_type": "linear", "factor": 2.0, "mscale_all_dim": 1.0}}, "mscale"),
    ],
)
def test_what_is_not_computed_is_refused_by_name(
    changes: dict[str, Any], message: str, tmp_path: Path
) -> None:
    path = save(make_model("youtu"), tmp_path)
    content = json.loads((path / "config.json").read_text()) | changes
    if "rope_scaling" in changes:
        del content["rope_parameters"]
    (path / "config.json").write_text(json.dumps(content))
    with pytest.raises(InvalidModel, match=message):
        ModelConfig.from_dir(path)


@pytest.mark.parametrize(
    ("rope", "message"),
    [
        (None, "'rope_parameters' must be an object"),
        ({}, "'rope_parameters' must be an object"),
        ({"rope_type": "default", "partial_rotary_factor": 0.7}, "'partial_rotary_factor' must be"),
    ],
)
def test_mistral_4_has_the_rotary_positions_that_its_sizes_say_or_is_refused(
    rope: dict[str, Any] | None, message: str, tmp_path: Path
) -> None:
    path = save(make_model("mistral4"), tmp_path)
    content = json.loads((path / "config.json").read_text())
    # Where it says nothing transformers scales them by 128.
    (path / "config.json").write_text(json.dumps({**content, "rope_parameters": rope}))
    with pytest.raises(InvalidModel, match=message):
        ModelConfig.from_dir(path)


def test_odd_sizes_are_for_torch_where_products_are_of_pairs(tmp_path: Path) -> None:
    path = save(make_model("youtu", qk_nope_head_dim=11), tmp_path)
    config = ModelConfig.from_dir(path)
    check_features(config, torch.float32)
    with pytest.raises(UnsupportedFeature, match="latent attention with an odd nope_dim"):
        check_features(config, torch.bfloat16)
