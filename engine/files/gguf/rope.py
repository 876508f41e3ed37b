"""Rotary positions in a GGUF file's metadata and tensors, as config.json's `rope_parameters`."""

import math
from typing import Any

from penstock.engine.errors import InvalidModel
from penstock.engine.files.gguf.keys import Keys

FULL, SLIDING = "full_attention", "sliding_attention"
_DIVISORS = "rope_freqs.weight"
_SHORT, _LONG = "rope_factors_short.weight", "rope_factors_long.weight"
ROPE_TENSORS = (_DIVISORS, _SHORT, _LONG)
# A frequency divided by so much rotates nothing.
_STILL = 1e20


def rope(keys: Keys) -> dict[str, Any]:
    """Returns those of models whose layers all rotate alike."""

    def given(key: str) -> Any:
        return keys.get(f"rope.scaling.{key}")

    kind, factor = given("type"), given("factor")
    if kind is None and keys.get("rope.scale_linear") not in (None, 1.0):  # of older files
        kind, factor = "linear", keys.get("rope.scale_linear")
    found: dict[str, Any] = {"rope_type": kind, "rope_theta": keys.get("rope.freq_base")}
    if keys.has(_SHORT) or keys.has(_LONG):
        return found | {
            "rope_type": "longrope",
            "short_factor": keys.numbers(_SHORT),
            "long_factor": keys.numbers(_LONG),
            "attention_factor": given("attn_factor"),
            "original_max_position_embeddings": given("original_context_length"),
        }
    if given("attn_factor") not in (None, 1.0):
        raise InvalidModel(
            f"{keys.gguf.path} has {keys.architecture}.rope.scaling.attn_factor, which is not "
            "supported"
        )
    if kind in (None, "none"):
        found["rope_type"] = "default"
    else:
        found["factor"] = factor
    if kind == "yarn":
        found |= _yarn(keys)
    return found | _divisors(keys, found["rope_type"])


def ropes_by_kind(keys: Keys, local_theta: float | None = None) -> dict[str, Any]:
    """Returns those of models whose layers with a window have another base, and never a scaling.
    local_theta: that base, where the file has none; None for that of all layers."""
    if local_theta is None:
        local_theta = keys.get("rope.freq_base")
    local = {"rope_type": "default", "rope_theta": keys.get("rope.freq_base_swa", local_theta)}
    return {FULL: rope(keys), SLIDING: local}


def proportional(keys: Keys) -> dict[str, Any]:
    """Returns those of Gemma 4's layers without a window, in which some pairs of a head's
    dimensions, the first, are rotated: the frequencies of the others are divided by 1e30."""
    divisors = keys.numbers(_DIVISORS)
    num, half = divisors.count(1.0), len(divisors)
    if divisors[:num] != [1.0] * num or not all(each > _STILL for each in divisors[num:]):
        raise keys.wrong(f"{_DIVISORS} other than ones, and then numbers that stop a rotation")
    return {
        "rope_type": "proportional",
        "partial_rotary_factor": share_of(num, half),
        "rope_theta": keys.get("rope.freq_base"),
    }


def share_of(number: int, whole: int) -> float:
    """The quotient, or the number above it where it is rounded so that the product is less."""
    share = number / whole
    return share if int(share * whole) == number else math.nextafter(share, 1.0)


def _yarn(keys: Keys) -> dict[str, Any]:
    def given(key: str) -> Any:
        return keys.get(f"rope.scaling.{key}")

    multiplier = given("yarn_log_multiplier")
    return {
        "original_max_position_embeddings": given("original_context_length"),
        "beta_fast": given("yarn_beta_fast"),
        "beta_slow": given("yarn_beta_slow"),
        "attention_factor": given("yarn_attn_factor"),
        # As llama.cpp, which has no place for the other.
        **({"mscale": 1.0, "mscale_all_dim": multiplier} if multiplier else {}),
    }


def _divisors(keys: Keys, kind: str) -> dict[str, Any]:
    """Llama 3's scaling, as what each frequency is divided by; empty for a file without it."""
    if not keys.has(_DIVISORS):
        return {}
    if kind != "default":
        raise InvalidModel(
            f"{keys.gguf.path} has both {_DIVISORS} and {kind!r:.40} rope scaling, which is not "
            "supported together"
        )
    # In transformers' words, LongRoPE with the same factors for all lengths.
    factors = keys.numbers(_DIVISORS)
    return {
        "rope_type": "longrope",
        "short_factor": factors,
        "long_factor": factors,
        "attention_factor": 1.0,
    }
