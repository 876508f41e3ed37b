"""Mixtures of experts: who computes a token, how experts are stored, and what of them is read."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor

from penstock.engine.config import Quantization
from penstock.engine.files.json_file import Fields
from penstock.engine.models.config import ModelConfig
from penstock.engine.models.errors import InvalidModel, UnsupportedFeature
from penstock.engine.models.formats.kept import AsStored
from penstock.engine.models.layers.linear import MakeLinear, PlainLinear
from penstock.engine.models.parts.experts.config import Experts, deepseek_experts
from penstock.engine.models.parts.experts.layer import routes
from penstock.engine.native.features import check_features
from penstock.engine.native.library import CODE_FORMATS
from penstock.engine.native.model import NativeModel
from tests.engine.executors.test_cpu import assign, generate
from tests.support.changed_models import changed
from tests.support.compiler import needs_compiler
from tests.support.executors import cpu_executor
from tests.support.paths import ROOT
from tests.support.quantized_checkpoints import FORMATS, gptq
from tests.support.tiny_models import Harness, engine_config, make_batch, make_model, save
from tests.support.weight_formats import coded

PROMPT = torch.arange(3, 3 + 40)[None]
CONFIGS = ROOT / "configs" / "models"
EXPERT = "model.layers.{layer}.mlp.experts.{expert}.{part}_proj.weight"


@pytest.fixture(scope="module")
def mixture(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(make_model("qwen3_moe"), tmp_path_factory.mktemp("mixture"))


def harness(path: Path, **options: Any) -> Harness:
    made = Harness(path, **options)
    made.token_table[:2, :40] = torch.cat([PROMPT, PROMPT.flip(1)])
    return made


def logits_of(path: Path, **options: Any) -> Tensor:
    return harness(path, **options).run([(0, 0, 40)])[0]


def edited(path: Path, to: Path, tensors: dict[str, Tensor], **changes: Any) -> Path:
    """A copy with other tensors and settings."""
    to.mkdir()
    save_file(tensors, to / "model.safetensors")
    config = json.loads((path / "config.json").read_text())
    (to / "config.json").write_text(json.dumps(config | changes))
    return to


def test_experts_that_are_stacked_in_the_file_give_the_same_bits(
    mixture: Path, tmp_path: Path
) -> None:
    tensors = load_file(mixture / "model.safetensors")

    def stacked(layer: int, *parts: str) -> Tensor:
        return torch.stack(
            [
                torch.cat(
                    [tensors.pop(EXPERT.format(layer=layer, expert=e, part=p)) for p in parts]
                )
                for e in range(6)
            ]
        )

    stacks = {}
    for layer in range(3):
        prefix = f"model.layers.{layer}.mlp.experts"
        stacks[f"{prefix}.gate_up_proj"] = stacked(layer, "gate", "up")
        stacks[f"{prefix}.down_proj"] = stacked(layer, "down")
    path = edited(mixture, tmp_path / "stacked", tensors | stacks)
    assert torch.equal(logits_of(path), logits_of(mixture))

    stacks["model.layers.1.mlp.experts.down_proj"] = torch.zeros(5, 64, 24)
    too_few = edited(mixture, tmp_path / "too few", tensors | stacks)
    with pytest.raises(InvalidModel, match=r"shape \(5, 64, 24\), in which there is no .*\.5\."):
        logits_of(too_few)


@pytest.mark.parametrize("is_normed", [True, False])
def test_of_equal_logits_the_first_experts_are_chosen(is_normed: bool) -> None:
    experts = Experts(hidden_size=64, num_experts=5, num_per_token=2, size=8, is_normed=is_normed)
    chosen, weights = routes(experts, torch.tensor([[1.0] * 5, [0.0, 3.0, 2.0, 3.0, 2.0]]))
    assert chosen.tolist() == [[0, 1], [1, 3]]
    assert weights[0].tolist() == pytest.approx([0.5, 0.5] if is_normed else [0.2, 0.2])


def test_of_equal_groups_the_first_are_chosen_and_of_their_experts_the_first() -> None:
    experts = Experts(
        hidden_size=64, num_experts=8, num_per_token=3, size=8, is_normed=True, has_sigmoids=True,
        has_corrections=True, num_groups=4, num_groups_used=2, num_best=2, weight_factor=2.0,
    )  # fmt: skip
    equal, corrections = torch.zeros(2, 8), torch.tensor([0.0, 0, 0, 0, 1, 1, 0, 0])
    assert routes(experts, equal)[0].tolist() == [[0, 1, 2]] * 2
    chosen, weights = routes(experts, equal, corrections=corrections)
    assert chosen.tolist() == [[4, 5, 0]] * 2  # weights know nothing of corrections
    assert weights.flatten().tolist() == pytest.approx([2 / 3] * 6)


SMALL: dict[str, Any] = {
    "hidden_size": 24,
    "num_attention_heads": 4,
    "num_experts_per_tok": 5,
    "moe_intermediate_size": 8,
}
GROUPS: dict[str, Any] = {"n_group": 6, "topk_group": 2, "n_routed_experts": 24}
# As of transformers' settings of DeepSeek-V2, which has no such correction, and of Mistral 4.
ROUTERS: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "sigmoids": ("glm4_moe.Glm4Moe", {"norm_topk_prob": True}, {}),
    "sigmoids that are not normed": ("glm4_moe.Glm4Moe", {"norm_topk_prob": False}, {}),
    "all groups": ("deepseek_v3.DeepseekV3", {"topk_group": 6, "norm_topk_prob": True}, {}),
    "one group": (
        "deepseek_v3.DeepseekV3",
        {"n_group": 1, "topk_group": 1, "norm_topk_prob": True},
        {},
    ),
    "greedy": (
        "deepseek_v2.DeepseekV2",
        {"topk_method": "greedy"},
        {"num_best": 1, "has_sigmoids": False},
    ),
    "the best of each group": (
        "deepseek_v2.DeepseekV2",
        {"topk_method": "group_limited_greedy"},
        {"num_best": 1, "has_sigmoids": False},
    ),
    "softmax": ("mistral4.Mistral4", {"norm_topk_prob": True}, {"has_sigmoids": False}),
}


@pytest.mark.parametrize("name", ROUTERS)
def test_tokens_have_the_experts_and_weights_of_transformers_routers(name: str) -> None:
    prefix, changes, kind = ROUTERS[name]
    module, _, cls = prefix.partition(".")
    settings = {**SMALL, **GROUPS, "routed_scaling_factor": 2.5, **changes}
    config = getattr(transformers, f"{cls}Config")(**settings)
    models: Any = transformers.models
    router = getattr(getattr(models, module), f"modeling_{module}").__dict__[f"{cls}TopkRouter"]
    theirs = router(config)
    theirs.weight.data = torch.eye(24)
    experts = deepseek_experts(Fields("config.json", settings), **kind)
    logits = torch.randn(200, 24, generator=torch.Generator().manual_seed(1))
    corrections = None
    if experts.has_corrections:
        corrections = torch.randn(24, generator=torch.Generator().manual_seed(2)) / 4
        theirs.e_score_correction_bias.copy_(corrections)
    _, weights, chosen = theirs(logits)
    expected = torch.zeros(200, 24).scatter(1, chosen, weights.detach())
    found = torch.zeros(200, 24).scatter(1, *routes(experts, logits, None, corrections))
    torch.testing.assert_close(found, expected)
    assert (found > 0).sum() == 200 * 5


@pytest.fixture(scope="module")
def glm(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(make_model("glm4_moe_groups"), tmp_path_factory.mktemp("glm"))


@needs_compiler
@pytest.mark.parametrize("kind", ["mixture", "glm"])
def test_the_compiled_step_breaks_ties_as_torch_does(
    kind: str, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    mixture = request.getfixturevalue(kind)
    tensors = load_file(mixture / "model.safetensors")
    routers = {name: tensors[name] for name in tensors if ".mlp.gate." in name}
    assert len(routers) == {"mixture": 3, "glm": 2}[kind]
    for router in routers.values():
        router.zero_()  # the logits of all experts are equal, whatever sums are rounded to
    path = edited(mixture, tmp_path / "ties", tensors | routers)
    torch.testing.assert_close(logits_of(path, native=True), logits_of(path), atol=1e-4, rtol=0)


def test_corrections_are_not_rounded_to_the_type_of_the_model(glm: Path) -> None:
    name = "model.layers.2.mlp.gate.e_score_correction_bias"
    stored = load_file(glm / "model.safetensors")[name]
    model: Any = harness(glm, dtype=torch.bfloat16).model
    assert torch.equal(model.layers[2].experts.corrections, stored)
    assert not torch.equal(stored.bfloat16().float(), stored)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"n_group": 3}, r"of n_group \(3\) groups of n_routed_experts \(20\), topk_group \(2\)"),
        ({"n_group": 20}, "and each as many as the others and 2 or more"),
        ({"topk_group": 1}, r"must have num_experts_per_tok \(5\) experts"),
        ({"scoring_func": "softmax"}, "'scoring_func' must be 'sigmoid', not 'softmax'"),
        ({"topk_method": "greedy"}, "'topk_method' must be noaux_tc, not 'greedy'"),
        ({"n_routed_experts": 0}, "'n_routed_experts' must be a positive integer"),
        ({"mlp_layer_types": ["dense", "sparse"]}, "must be dense or sparse for 3 layers"),
        ({"routed_scaling_factor": 0}, "'routed_scaling_factor' must be a positive number"),
    ],
)
def test_wrong_settings_of_groups_are_refused_by_name(
    glm: Path, tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    config = json.loads((glm / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | changes))
    with pytest.raises(InvalidModel, match=message):
        ModelConfig.from_dir(tmp_path)


def test_layers_have_experts_as_config_json_says(glm: Path, tmp_path: Path) -> None:
    config = json.loads((glm / "config.json").read_text())
    for changes, expected in (
        ({}, [False, False, True]),
        ({"first_k_dense_replace": 0, "moe_layer_freq": 2}, [True, False, True]),
        ({"mlp_layer_types": ["sparse", "dense", "sparse"]}, [True, False, True]),
    ):
        (tmp_path / "config.json").write_text(json.dumps(config | changes))
        layers = ModelConfig.from_dir(tmp_path).layers
        assert [layer.experts is not None for layer in layers] == expected


def reached(path: Path, num_tokens: int) -> int:
    """By the first tokens of the prompt, as torch routes them, summed over the layers."""
    made = harness(path)
    model: Any = made.model
    num = 0
    for layer in model.layers:
        router = layer.experts.router

        def counted(x: Tensor, router: Any = router) -> Tensor:
            nonlocal num
            logits: Tensor = router(x)
            num += len({*routes(model.config.experts, logits)[0].flatten().tolist()})
            return logits

        object.__setattr__(layer.experts, "router", counted)
    made.run([(0, 0, num_tokens)])
    return num


@needs_compiler
@pytest.mark.parametrize("num_tokens", [1, 3, 40])
def test_the_compiled_step_tells_how_many_experts_it_has_read(
    mixture: Path, num_tokens: int
) -> None:
    made = harness(mixture, native=True)
    assert isinstance(made.model, NativeModel)
    made.run([(0, 0, num_tokens)])
    assert made.model.num_experts_read == reached(mixture, num_tokens)


def in_company(made: Harness) -> Tensor:
    """The logits of the first prompt, in chunks and then token by token beside the second."""
    parts = [made.run([(0, start, 7), (1, start, 3)])[0] for start in range(0, 35, 7)]
    parts += [made.run([(0, at, 1), (1, at - 35, 1)], num_decodes=2)[0] for at in range(35, 40)]
    return torch.cat(parts)


@needs_compiler
@pytest.mark.parametrize("make_linear", [coded(8, 32), coded(4, 32, has_zeros=True)])
@pytest.mark.parametrize("sizes", [{}, {"hidden_size": 256, "moe_intermediate_size": 288}])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-4), (torch.float16, 0.2)])
def test_experts_in_codes_have_the_same_bits_alone_in_chunks_and_in_company(
    make_linear: MakeLinear,
    sizes: dict[str, int],
    dtype: torch.dtype,
    tolerance: float,
    tmp_path: Path,
) -> None:
    path = save(make_model("qwen3_moe", **sizes), tmp_path)
    options: dict[str, Any] = {"has_codes": True, "make_linear": make_linear, "dtype": dtype}
    alone = logits_of(path, native=True, threads=1, **options)
    assert torch.equal(in_company(harness(path, native=True, threads=2, **options)), alone)
    # Torch multiplies the same weights with activations that are not rounded.
    assert (alone - logits_of(path, make_linear=make_linear)).abs().mean() < tolerance


@needs_compiler
def test_an_fp8_checkpoint_of_experts_has_the_logits_of_its_values(tmp_path: Path) -> None:
    """As Qwen3-30B-A3B-FP8: routers and the output layer are plain."""
    model = make_model("qwen3_moe", moe_intermediate_size=32, head_dim=16)  # whole blocks
    mixture = save(model, tmp_path / "model")
    plain, codes = load_file(mixture / "model.safetensors"), dict[str, Tensor]()
    for name in list(plain):
        if name.endswith("_proj.weight"):
            packed, weight = FORMATS["fp8-block"].pack(plain[name].numpy())
            plain[name] = torch.from_numpy(weight)
            layer = name.removesuffix(".weight")
            codes |= {f"{layer}.{end}": tensor for end, tensor in packed.items()}
        else:
            codes[name] = plain[name]
    settings = FORMATS["fp8-block"].settings | {"modules_to_not_convert": ["mlp.gate", "lm_head"]}
    fp8 = edited(mixture, tmp_path / "fp8", codes, quantization_config=settings)
    values = edited(mixture, tmp_path / "values", plain)
    expected = logits_of(values)
    for kept in (AsStored(), AsStored({"fp8"})):
        torch.testing.assert_close(logits_of(fp8, kept=kept), expected, atol=1e-4, rtol=0)
    found = logits_of(fp8, native=True, has_codes=True)
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=0)
    config = ModelConfig.from_dir(fp8)
    held: Any = harness(fp8, make_linear=PlainLinear, kept=AsStored({"fp8"})).model
    assert config.step_weight_bytes(4) == held.step_weight_bytes
    assert config.expert_bytes(4) == held.expert_bytes
    assert config.weight_bytes(4) == (
        held.step_weight_bytes + held.expert_bytes + held.embedding.nbytes
    )


@needs_compiler
@pytest.mark.parametrize("native", [True, False])
def test_experts_that_each_order_their_columns_have_the_logits_of_their_values(
    native: bool, tmp_path: Path
) -> None:
    model = make_model("qwen3_moe", moe_intermediate_size=32, head_dim=16)
    mixture = save(model, tmp_path / "model")
    plain, codes = load_file(mixture / "model.safetensors"), dict[str, Tensor]()
    for seed, name in enumerate(list(plain)):
        if not name.endswith("_proj.weight"):
            codes[name] = plain[name]
            continue
        pack = gptq(4, 16, order_seed=seed if ".experts." in name else 0)
        packed, weight = pack(plain[name].numpy())
        plain[name] = torch.from_numpy(weight)
        layer = name.removesuffix(".weight")
        codes |= {f"{layer}.{end}": tensor.contiguous() for end, tensor in packed.items()}
    settings = FORMATS["gptq-act-order"].settings
    path = edited(mixture, tmp_path / "codes", codes, quantization_config=settings)
    values = edited(mixture, tmp_path / "values", plain)
    found = logits_of(path, native=native, has_codes=native)
    torch.testing.assert_close(found, logits_of(values), atol=1e-4, rtol=0)
    config, kept = ModelConfig.from_dir(path), AsStored(CODE_FORMATS)
    held: Any = harness(path, make_linear=PlainLinear, kept=kept).model
    assert held.expert_bytes == config.expert_bytes(4, kept.num_bytes)
    assert held.step_weight_bytes == config.step_weight_bytes(4, kept.num_bytes)


E2M1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6])


def mxfp4(shape: tuple[int, int, int], seed: int) -> tuple[Tensor, Tensor, Tensor]:
    """Random blocks and scales as gpt-oss has them, and their values: (experts, rows, columns)."""
    generator = torch.Generator().manual_seed(seed)
    num, rows, columns = shape
    codes = torch.randint(0, 16, (num, rows, columns // 32, 32), generator=generator)
    powers = torch.randint(121, 125, (num, rows, columns // 32), generator=generator)
    values = E2M1[codes] * 2.0 ** (powers[..., None] - 127)
    blocks = codes[..., ::2] | codes[..., 1::2] << 4
    return blocks.byte(), powers.byte(), values.flatten(2)


@pytest.fixture(scope="module")
def gpt_oss(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Tensor]:
    """A checkpoint in MXFP4, and transformers' logits of what its codes stand for."""
    model = make_model("gpt_oss", intermediate_size=32)
    directory = tmp_path_factory.mktemp("gpt-oss")
    codes: dict[str, Tensor] = {}
    for index, layer in enumerate(model.model.layers):
        for name, shape in (("gate_up_proj", (5, 64, 64)), ("down_proj", (5, 64, 32))):
            blocks, scales, values = mxfp4(shape, index)
            getattr(layer.mlp.experts, name).data = values.transpose(1, 2).contiguous()
            prefix = f"model.layers.{index}.mlp.experts.{name}"
            codes |= {f"{prefix}_blocks": blocks, f"{prefix}_scales": scales}
    plain = save(model, directory / "plain")
    tensors = load_file(plain / "model.safetensors")
    kept = {k: v for k, v in tensors.items() if not k.endswith(("gate_up_proj", "down_proj"))}
    settings = {
        "quant_method": "mxfp4",
        "modules_to_not_convert": ["model.layers.*.self_attn", "model.layers.*.mlp.router"],
    }
    changes = {"quantization_config": settings, "experts_per_token": 2}
    path = edited(plain, directory / "mxfp4", kept | codes, **changes)
    with torch.inference_mode():
        return path, model(PROMPT).logits[0]


