"""Small random models of every family, as transformers saves them, and hand-made steps."""

import tempfile
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
import transformers
from torch import Tensor

from penstock.engine.config import Device, Dtype, EngineConfig, LoadFormat
from penstock.engine.loading.weights import weight_source
from penstock.engine.memory.pool.kv_pool import KVPool, KVPools
from penstock.engine.models.config import ModelConfig
from penstock.engine.models.decoder.model import LlamaModel, Model
from penstock.engine.models.formats.kept import AsStored
from penstock.engine.models.layers.linear import PlainLinear, cpu_linear
from penstock.engine.native.library import CODE_FORMATS, load_library
from penstock.engine.native.model import NativeModel
from penstock.engine.native.packing import FORMATS
from penstock.engine.process.phases import Phases
from penstock.engine.step.model_input import AdapterRun, build_model_input
from penstock.scheduler.config import SchedulerConfig
from penstock.scheduler.types import (
    SamplingParams,
    ScheduledBatch,
    SlotAssignment,
    StateSnapshot,
)
from tests.support.inserted_rows import InsertedPrompt, of_inserts

# As few programs as the interpreter of kernels can be given.
SMALLEST: dict[str, Any] = {
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "hidden_size": 32,
    "intermediate_size": 32,
}
BLOCK_SIZE = 4
MAX_LEN = 128
GREEDY = SamplingParams(max_tokens=64, temperature=0.0)
CPU = torch.device("cpu")

_LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
_YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}
# family -> (transformers' name, options that this configuration tests)
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama2": ("Llama", {"num_key_value_heads": 4, "tie_word_embeddings": False}),
    "llama3_gqa": ("Llama", {"num_key_value_heads": 1, "rope_theta": 500_000.0}),
    "llama3.1_rope": ("Llama", {"rope_scaling": _LLAMA3, "rope_theta": 10_000.0}),
    "llama3.2_tied": ("Llama", {"rope_scaling": _LLAMA3, "tie_word_embeddings": True}),
    "llama_linear_rope": ("Llama", {"rope_scaling": {"rope_type": "linear", "factor": 4.0}}),
    "llama_yarn": (
        "Llama",
        {"rope_scaling": {**_YARN, "beta_fast": 8, "mscale": 0.7, "mscale_all_dim": 1.0}},
    ),
    "qwen2_yarn": ("Qwen2", {"rope_scaling": _YARN, "rope_theta": 1e6}),
    "llama_biases": ("Llama", {"attention_bias": True, "mlp_bias": True}),
    "mistral_window": ("Mistral", {"sliding_window": 9, "head_dim": 32}),
    "mistral_no_window": ("Mistral", {"sliding_window": None, "head_dim": 8}),
    "qwen2": ("Qwen2", {"tie_word_embeddings": True}),
    "qwen2_window": (
        "Qwen2",
        {"use_sliding_window": True, "sliding_window": 7, "max_window_layers": 1},
    ),
    "qwen3": ("Qwen3", {"head_dim": 24, "tie_word_embeddings": True}),
    "qwen3_bias": ("Qwen3", {"head_dim": 16, "attention_bias": True}),
}
_LONGROPE = {
    "rope_type": "longrope",
    "short_factor": [1.0, 1.1, 1.2, 1.3, 1.4, 1.5],
    "long_factor": [1.0, 1.5, 2.0, 3.0, 5.0, 9.0],
    "original_max_position_embeddings": 32,
    "partial_rotary_factor": 0.75,
    "rope_theta": 10_000.0,
}
_MINISTRAL_ROPE = {
    **_YARN,
    "original_max_position_embeddings": 16,
    "rope_theta": 1e6,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "llama_4_scaling_beta": 0.5,
}
_BY_KIND = {
    "full_attention": {**_YARN, "rope_theta": 5e5},
    "sliding_attention": {"rope_type": "default", "rope_theta": 5e5},
}
_GEMMA_ROPE = {
    "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
    "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
}
_GEMMA = {
    "head_dim": 24,
    "num_hidden_layers": 2,
    "sliding_window": 9,
    "query_pre_attn_scalar": 40,
    "tie_word_embeddings": True,
    "layer_types": ["sliding_attention", "full_attention"],
    "rope_parameters": _GEMMA_ROPE,
}
_SMALL_VISION = {
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 28,
    "patch_size": 14,
}
# The families that came later, of which fewer tests are made.
MORE_FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "phi4": ("Phi3", {"pad_token_id": 0, "num_hidden_layers": 2}),
    "phi4_mini": (
        "Phi3",
        {
            "num_hidden_layers": 2,
            "rope_parameters": _LONGROPE,
            "pad_token_id": 0,
            "tie_word_embeddings": True,
        },
    ),
    "smollm3": ("SmolLM3", {"no_rope_layers": [1, 0, 1], "pad_token_id": 0}),
    "ministral3": ("Ministral3", {"head_dim": 24, "rope_parameters": _MINISTRAL_ROPE}),
    "ministral3_wrapped": ("Mistral3", {"head_dim": 24, "rope_parameters": _MINISTRAL_ROPE}),
    "mistral_small_wrapped": (
        "Mistral3",
        {"model_type": "mistral", "head_dim": 32, "sliding_window": None},
    ),
    "granite": (
        "Granite",
        {
            "embedding_multiplier": 12.0,
            "residual_multiplier": 0.22,
            "attention_multiplier": 0.015625,
            "logits_scaling": 8.0,
        },
    ),
    "olmo2": ("Olmo2", {"pad_token_id": 0}),
    "olmo3": (
        "Olmo3",
        {
            "pad_token_id": 0,
            "num_hidden_layers": 2,
            "sliding_window": 9,
            "layer_types": ["sliding_attention", "full_attention"],
            "rope_parameters": _BY_KIND,
        },
    ),
    "seed_oss": ("SeedOss", {"head_dim": 24, "attention_out_bias": True}),
    "cwm": (
        "Cwm",
        {
            "head_dim": 24,
            "sliding_window": 9,
            "mlp_bias": True,
            "layer_types": ["full_attention", "sliding_attention", "sliding_attention"],
            "rope_parameters": {**_LLAMA3, "rope_theta": 1e6},
        },
    ),
    "exaone4": (
        "Exaone4",
        {"num_hidden_layers": 2, "sliding_window": 9, "sliding_window_pattern": 2},
    ),
    "exaone4_no_window": (
        "Exaone4",
        {"sliding_window": None, "layer_types": ["full_attention"] * 3},
    ),
    "gemma3": ("Gemma3Text", _GEMMA),
    "gemma3_wrapped": ("Gemma3", _GEMMA),
}
# Of mixtures of experts; the third has one layer of four with experts.
_EXPERTS = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
MORE_FAMILIES |= {
    "qwen2_moe": ("Qwen2Moe", {**_EXPERTS, "shared_expert_intermediate_size": 40}),
    "qwen3_moe": ("Qwen3Moe", {**_EXPERTS, "head_dim": 24, "norm_topk_prob": True}),
    "qwen3_moe_few": (
        "Qwen3Moe",
        {
            **_EXPERTS,
            "num_experts": 40,
            "num_experts_per_tok": 5,
            "decoder_sparse_step": 2,
            "num_hidden_layers": 4,
            "mlp_only_layers": [3],
        },
    ),
}
MORE_FAMILIES |= {
    "gpt_oss": (
        "GptOss",
        {
            "head_dim": 24,
            "intermediate_size": 40,
            "num_local_experts": 5,
            "num_experts_per_tok": 2,
            "sliding_window": 9,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
            "rope_parameters": {**_YARN, "truncate": False, "rope_theta": 150_000.0},
            "swiglu_limit": 0.7,
        },
    )
}
# As GLM-4.6, and with groups of experts, as DeepSeek-V3 has them.
_GLM = {
    "head_dim": 24,
    "n_routed_experts": 6,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "routed_scaling_factor": 2.5,
    "pad_token_id": None,
}
MORE_FAMILIES |= {
    "glm4_moe": ("Glm4Moe", {**_GLM, "use_qk_norm": True}),
    "glm4_moe_groups": (
        "Glm4Moe",
        {
            **_GLM,
            "n_routed_experts": 20,
            "num_experts_per_tok": 5,
            "n_group": 5,
            "topk_group": 2,
            "n_shared_experts": 2,
            "norm_topk_prob": False,
            "attention_bias": True,
            "first_k_dense_replace": 2,
        },
    ),
}
_SECTIONS = {"rope_type": "default", "mrope_section": [5, 4, 3], "mrope_interleaved": True}
MORE_FAMILIES |= {
    "qwen3_vl": ("Qwen3VL", {"head_dim": 24, "rope_parameters": {**_SECTIONS, "rope_theta": 1e4}}),
    "qwen3_vl_moe": (
        "Qwen3VLMoe",
        {**_EXPERTS, "head_dim": 24, "rope_parameters": {**_SECTIONS, "rope_theta": 1e4}},
    ),
}
_SLIDING, _FULL = "sliding_attention", "full_attention"
_GEMMA4 = {
    "head_dim": 24,
    "global_head_dim": 32,
    "num_global_key_value_heads": 1,
    "attention_k_eq_v": True,
    "hidden_size_per_layer_input": 0,
    "sliding_window": 9,
    "layer_types": [_SLIDING, _SLIDING, _FULL],
    "final_logit_softcapping": 5.0,
    "tie_word_embeddings": True,
}
# As 31B, 26B-A4B, E2B, which has keys and values in three layers of seven, and 12B.
MORE_FAMILIES |= {
    "gemma4": ("Gemma4Text", _GEMMA4),
    "gemma4_moe": (
        "Gemma4Text",
        {
            **_GEMMA4,
            "enable_moe_block": True,
            "num_experts": 6,
            "top_k_experts": 2,
            "moe_intermediate_size": 24,
        },
    ),
    "gemma4_small_wrapped": (
        "Gemma4",
        {
            **_GEMMA4,
            "attention_k_eq_v": False,
            "hidden_size_per_layer_input": 8,
            "vocab_size_per_layer_input": 2048,
            "num_hidden_layers": 7,
            "num_kv_shared_layers": 4,
            "use_double_wide_mlp": True,
            "layer_types": [_SLIDING, _FULL, _SLIDING, _SLIDING, _FULL, _SLIDING, _FULL],
        },
    ),
    "gemma4_unified_wrapped": ("Gemma4Unified", {**_GEMMA4, "num_global_key_value_heads": 4}),
}
# Of those with a gated delta net; the second has one value head for each key head, and a width that
# is no multiple of a vector's.
_DELTA_NET = {
    "num_hidden_layers": 4,
    "head_dim": 32,
    "linear_key_head_dim": 24,
    "linear_value_head_dim": 32,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 6,
    "pad_token_id": None,
}
_NARROW = {
    "linear_value_head_dim": 13,
    "linear_num_value_heads": 2,
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    "num_hidden_layers": 3,
}
HYBRID_FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3_5": ("Qwen3_5Text", _DELTA_NET),
    "qwen3_5_narrow": ("Qwen3_5Text", {**_DELTA_NET, **_NARROW, "tie_word_embeddings": True}),
    "qwen3_5_wrapped": ("Qwen3_5", _DELTA_NET),
    "qwen3_5_moe": (
        "Qwen3_5MoeText",
        {**_DELTA_NET, **_EXPERTS, "shared_expert_intermediate_size": 40},
    ),
    "qwen3_5_moe_wrapped": (
        "Qwen3_5Moe",
        {**_DELTA_NET, **_EXPERTS, "shared_expert_intermediate_size": 40},
    ),
}
# Of those whose heads share one latent of each token. Sizes are no multiples of vectors.
_LATENT = {
    "num_key_value_heads": 4,
    "q_lora_rank": 24,
    "kv_lora_rank": 40,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 12,
    "v_head_dim": 20,
}
_MSCALE = {**_YARN, "rope_theta": 1e4, "mscale": 0.7, "mscale_all_dim": 1.1}
LATENT_FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "youtu": ("Youtu", {**_LATENT, "rope_parameters": _MSCALE, "tie_word_embeddings": True}),
    "youtu_direct": (
        "Youtu",
        {
            **_LATENT,
            "q_lora_rank": None,
            "kv_lora_rank": 32,
            "rope_interleave": False,
            "tie_word_embeddings": False,
        },
    ),
    "youtu_biases": ("Youtu", {**_LATENT, "attention_bias": True, "num_hidden_layers": 2}),
}
_LATENT_MOE = {
    **_LATENT,
    "rope_parameters": _MSCALE,
    "n_routed_experts": 6,
    "num_experts_per_tok": 2,
    "n_shared_experts": 1,
    "moe_intermediate_size": 24,
    "routed_scaling_factor": 2.5,
    "pad_token_id": None,
}
_GROUPS = {"n_group": 3, "topk_group": 2, "first_k_dense_replace": 1}
_MISTRAL4 = {
    **_LATENT_MOE,
    **_GROUPS,
    "rope_parameters": {
        **_MSCALE,
        "partial_rotary_factor": 0.4,
        "llama_4_scaling_beta": 0.5,
        "original_max_position_embeddings": 16,
    },
}
# As DeepSeek V2 and V2-Lite, V3, GLM-4.7-Flash and Mistral Small 4.
LATENT_FAMILIES |= {
    "deepseek_v2": (
        "DeepseekV2",
        {
            **_LATENT_MOE,
            **_GROUPS,
            "topk_method": "group_limited_greedy",
            "n_shared_experts": 2,
        },
    ),
    "deepseek_v2_lite": ("DeepseekV2", {**_LATENT_MOE, "q_lora_rank": None, "topk_group": 1}),
    "deepseek_v3": ("DeepseekV3", {**_LATENT_MOE, **_GROUPS}),
    "glm4_moe_lite": ("Glm4MoeLite", {**_LATENT_MOE, "rope_parameters": {"rope_theta": 1e6}}),
    "mistral4": ("Mistral4", _MISTRAL4),
    "mistral4_wrapped": ("Mistral3", {**_MISTRAL4, "model_type": "mistral4"}),
}
ALL_FAMILIES = FAMILIES | MORE_FAMILIES | HYBRID_FAMILIES | LATENT_FAMILIES
# The text models of those with images.
_TEXTS = {
    "Mistral3": "ministral3",
    "Gemma3": "gemma3_text",
    "Gemma4": "gemma4_text",
    "Gemma4Unified": "gemma4_unified_text",
    "Qwen3VL": "qwen3_vl_text",
    "Qwen3VLMoe": "qwen3_vl_moe_text",
    "Qwen3_5": "qwen3_5_text",
    "Qwen3_5Moe": "qwen3_5_moe_text",
}
_QWEN_VISION = {
    **{"hidden_size": 16, "intermediate_size": 16, "depth": 1, "num_heads": 2},
    "out_hidden_size": 64,
}
_VISION = {
    "Gemma4": {**_SMALL_VISION, "num_key_value_heads": 2, "head_dim": 8},
    "Gemma4Unified": {"mm_embed_dim": 16, "mm_posemb_size": 4},
    "Qwen3VL": {**_QWEN_VISION, "deepstack_visual_indexes": [0]},
    "Qwen3VLMoe": {**_QWEN_VISION, "deepstack_visual_indexes": [0]},
    "Qwen3_5": _QWEN_VISION,
    "Qwen3_5Moe": _QWEN_VISION,
}


