"""Random checkpoints of every family in shapes that nobody trains, each drawn by a seed: groups of
three, five and seven heads, heads of 10 or 24 or 96 dimensions, a hidden size unlike heads times
head size, prime vocabularies, windows smaller than a block, every scaling of rotary positions,
several ids that end an answer, any number of experts.

What is drawn is what transformers computes; where its config classes refuse a draw, that is an
error of this module.
"""

import json
import random
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers

from tests.support.odd_gguf import GGUF_FAMILIES, TYPES, round_matrices, write_odd_gguf
from tests.support.other_decoders import OTHER_DECODERS, architecture_of
from tests.support.tiny_models import made_config

Settings = dict[str, Any]
FULL, SLIDING, LINEAR = "full_attention", "sliding_attention", "linear_attention"
HEAD_DIMS = (8, 10, 16, 20, 24, 40, 48, 64, 80, 96, 128)
PRIMES = (97, 101, 127, 131, 193, 251, 509)
WINDOWS = (1, 2, 3, 5, 9, 15, 17, 33, 70)
BLOCK_SIZES = (3, 4, 5, 8, 16, 16, 16, 32)
WIDTHS = (8, 13, 17, 24, 32, 37, 56, 64, 101, 112, 131)
# The longest sequences that are served; the second has more positions than a piece of attention.
LENGTHS = (384, 384, 384, 768)
FLAT_ROPES = ("default", "default", "linear", "dynamic", "llama3", "yarn", "longrope")
# What computes a model: the compiled step, torch's operators; the first of these in two ranks of
# each layer, in two stages, on weights that are rounded at load, and in bfloat16.
WAYS = ("compiled", "torch", "ranks", "stages", "int8", "fp8", "bfloat16")
_SHARES = (10, 4, 2, 2, 1, 1, 2)
_OF_OTHERS = (1, 0, 0, 0, 0, 0, 0)
# Transformers' dynamic scaling and LongRoPE change with the longest sequence of a step, which its
# classes cannot be served with.
FIXED_ROPES = ("default", "linear", "llama3", "yarn")


@dataclass(frozen=True, slots=True, kw_only=True)
class OddModel:
    """A checkpoint, and how it is served. family: a key of `FAMILIES`. way: one of `WAYS`, or
    "gguf" or "gpu". served: path, or a GGUF file of the same numbers."""

    seed: int
    family: str
    path: Path
    served: Path
    vocab_size: int
    eos_token_ids: tuple[int, ...]
    max_model_len: int
    block_size: int
    way: str