def test_gpt_oss_in_mxfp4_has_the_logits_of_its_values(gpt_oss: tuple[Path, Tensor]) -> None:
    path, expected = gpt_oss
    for kept in (AsStored(), AsStored({"int4 levels"})):
        torch.testing.assert_close(logits_of(path, kept=kept), expected, atol=1e-4, rtol=0)
    config = ModelConfig.from_dir(path)
    held: Any = harness(path, make_linear=PlainLinear, kept=AsStored({"int4 levels"})).model
    assert config.expert_bytes(4) == held.expert_bytes
    plain = ModelConfig.from_dir(path.with_name("plain")).expert_bytes(4)
    assert held.expert_bytes < plain / 4


@needs_compiler
def test_gpt_oss_stays_in_4_bits_in_the_compiled_step(gpt_oss: tuple[Path, Tensor]) -> None:
    path, expected = gpt_oss
    options: dict[str, Any] = {"native": True, "has_codes": True}
    alone = logits_of(path, threads=1, **options)
    assert torch.equal(in_company(harness(path, threads=2, **options)), alone)
    torch.testing.assert_close(alone, expected, atol=1e-4, rtol=0)


@needs_compiler
@pytest.mark.parametrize("method", [Quantization.INT8, Quantization.INT4, Quantization.FP8])
def test_experts_are_rounded_at_load_and_their_routers_are_not(
    method: Quantization, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = make_model("qwen3_moe", hidden_size=256, moe_intermediate_size=256, head_dim=32)
    path = save(model, tmp_path / "model")
    monkeypatch.setattr(
        "penstock.engine.models.at_load.quantize.cache_directory",
        lambda *_: tmp_path / "cache",
    )
    config = engine_config(path, quantization=method)
    executor = cpu_executor(config, path)
    assert generate(executor, [[3, 7, 11, 5], list(range(20, 60))], 8)
    experts = executor.info.experts
    assert experts is not None
    least, most = {"int8": (8.5, 8.5), "int4": (4.5, 4.5), "fp8": (8, 8.2)}[method]
    assert least <= experts.expert_bytes * 8 / (3 * 256 * 256) <= most
    answer = generate(executor, [[3, 7, 11, 5]], 8)
    assert list((tmp_path / "cache").iterdir())
    assert generate(cpu_executor(config, path), [[3, 7, 11, 5]], 8) == answer


@needs_compiler
def test_a_step_reports_the_experts_that_it_has_read(mixture: Path) -> None:
    executor = cpu_executor(engine_config(mixture), mixture)
    experts = executor.info.experts
    assert experts is not None and experts.expert_bytes == 4 * 3 * 24 * 64
    assert executor.info.weight_bytes == ModelConfig.from_dir(mixture).step_weight_bytes(4)
    prompt = make_batch((0,), (0,), (3,), assignments=(assign(0, [3, 4, 5], [0, 1]),))
    decode = make_batch((0,), (3,), (1,), num_decodes=1)
    steps = [executor.execute(batch).wait().num_experts for batch in (prompt, decode)]
    assert steps == [reached(mixture, 3), 3 * 2]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_experts_per_tok": 7}, r"num_experts_per_tok \(7\) must be at most num_local_ex"),
        ({"mlp_only_layers": [3]}, "'mlp_only_layers' must be a list of layers, from 0 to 2"),
        ({"mlp_only_layers": "1"}, "'mlp_only_layers' must be a list of layers"),
        ({"num_local_experts": -1}, "'num_local_experts' must be an integer of at least 0"),
        ({"num_local_experts": 10**6}, "'num_local_experts' must be at most"),
        ({"decoder_sparse_step": 0}, "'decoder_sparse_step' must be a positive integer"),
        ({"norm_topk_prob": 1}, "'norm_topk_prob' must be true or false"),
        ({"shared_expert_intermediate_size": 8}, "shared_expert_intermediate_size"),
    ],
)
def test_wrong_settings_of_experts_are_refused_by_name(
    mixture: Path, tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    config = json.loads((mixture / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | changes))
    with pytest.raises(InvalidModel, match=message):
        ModelConfig.from_dir(tmp_path)


def test_without_experts_it_is_a_dense_model(mixture: Path, tmp_path: Path) -> None:
    config = json.loads((mixture / "config.json").read_text())
    for off in ({"num_local_experts": 0}, {"mlp_only_layers": [0, 1, 2]}):
        (tmp_path / "config.json").write_text(json.dumps(config | off))
        assert ModelConfig.from_dir(tmp_path).experts is None


def test_what_is_not_compiled_beside_experts_is_refused_by_name(mixture: Path) -> None:
    config = ModelConfig.from_dir(mixture)
    check_features(config, torch.bfloat16)
    with pytest.raises(UnsupportedFeature, match="experts with post_norms, which the compiled"):
        check_features(changed(config, norms={"post": True}), torch.bfloat16)
    odd = changed(config, experts={"size": 23})
    with pytest.raises(UnsupportedFeature, match="experts of an odd size"):
        check_features(odd, torch.bfloat16)


GPT_OSS_20B = {
    "architectures": ["GptOssForCausalLM"],
    "attention_bias": True,
    "eos_token_id": 200002,
    "experts_per_token": 4,
    "head_dim": 64,
    "hidden_act": "silu",
    "hidden_size": 2880,
    "initial_context_length": 4096,
    "intermediate_size": 2880,
    "layer_types": ["sliding_attention", "full_attention"] * 12,
    "max_position_embeddings": 131072,
    "model_type": "gpt_oss",
    "num_attention_heads": 64,
    "num_experts_per_tok": 4,
    "num_hidden_layers": 24,
    "num_key_value_heads": 8,
    "num_local_experts": 32,
    "output_router_logits": False,
    "quantization_config": {
        "modules_to_not_convert": [
            "model.layers.*.self_attn",
            "model.layers.*.mlp.router",
            "model.embed_tokens",
            "lm_head",
        ],
        "quant_method": "mxfp4",
    },
    "rms_norm_eps": 1e-05,
    "rope_scaling": {
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "factor": 32.0,
        "original_max_position_embeddings": 4096,
        "rope_type": "yarn",
        "truncate": False,
    },
    "rope_theta": 150000,
    "router_aux_loss_coef": 0.9,
    "sliding_window": 128,
    "swiglu_limit": 7.0,
    "tie_word_embeddings": False,
    "vocab_size": 201088,
}


GLM_4_5_AIR = {
    "architectures": ["Glm4MoeForCausalLM"],
    "attention_bias": True,
    "eos_token_id": [151329, 151336, 151338],
    "first_k_dense_replace": 1,
    "head_dim": 128,
    "hidden_act": "silu",
    "hidden_size": 4096,
    "intermediate_size": 10944,
    "max_position_embeddings": 131072,
    "model_type": "glm4_moe",
    "moe_intermediate_size": 1408,
    "n_group": 1,
    "n_routed_experts": 128,
    "n_shared_experts": 1,
    "norm_topk_prob": True,
    "num_attention_heads": 96,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 46,
    "num_key_value_heads": 8,
    "num_nextn_predict_layers": 1,
    "pad_token_id": 151329,
    "partial_rotary_factor": 0.5,
    "rms_norm_eps": 1e-05,
    "rope_scaling": None,
    "rope_theta": 1000000,
    "routed_scaling_factor": 1.0,
    "tie_word_embeddings": False,
    "topk_group": 1,
    "use_qk_norm": False,
    "vocab_size": 151552,
}


def test_the_published_glm_has_the_size_that_transformers_gives_it(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(GLM_4_5_AIR))
    config = ModelConfig.from_dir(tmp_path)
    with torch.device("meta"):
        theirs: Any = transformers.Glm4MoeForCausalLM(
            transformers.AutoConfig.from_pretrained(tmp_path)
        )
    size = sum(tensor.numel() for tensor in theirs.state_dict().values())
    assert config.num_parameters == size > 106e9
    # 12 billion compute a token.
    assert config.num_token_weights / 1e9 == pytest.approx(12.2, abs=0.2)


def test_the_published_gpt_oss_has_its_size_and_its_windows(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(GPT_OSS_20B))
    config = ModelConfig.from_dir(tmp_path)
    assert config.num_parameters / 1e9 == pytest.approx(20.91, abs=0.01)
    assert config.weight_bytes(2) / 1e9 == pytest.approx(14.4, abs=0.1)
    assert config.windows == (128, None) * 12 and config.max_model_len == 131_072


def test_the_published_sizes_are_those_of_the_model() -> None:
    config = ModelConfig.from_dir(CONFIGS / "Qwen3-30B-A3B")
    assert config.num_parameters == 30_532_122_624
    # Of 3.3 billion that compute a token, the embedding's row aside.
    active = config.num_token_weights + config.vocab_size * config.hidden_size
    assert active / 1e9 == pytest.approx(3.04, abs=0.01)