def make_model(family: str, seed: int = 0, **options: Any) -> Any:
    """transformers' model, in evaluation mode, with random weights, norms and biases included."""
    config = made_config(family, **options)
    model = getattr(transformers, config.architectures[0])(config).eval()
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in model.named_parameters():
        noise = torch.randn(parameter.shape, generator=generator)
        is_factor = "norm" in name or name.endswith("scale")
        parameter.data = 1 + noise / 4 if is_factor else noise / 8
        # These norms add 1 to their weights.
        if family in HYBRID_FAMILIES and "norm" in name and "linear_attn" not in name:
            parameter.data = noise / 4
    for name, buffer in model.named_buffers():
        if name.endswith("layer_scalar"):
            buffer.fill_(float(0.8 + torch.rand(1, generator=generator) / 4))
        if name.endswith("e_score_correction_bias"):
            buffer.copy_(torch.randn(buffer.shape, generator=generator) / 8)
    if family == "gpt_oss":
        for layer in model.model.layers:  # in older versions a constant
            layer.mlp.experts.limit = config.swiglu_limit
    return model


def made_config(family: str, **options: Any) -> Any:
    """transformers' settings of it, with the name of its architecture."""
    name, extra = ALL_FAMILIES[family]
    settings: dict[str, Any] = {
        "vocab_size": 96,
        "hidden_size": 64,
        "intermediate_size": 112,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": MAX_LEN,
        "eos_token_id": 2,
        **extra,
        **options,
    }
    if name in _TEXTS:  # with the smallest of encoders
        settings = {
            "text_config": {"model_type": _TEXTS[name]} | settings,
            "vision_config": _VISION.get(name, _SMALL_VISION),
            "mm_tokens_per_image": 1,
            "tie_word_embeddings": settings.get("tie_word_embeddings", False),
            "architectures": [f"{name}ForConditionalGeneration"],
        }
    else:
        settings["architectures"] = [f"{name.removesuffix('Text')}ForCausalLM"]
    return getattr(transformers, f"{name}Config")(**settings, attn_implementation="eager")