class Draw(random.Random):
    """What a seed draws of one model. length: the longest sequence."""

    length: int

    def flag(self, share: float = 0.5) -> bool:
        return self.random() < share

    def kinds(self, count: int, *kinds: str) -> list[str]:
        return [self.choice(kinds) for _ in range(count)]

    def theta(self) -> float:
        return self.choice((50.0, 1e3, 1e4, 5e5, 1e6))

    def sizes(self, *, has_head_dim: bool = True, divides_hidden: bool = False) -> Settings:
        """Those of every decoder. has_head_dim: whether config.json always says it; else often it
        follows from the hidden size. divides_hidden: whether this must be a multiple of the
        heads."""
        num_kv_heads = self.choice((1, 1, 2, 3))
        num_heads = num_kv_heads * self.choice((1, 2, 3, 5, 7))
        head_dim, hidden = self.choice(HEAD_DIMS), self.choice((20, 32, 45, 48, 56, 64, 72, 100))
        settings: Settings = {}
        if has_head_dim or self.flag(0.4):
            settings["head_dim"] = head_dim
        else:
            head_dim = min(head_dim, 48, 2 * (240 // num_heads))
            hidden = num_heads * head_dim + self.choice((0, num_heads // 2))
        if divides_hidden:
            hidden = num_heads * max(1, round(hidden / num_heads))
        vocab_size = self.choice(PRIMES)
        ends = self.sample(range(vocab_size), self.choice((1, 2, 4)))
        return settings | {
            "num_attention_heads": num_heads,
            "num_key_value_heads": num_kv_heads,
            "hidden_size": hidden,
            "intermediate_size": self.choice(WIDTHS),
            "num_hidden_layers": self.randint(1, 4),
            "vocab_size": vocab_size,
            "tie_word_embeddings": self.flag(),
            "max_position_embeddings": self.length,
            "bos_token_id": None,
            "pad_token_id": None,
            "eos_token_id": ends[0] if len(ends) == 1 else ends,
        }

    def rope(self, head_dim: int, *kinds: str) -> Settings:
        """rope_parameters of a whole head, or of as many dimensions."""
        kind = self.choice(kinds)
        rope: Settings = {"rope_type": kind, "rope_theta": self.theta()}
        trained = self.choice((20, 32, 64, 100))
        factor = self.choice((1.5, 4.0, 8.0, 40.0))
        if kind == "linear":
            rope |= {"factor": factor}
        if kind == "dynamic":
            rope |= {"factor": self.choice((8.0, 16.0))}
        if kind == "proportional":
            rope |= {"partial_rotary_factor": self.choice((0.5, 1.0))}
        if kind == "llama3":
            rope |= {"factor": factor, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
            rope |= {"original_max_position_embeddings": trained}
        if kind == "yarn":
            rope |= {"factor": factor, "original_max_position_embeddings": trained}
            rope |= self._yarn()
        if kind == "longrope":
            trained = self.choice((64, self.length))
            rope |= {"original_max_position_embeddings": trained}
            for name in ("short_factor", "long_factor"):
                rope[name] = [round(1 + 8 * self.random(), 3) for _ in range(head_dim // 2)]
            if self.flag():
                rope |= {"factor": factor}
            if self.flag(0.3):
                rope |= {"attention_factor": 1.2}
        return rope

    def _yarn(self) -> Settings:
        found: Settings = {}
        if self.flag():
            found |= {"beta_fast": self.choice((4.0, 32.0)), "beta_slow": self.choice((0.5, 2.0))}
        if self.flag(0.3):
            found |= {"attention_factor": 0.8}
        elif self.flag():
            found |= {"mscale": self.choice((0.7, 1.0)), "mscale_all_dim": self.choice((0.5, 1.0))}
        return found

    def ropes_by_kind(self, head_dim: int, full_head_dim: int | None = None) -> Settings:
        return {
            FULL: self.rope(full_head_dim or head_dim, *FLAT_ROPES),
            SLIDING: self.rope(head_dim, *FLAT_ROPES),
        }

    def experts(self) -> Settings:
        num_experts = self.choice((2, 3, 5, 7, 13, 40))
        return {
            "num_experts": num_experts,
            "num_experts_per_tok": self.randint(1, min(num_experts, 9)),
            "moe_intermediate_size": self.choice(WIDTHS),
        }


def _head_dim(settings: Settings) -> int:
    found: int = settings.get("head_dim") or (
        settings["hidden_size"] // settings["num_attention_heads"]
    )
    return found


# ---- The families of ours: each gives the settings that differ from those of its tiny model -----


def _with_rope(draw: Draw, settings: Settings, *kinds: str, truncates: bool = True) -> Settings:
    """Adds flat rope_parameters. With dynamic scaling, sequences are longer than what was trained
    on."""
    rope = draw.rope(_head_dim(settings), *(kinds or FLAT_ROPES))
    if rope["rope_type"] == "yarn" and truncates:
        rope["truncate"] = draw.flag()
    if rope["rope_type"] == "dynamic" and draw.flag(0.7):
        settings["max_position_embeddings"] = 128
    return settings | {"rope_parameters": rope}


def _llama(draw: Draw) -> Settings:
    settings = _with_rope(draw, draw.sizes(divides_hidden=True), *FLAT_ROPES, "proportional")
    return settings | {"attention_bias": draw.flag(), "mlp_bias": draw.flag()}


def _mistral(draw: Draw) -> Settings:
    settings = _with_rope(draw, draw.sizes())
    return settings | {"sliding_window": draw.choice((None, *WINDOWS))}


def _qwen2(draw: Draw) -> Settings:
    return _qwen_windows(draw, _with_rope(draw, draw.sizes(has_head_dim=False)))


def _qwen3(draw: Draw) -> Settings:
    settings = _with_rope(draw, draw.sizes()) | {"attention_bias": draw.flag()}
    return _qwen_windows(draw, settings)


def _qwen_windows(draw: Draw, settings: Settings) -> Settings:
    count = settings["num_hidden_layers"]
    settings |= {"use_sliding_window": draw.flag(), "sliding_window": draw.choice(WINDOWS)}
    settings["max_window_layers"] = draw.randint(0, count)
    if settings["use_sliding_window"] and draw.flag():
        settings["layer_types"] = draw.kinds(count, FULL, SLIDING)
    return settings


def _qwen3_moe(draw: Draw) -> Settings:
    settings = _with_rope(draw, draw.sizes()) | draw.experts()
    count = settings["num_hidden_layers"]
    return settings | {
        "norm_topk_prob": draw.flag(),
        "decoder_sparse_step": draw.choice((1, 1, 2)),
        "mlp_only_layers": draw.sample(range(count), draw.choice((0, 0, 1))),
        "attention_bias": draw.flag(),
        "use_sliding_window": draw.flag(0.3),
        "sliding_window": draw.choice(WINDOWS),
    }


def _qwen3_vl(draw: Draw) -> Settings:
    return _with_rope(draw, draw.sizes()) | {"attention_bias": draw.flag()}


def _qwen3_vl_moe(draw: Draw) -> Settings:
    settings = _qwen3_vl(draw) | draw.experts()
    count = settings["num_hidden_layers"]
    return settings | {
        "decoder_sparse_step": draw.choice((1, 1, 2)),
        "mlp_only_layers": draw.sample(range(count), draw.choice((0, 0, 1))),
    }


def _qwen2_moe(draw: Draw) -> Settings:
    settings = _with_rope(draw, draw.sizes(has_head_dim=False)) | draw.experts()
    return _qwen_windows(draw, settings) | {
        "norm_topk_prob": draw.flag(),
        "decoder_sparse_step": draw.choice((1, 1, 2)),
        "shared_expert_intermediate_size": draw.choice(WIDTHS),
        "qkv_bias": draw.flag(),
    }


def _phi3(draw: Draw) -> Settings:
    settings = draw.sizes(has_head_dim=False)
    settings.pop("head_dim", None)
    num_heads = settings["num_attention_heads"]
    settings["hidden_size"] = num_heads * draw.choice((8, 16, 20, 24, 40))
    head_dim = _head_dim(settings)
    share = draw.choice([s for s in (1.0, 0.75, 0.5, 0.25) if int(head_dim * s) % 2 == 0])
    rope = draw.rope(int(head_dim * share), "default", "longrope") | {
        "partial_rotary_factor": share
    }
    trained = rope.get("original_max_position_embeddings", draw.length)
    return settings | {
        "rope_parameters": rope,
        "original_max_position_embeddings": trained,
        "sliding_window": draw.choice((None, *WINDOWS)),
    }


def _smollm3(draw: Draw) -> Settings:
    settings = _with_rope(draw, draw.sizes(has_head_dim=False))
    count = settings["num_hidden_layers"]
    settings |= {
        "no_rope_layers": [int(draw.flag()) for _ in range(count)],
        "attention_bias": draw.flag(),
        "mlp_bias": draw.flag(),
        "use_sliding_window": draw.flag(),
        "sliding_window": draw.choice(WINDOWS),
    }
    if draw.flag(0.3):
        settings["layer_types"] = draw.kinds(count, FULL, SLIDING)
    return settings


def _ministral3(draw: Draw) -> Settings:
    settings = draw.sizes()
    rope = draw.rope(_head_dim(settings), "yarn")
    rope["llama_4_scaling_beta"] = draw.choice((0.0, 0.1, 0.5))
    return settings | {"rope_parameters": rope, "sliding_window": draw.choice((None, *WINDOWS))}


def _granite(draw: Draw) -> Settings:
    settings = _with_rope(draw, draw.sizes(has_head_dim=False))
    return settings | {
        "attention_bias": draw.flag(),
        "mlp_bias": draw.flag(),
        "embedding_multiplier": draw.choice((1.0, 3.0, 12.0)),
        "residual_multiplier": draw.choice((0.22, 0.5, 1.0)),
        "attention_multiplier": draw.choice((0.015625, 0.1, 0.3)),
        "logits_scaling": draw.choice((0.5, 1.0, 8.0)),
    }


def _olmo2(draw: Draw) -> Settings:
    settings = _with_rope(draw, draw.sizes(has_head_dim=False))
    return settings | {"attention_bias": draw.flag()}


def _olmo3(draw: Draw) -> Settings:
    settings = draw.sizes(has_head_dim=False)
    return settings | {
        "attention_bias": draw.flag(),
        "sliding_window": draw.choice(WINDOWS),
        "layer_types": draw.kinds(settings["num_hidden_layers"], FULL, SLIDING),
        "rope_parameters": draw.ropes_by_kind(_head_dim(settings)),
    }


def _seed_oss(draw: Draw) -> Settings:
    biases = {name: draw.flag() for name in ("attention_bias", "attention_out_bias", "mlp_bias")}
    return _with_rope(draw, draw.sizes()) | biases


def _cwm(draw: Draw) -> Settings:
    settings = _with_rope(draw, draw.sizes(divides_hidden=True))
    return settings | {
        "mlp_bias": draw.flag(),
        "sliding_window": draw.choice(WINDOWS),
        "layer_types": draw.kinds(settings["num_hidden_layers"], FULL, SLIDING),
        "bos_token_id": 1,
    }


def _exaone4(draw: Draw) -> Settings:
    settings = _with_rope(draw, draw.sizes(has_head_dim=False))
    count = settings["num_hidden_layers"]
    if draw.flag(0.25):
        return settings | {"sliding_window": None, "layer_types": [FULL] * count}
    settings |= {"sliding_window": draw.choice(WINDOWS)}
    if draw.flag():
        return settings | {"layer_types": draw.kinds(count, FULL, SLIDING)}
    return settings | {"layer_types": None, "sliding_window_pattern": draw.choice((1, 2, 3))}


def _gemma3(draw: Draw) -> Settings:
    settings = draw.sizes(divides_hidden=True)
    return settings | {
        "attention_bias": draw.flag(),
        "query_pre_attn_scalar": draw.choice((1, 24, 40, 256)),
        "sliding_window": draw.choice(WINDOWS),
        "layer_types": draw.kinds(settings["num_hidden_layers"], FULL, SLIDING),
        "rope_parameters": draw.ropes_by_kind(settings["head_dim"]),
        "final_logit_softcapping": draw.choice((None, 2.0, 30.0)),
    }


def _gemma3_wrapped(draw: Draw) -> Settings:
    # Transformers caps the logits of the text model alone.
    return _gemma3(draw) | {"final_logit_softcapping": None}


def _gpt_oss(draw: Draw) -> Settings:
    settings = _with_rope(draw, draw.sizes())
    experts = draw.experts()
    return settings | {
        "attention_bias": draw.flag(),
        "sliding_window": draw.choice(WINDOWS),
        "layer_types": draw.kinds(settings["num_hidden_layers"], FULL, SLIDING),
        "intermediate_size": experts["moe_intermediate_size"],
        "num_local_experts": experts["num_experts"],
        "num_experts_per_tok": experts["num_experts_per_tok"],
        "swiglu_limit": draw.choice((0.7, 7.0)),
    }


def _gemma4(draw: Draw) -> Settings:
    settings = draw.sizes()
    count = draw.randint(1, 6)
    kinds = [*draw.kinds(count - 1, FULL, SLIDING), FULL]
    num_heads, full_dim = settings["num_attention_heads"], draw.choice(HEAD_DIMS)
    divisors = [n for n in range(1, num_heads + 1) if num_heads % n == 0]
    full_rope: Settings = {
        "rope_type": "proportional",
        "rope_theta": draw.theta(),
        "partial_rotary_factor": draw.choice((0.25, 0.3, 0.5, 1.0)),
    }
    inputs = draw.choice((0, 0, 8, 13))
    shared = [  # transformers' class needs inputs of each layer for them
        n
        for n in range(count if inputs else 1)
        if set(kinds[count - n :]) <= set(kinds[: count - n]) == set(kinds)
    ]
    return settings | {
        "num_hidden_layers": count,
        "layer_types": kinds,
        "global_head_dim": full_dim,
        "num_global_key_value_heads": draw.choice((None, *divisors)),
        "attention_k_eq_v": draw.flag(),
        "attention_bias": draw.flag(),
        "hidden_size_per_layer_input": inputs,
        "vocab_size_per_layer_input": settings["vocab_size"],
        "num_kv_shared_layers": draw.choice(shared or [0]),
        "use_double_wide_mlp": draw.flag(),
        "sliding_window": draw.choice(WINDOWS),
        "final_logit_softcapping": draw.choice((None, 2.0, 30.0)),
        "pad_token_id": 0,
        "rope_parameters": {
            # The others ask for one head size of all layers.
            FULL: draw.choice((full_rope, draw.rope(full_dim, "default", "linear", "llama3"))),
            SLIDING: draw.rope(settings["head_dim"], "default", "linear", "llama3"),
        },
    }


def _gemma4_unified(draw: Draw) -> Settings:
    return _gemma4(draw) | {"hidden_size_per_layer_input": 0, "num_kv_shared_layers": 0}


def _gemma4_moe(draw: Draw) -> Settings:
    experts = draw.experts()
    return _gemma4(draw) | {
        "enable_moe_block": True,
        "num_experts": experts["num_experts"],
        "top_k_experts": experts["num_experts_per_tok"],
        "moe_intermediate_size": experts["moe_intermediate_size"],
    }


def _qwen3_5(draw: Draw) -> Settings:
    settings = draw.sizes()
    head_dim, num_keys = settings["head_dim"], draw.choice((1, 2, 3))
    count = draw.randint(2, 5)
    kinds = [*draw.kinds(count - 1, FULL, LINEAR, LINEAR), FULL]
    draw.shuffle(kinds)
    share = draw.choice([s for s in (0.25, 0.5, 1.0) if int(head_dim * s) % 2 == 0])
    rope = draw.rope(int(head_dim * share), "default", "default", "linear", "llama3", "yarn")
    return settings | {
        "attention_bias": draw.flag(),
        "num_hidden_layers": count,
        "layer_types": kinds,
        "rope_parameters": rope | {"partial_rotary_factor": share},
        "linear_key_head_dim": draw.choice((4, 6, 16, 24)),
        "linear_value_head_dim": draw.choice((5, 8, 13, 32)),
        "linear_num_key_heads": num_keys,
        "linear_num_value_heads": num_keys * draw.choice((1, 2, 3)),
        "linear_conv_kernel_dim": draw.choice((2, 3, 4, 5)),
    }


def _qwen3_5_moe(draw: Draw) -> Settings:
    shared = {"shared_expert_intermediate_size": draw.choice(WIDTHS)}
    return _qwen3_5(draw) | draw.experts() | shared


def _glm4_moe(draw: Draw) -> Settings:
    settings = draw.sizes()
    settings["head_dim"] = draw.choice((8, 16, 20, 24, 40))
    rope = {"rope_type": "default", "rope_theta": draw.theta(), "partial_rotary_factor": 0.5}
    flags = {name: draw.flag() for name in ("attention_bias", "use_qk_norm")}
    experts = _grouped_experts(draw, settings["num_hidden_layers"])
    return settings | flags | experts | {"rope_parameters": rope}


def _youtu(draw: Draw) -> Settings:
    settings = draw.sizes(divides_hidden=True)
    del settings["head_dim"]
    settings["num_key_value_heads"] = settings["num_attention_heads"]
    settings |= _latent_attention(draw)
    # Without the first product of queries, biases are refused.
    return settings | {"attention_bias": settings["q_lora_rank"] is not None and draw.flag()}


def _deepseek_v3(draw: Draw) -> Settings:
    settings = _youtu(draw)
    return settings | _grouped_experts(draw, settings["num_hidden_layers"])


def _deepseek_v2(draw: Draw) -> Settings:
    settings = _deepseek_v3(draw)
    del settings["rope_interleave"]
    settings["kv_lora_rank"] += settings["kv_lora_rank"] % 2  # behind it are complex numbers
    methods = ("greedy", "group_limited_greedy")
    return settings | {"topk_method": draw.choice(methods), "norm_topk_prob": False}


def _glm4_moe_lite(draw: Draw) -> Settings:
    settings = _deepseek_v3(draw)
    del settings["first_k_dense_replace"]
    kinds = draw.kinds(settings["num_hidden_layers"], "dense", "sparse")
    return settings | {"mlp_layer_types": kinds}


def _mistral4(draw: Draw) -> Settings:
    settings = _deepseek_v3(draw)
    rotary, rest = settings["qk_rope_head_dim"], settings["qk_nope_head_dim"]
    rope = draw.rope(rotary, "yarn") | {
        "partial_rotary_factor": rotary / (rotary + rest),
        "llama_4_scaling_beta": draw.choice((0.0, 0.1, 0.5)),
    }
    return settings | {"rope_parameters": rope}


# By the name of a tiny model (`tests.support.tiny_models`), of which the rest is as it is there.
_OURS: dict[str, Callable[[Draw], Settings]] = {
    "llama2": _llama,
    "mistral_window": _mistral,
    "qwen2": _qwen2,
    "qwen3": _qwen3,
    "qwen2_moe": _qwen2_moe,
    "qwen3_moe": _qwen3_moe,
    "qwen3_vl": _qwen3_vl,
    "qwen3_vl_moe": _qwen3_vl_moe,
    "phi4_mini": _phi3,
    "smollm3": _smollm3,
    "ministral3": _ministral3,
    "ministral3_wrapped": _ministral3,
    "mistral_small_wrapped": _mistral,
    "granite": _granite,
    "olmo2": _olmo2,
    "olmo3": _olmo3,
    "seed_oss": _seed_oss,
    "cwm": _cwm,
    "exaone4": _exaone4,
    "gemma3": _gemma3,
    "gemma3_wrapped": _gemma3_wrapped,
    "gpt_oss": _gpt_oss,
    "gemma4": _gemma4,
    "gemma4_moe": _gemma4_moe,
    "gemma4_small_wrapped": _gemma4,
    "gemma4_unified_wrapped": _gemma4_unified,
    "qwen3_5": _qwen3_5,
    "qwen3_5_wrapped": _qwen3_5,
    "qwen3_5_moe": _qwen3_5_moe,
    "qwen3_5_moe_wrapped": _qwen3_5_moe,
    "glm4_moe": _glm4_moe,
    "youtu": _youtu,
    "deepseek_v2": _deepseek_v2,
    "deepseek_v3": _deepseek_v3,
    "glm4_moe_lite": _glm4_moe_lite,
    "mistral4": _mistral4,
    "mistral4_wrapped": _mistral4,
}


# ---- Decoders without a row among the families, by model_type -----------------------------------

# Classes that have no fewer heads for keys and values.
_ALL_HEADS = frozenset({"gpt_neox", "gpt2", "gpt_bigcode", "opt"})
# With a scaling of their own, or none.
_WITHOUT_ROPE = frozenset({"gpt2", "gpt_bigcode", "opt", "phimoe"})
# Of a head's dimensions a share is rotated, which has to be even.
_PARTIAL = frozenset({"phi", "glm", "glm4", "nemotron", "stablelm", "gpt_neox"})


def _other(draw: Draw, model_type: str) -> Settings:
    extra = OTHER_DECODERS[model_type][2]
    settings = draw.sizes()
    num_heads = settings["num_attention_heads"]
    if model_type in _ALL_HEADS:
        settings["num_key_value_heads"] = num_heads
    settings["head_dim"] = draw.choice((16, 24, 40) if model_type in _PARTIAL else HEAD_DIMS)
    if "head_dim" not in extra:
        settings["head_dim"] = min(settings["head_dim"], 40)
        settings["hidden_size"] = num_heads * settings["head_dim"]
    elif model_type == "helium":
        settings["hidden_size"] = num_heads * settings["head_dim"]
    elif model_type == "gemma2":  # which checks it
        settings["hidden_size"] = num_heads * draw.choice((5, 8, 13))
    count, settings["pad_token_id"] = settings["num_hidden_layers"], 0
    if "layer_types" in extra:
        settings["layer_types"] = draw.kinds(count, FULL, SLIDING)
    if "sliding_window" in extra:
        settings["sliding_window"] = draw.choice(WINDOWS)
    if model_type not in _WITHOUT_ROPE | _PARTIAL:
        settings["rope_parameters"] = draw.rope(_head_dim(settings), *FIXED_ROPES)
    if "num_experts_per_tok" in extra:
        settings |= _other_experts(draw, extra)
    if model_type in ("gpt2", "gpt_bigcode"):
        own = ("vocab_size", "eos_token_id", "bos_token_id", "pad_token_id", "tie_word_embeddings")
        names = {"hidden_size": "n_embd", "num_attention_heads": "n_head"}
        names |= {"num_hidden_layers": "n_layer", "max_position_embeddings": "n_positions"}
        renamed = {new: settings[old] for old, new in names.items()}
        return {name: settings[name] for name in own} | renamed
    if model_type == "opt":
        settings |= {"ffn_dim": settings["intermediate_size"]}
        settings |= {"word_embed_proj_dim": settings["hidden_size"]}
    return settings


def _other_experts(draw: Draw, extra: Settings) -> Settings:
    drawn = draw.experts()
    name = "num_experts" if "num_experts" in extra else "num_local_experts"
    return {name: drawn.pop("num_experts")} | {k: v for k, v in drawn.items() if k in extra}


def _grouped_experts(draw: Draw, num_layers: int) -> Settings:
    groups, each = draw.choice((1, 2, 3, 4)), draw.choice((2, 3, 5))
    used = draw.randint(1, groups)
    return {
        "n_routed_experts": groups * each,
        "n_group": groups,
        "topk_group": used,
        "num_experts_per_tok": draw.randint(1, used * each),
        "moe_intermediate_size": draw.choice(WIDTHS),
        "n_shared_experts": draw.choice((1, 2)),
        "first_k_dense_replace": draw.randint(0, num_layers),
        "routed_scaling_factor": draw.choice((1.0, 2.5)),
        "norm_topk_prob": draw.flag(),
    }


def _latent_attention(draw: Draw) -> Settings:
    rotary = draw.choice((2, 4, 8, 10))
    rope = draw.rope(rotary, "default", "yarn", "yarn")
    return {
        "q_lora_rank": draw.choice((None, 13, 24)),
        "kv_lora_rank": draw.choice((7, 16, 20)),
        "qk_rope_head_dim": rotary,
        "qk_nope_head_dim": draw.choice((6, 16, 24)),
        "v_head_dim": draw.choice((5, 12, 24)),
        "rope_interleave": draw.flag(),
        "rope_parameters": rope,
    }


# ---- All of them --------------------------------------------------------------------------------

FAMILIES = (*_OURS, *sorted(OTHER_DECODERS.keys() - _OURS.keys()))


def family_of(seed: int, families: tuple[str, ...] = FAMILIES) -> str:
    """So many seeds in a row as there are families have each of them once."""
    turn, place = divmod(seed, len(families))
    return random.Random(turn).sample(families, len(families))[place]


def _as_gguf_says_it(family: str, settings: Settings) -> Settings:
    settings = GGUF_FAMILIES[family](settings)
    ends = settings["eos_token_id"]
    return settings | {"eos_token_id": ends[0] if isinstance(ends, list) else ends}


def write_odd(seed: int, path: Path, family: str | None = None, way: str | None = None) -> OddModel:
    """Writes the checkpoint of a seed into a directory. family, way: what is not drawn."""
    draw = Draw(seed)
    draw.length = draw.choice(LENGTHS)
    path.mkdir(parents=True, exist_ok=True)
    family = family or family_of(seed, tuple(GGUF_FAMILIES) if way == "gguf" else FAMILIES)
    if family in _OURS:
        settings = _OURS[family](draw)
        if way == "gguf":
            settings = _as_gguf_says_it(family, settings)
            settings["max_position_embeddings"] = draw.length
        config = made_config(family, **settings)
    else:
        settings = _other(draw, family)
        _, prefix, extra = OTHER_DECODERS[family]
        config = getattr(transformers, f"{prefix}Config")(
            **{**extra, **settings}, attn_implementation="eager"
        )
        config.architectures = [architecture_of(family)]
    model = getattr(transformers, config.architectures[0])(config).eval()
    randomize(model, seed)
    served, ends = path, settings["eos_token_id"]
    if way == "gguf":
        kind = draw.choice(TYPES)
        round_matrices(model, kind)
        served = write_odd_gguf(model, path, kind, ends)
    model.save_pretrained(path)
    if family in _OURS and not family.endswith("_wrapped") and draw.flag(0.3):
        _write_older(path)
    if draw.flag(0.3) and way != "gguf":  # generation_config.json has the last word
        ends = draw.sample(range(settings["vocab_size"]), 2)
        (path / "generation_config.json").write_text(json.dumps({"eos_token_id": ends}))
    return OddModel(
        seed=seed,
        family=family,
        path=path,
        served=served,
        vocab_size=settings["vocab_size"],
        eos_token_ids=tuple(ends) if isinstance(ends, list) else (ends,),
        max_model_len=48 if way == "gpu" else draw.length,
        block_size=draw.choice(BLOCK_SIZES),
        way=way or draw.choices(WAYS, _SHARES if family in _OURS else _OF_OTHERS)[0],
    )


def randomize(model: Any, seed: int) -> None:
    """Random weights, norms and biases included, of which no part of the model has too little
    effect to be seen."""
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in model.named_parameters():
        noise = torch.randn(parameter.shape, generator=generator)
        if parameter.dim() > 1 and min(parameter.shape) > 0:
            parameter.data = noise / parameter.shape[-1] ** 0.5
        elif name.endswith("bias") or "A_log" in name:
            parameter.data = noise / 4
        elif "norm" in name or "ln_" in name or name.endswith(("scale", "weight")):
            parameter.data = 1 + noise / 4
        else:
            parameter.data = noise / 2
    for name, buffer in model.named_buffers():
        noise = torch.randn(buffer.shape, generator=generator)
        if name.endswith("layer_scalar"):
            buffer.copy_(0.9 + noise / 16)
        elif name.endswith("e_score_correction_bias"):
            buffer.copy_(noise / 8)


def _write_older(path: Path) -> None:
    """As before transformers 5: rope_theta and rope_scaling in place of flat rope_parameters."""
    config = json.loads((path / "config.json").read_text())
    rope = config.get("rope_parameters")
    if not rope or any(isinstance(value, dict) for value in rope.values()):
        return
    del config["rope_parameters"]
    config["rope_theta"] = rope.pop("rope_theta")
    if "partial_rotary_factor" in rope:
        config["partial_rotary_factor"] = rope.pop("partial_rotary_factor")
    rope["type"] = rope.pop("rope_type")
    if rope["type"] != "default":
        config["rope_scaling"] = rope
    (path / "config.json").write_text(json.dumps(config))