def tiny_configs() -> dict[str, list[ModelConfig]]:
    """What Penstock reads of each tiny model's config.json, by its family."""
    found: dict[str, list[ModelConfig]] = defaultdict(list)
    with tempfile.TemporaryDirectory() as directory:
        for name in ALL_FAMILIES:
            made_config(name).save_pretrained(directory)
            config = ModelConfig.from_dir(Path(directory))
            found[config.family].append(config)
    return found


def save(model: Any, path: Path, **options: Any) -> Path:
    model.save_pretrained(path, **options)
    return path


def engine_config(model_dir: Path, **changes: Any) -> EngineConfig:
    settings: dict[str, Any] = {
        "model": str(model_dir),
        "device": Device.CPU,
        "dtype": Dtype.FLOAT32,
        "block_size": BLOCK_SIZE,
        "kv_cache_memory_bytes": 32 * 2**20,
        "num_threads": 1,
        "scheduler": SchedulerConfig(max_num_seqs=64),
    }
    return EngineConfig(**(settings | changes))


class Harness:
    """A model, its pool and its tables; sequence i owns slot i and every (stride)th block."""

    def __init__(self, model_dir: Path, num_sequences: int = 4, **options: Any) -> None:
        config = ModelConfig.from_dir(model_dir)
        max_len = options.get("max_len", MAX_LEN)
        self.block_size = block_size = options.get("block_size", BLOCK_SIZE)
        blocks_each = max_len // block_size
        num_blocks = num_sequences * blocks_each
        native = options.get("native", False)
        dtype = options.get("dtype", torch.float32)
        self.model: Model
        self.model = llama = LlamaModel(
            config,
            options.get("weights")
            or weight_source(
                LoadFormat.AUTO,
                model_dir,
                config,
                partial(torch.empty, dtype=dtype),
                Phases(),
                make_linear=PlainLinear,
                kept=options.get("kept", AsStored(FORMATS)),
            ),
            options.get(
                "make_linear",
                PlainLinear
                if native
                else cpu_linear(dtype, has_experts=config.experts is not None),
            ),
            max_model_len=max_len,
            device=CPU,
        )
        kv_dtype = options.get("kv_dtype", dtype)
        self.pool: KVPool | KVPools
        self.pool = KVPool(config.kv_shape, num_blocks, block_size, kv_dtype, CPU)
        if any(config.recurrent):
            layout, num_states = config.kv_layout(max_len), 2 * num_sequences
            shape = config.kv_shape
            sizes = (num_blocks, num_states)
            self.pool = KVPools(shape, layout, sizes, block_size, kv_dtype, CPU)
        if native:
            # All formats in one library, which takes less time than one for each.
            formats = frozenset(CODE_FORMATS) if options.get("has_codes", False) else frozenset()
            has_coded_kv = options.get("kv_dtype") is torch.int8
            library = options.get("library") or load_library(dtype, formats, has_coded_kv)
            assert library is not None
            self.model = NativeModel(library, llama, self.pool, options.get("threads", 2))
        self.token_table = torch.zeros(num_sequences, max_len + 1, dtype=torch.int64)
        shuffled = torch.randperm(num_blocks, generator=torch.Generator().manual_seed(7))
        self.block_tables = shuffled.view(num_sequences, blocks_each).to(torch.int32)
        if any(config.recurrent):  # the states of sequences are the first ones
            states = torch.zeros_like(self.block_tables)
            states[:, 0] = torch.arange(num_sequences)
            self.block_tables = torch.stack((self.block_tables, states))

    @torch.inference_mode()
    def run(
        self,
        rows: Iterable[tuple[int, int, int]],
        num_decodes: int = 0,
        adapters: Mapping[int, Any] = MappingProxyType({}),
        snapshots: tuple[StateSnapshot, ...] = (),
        num_drafts: tuple[int, ...] = (),
        prompts: Mapping[int, InsertedPrompt] = MappingProxyType({}),
    ) -> list[Tensor]:
        """rows: (slot, start, number of tokens). adapters: by slot, as the model has made them.
        num_drafts: of these tokens, as of `ModelInput`. prompts: with inserts, by slot. Returns the
        logits of every token, row by row."""
        rows = list(rows)
        slots, starts, counts = zip(*rows, strict=True)
        batch = make_batch(slots, starts, counts, num_decodes=num_decodes, snapshots=snapshots)
        step = build_model_input(batch, self.token_table, self.block_tables, self.block_size)
        runs = tuple(
            AdapterRun(first, count, adapters[slot])
            for slot, first, count in zip(slots, step.query_starts, counts, strict=False)
            if slot in adapters
        )
        every = torch.arange(sum(counts))
        step = replace(step, sample_rows=every, adapters=runs, num_drafts=num_drafts)
        step = replace(step, **of_inserts(step.query_starts, rows, prompts))
        return list(torch.split(self.model(step, self.pool).clone(), list(counts)))


def make_batch(
    slots: tuple[int, ...],
    starts: tuple[int, ...],
    num_tokens: tuple[int, ...],
    *,
    num_decodes: int = 0,
    samples: tuple[bool, ...] | None = None,
    assignments: tuple[SlotAssignment, ...] = (),
    **changes: Any,
) -> ScheduledBatch:
    return ScheduledBatch(
        step=0,
        assignments=assignments,
        table_updates=changes.get("table_updates", ()),
        copies=changes.get("copies", ()),
        slots=slots,
        starts=starts,
        num_tokens=num_tokens,
        samples=samples or (True,) * len(slots),
        num_decodes=num_decodes,
        snapshots=changes.get("snapshots", ()),
    )
