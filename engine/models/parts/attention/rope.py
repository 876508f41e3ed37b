"""`RopeConfig`: rotary positions, and how config.json describes them. Imports no tensors."""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from penstock.engine.files.json_file import Fields, is_number, shown, shown_json
from penstock.engine.models.errors import InvalidModel

_MAX_POSITIONS = 2**31 - 1
# This is Llama's; a family with another has it among its defaults.
_THETA = 10_000.0
# The kinds of layers that may each have settings of their own.
_LAYER_KINDS = frozenset({"full_attention", "sliding_attention"})
# Neutral values within rope_parameters and rope_scaling, null aside; a family that reads the key
# computes it.
_NEUTRAL: Mapping[str, float] = {
    "partial_rotary_factor": 1,
    "llama_4_scaling_beta": 0,
    "extrapolation_factor": 1,
    "attn_factor": 1,
}
# Transformers ignores these, or repeats them from elsewhere; the last two are about positions of an
# image's tokens, in families that have such.
_HARMLESS = frozenset(
    {
        *("finetuned", "max_position_embeddings", "rope_local_base_freq", *_NEUTRAL),
        *("mrope_section", "mrope_interleaved"),
    }
)


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeConfig:
    """Rotary position embedding: the base, and how its frequencies are scaled.

    kind `default` uses theta alone. `linear` divides every frequency by factor. `llama3` divides
    only the low ones, with a ramp between the two wavelengths that low_freq_factor and
    high_freq_factor set. `yarn` uses a ramp over the dimensions instead (its ends are integers if
    truncate), and multiplies cosines and sines by attention_factor. `longrope` divides each
    frequency by its own of `divisors`, or of `long_divisors`, if there are any, where sequences may
    be longer than original_max_positions. `dynamic` raises theta where sequences may be longer than
    that, up to factor times. `proportional` rotates a share of the pairs of
    dimensions, the first ones, by the frequencies that they have where all are rotated.

    sections: where an image's tokens have positions of frame, row and column: of how many pairs of
    dimensions each of the three is the position. They take turns, and the frame has the rest.
    """

    theta: float
    kind: str = "default"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 1.0
    original_max_positions: int = 0
    attention_factor: float = 1.0
    truncate: bool = True
    divisors: tuple[float, ...] = ()
    long_divisors: tuple[float, ...] = ()
    share: float = 1.0
    sections: tuple[int, int, int] | None = None

    @property
    def longest(self) -> int:
        """The longest sequence that it is made for, where that is not max_position_embeddings."""
        return int(self.original_max_positions * self.factor) if self.kind == "dynamic" else 0

    def depends_on(self, max_model_len: int) -> bool:
        """Whether it rotates otherwise if sequences may be so long."""
        is_changing = self.kind == "dynamic" or bool(self.long_divisors)
        return is_changing and max_model_len > self.original_max_positions


class RopeSettings:
    """Holds config.json's settings of rotary positions: `rope_parameters` (transformers 5), or
    `rope_theta` and `rope_scaling` (before)."""

    def __init__(self, fields: Fields, kinds: Mapping[str, str] | None = None) -> None:
        """kinds: other names of kinds of scaling that the family has. Raises InvalidModel."""
        self._fields, self._kinds = fields, kinds or {}
        self._key, self._content = "rope_scaling", fields.mapping("rope_scaling")
        if newer := fields.mapping("rope_parameters"):
            kind = newer.get("rope_type") or newer.get("type")
            same = {**newer, "rope_type": kind, "type": kind}
            if any(same.get(name) != value for name, value in self._content.items()):
                raise InvalidModel(
                    f"{fields.path} has rope_scaling and other rope_parameters; say in "
                    "rope_parameters what is wanted, with rope_theta, and delete rope_scaling"
                )
            self._key, self._content = "rope_parameters", newer
        self._theta = fields.number("rope_theta", _THETA)
        fields.get("original_max_position_embeddings")
        self._is_by_kind = any(isinstance(value, dict) for value in self._content.values())

    def for_all_layers(self, rotary_dim: int) -> RopeConfig:
        """rotary_dim: how many dimensions of a head are rotated."""
        if self._is_by_kind:
            raise InvalidModel(
                f"{self._fields.path} has rotary positions that differ between layers, which is "
                "not supported for this architecture; use a model with one rope_parameters for "
                "all layers"
            )
        return self._read(self._section(self._content), self._theta, rotary_dim)

    def by_kind(self, kind: str, rotary_dim: int, local_theta: float) -> RopeConfig:
        """Reads a family whose sliding layers have a base of their own, and never a scaling.

        local_theta: that base, where rope_parameters have none.
        """
        local_theta = self._fields.number("rope_local_base_freq", local_theta)
        if not self._is_by_kind:
            if kind == "sliding_attention":
                return RopeConfig(theta=local_theta)
            if self._content and self._key == "rope_parameters":
                kinds = " and ".join(sorted(_LAYER_KINDS))
                raise self._fields.wrong(
                    "rope_parameters", f"an object with one for {kinds}", self._content
                )
            return self._read(self._section(self._content), self._theta, rotary_dim)
        if unknown := set(self._content) - _LAYER_KINDS:
            raise InvalidModel(
                f"{self._fields.path}: {self._key} has {shown(min(unknown))}; only "
                f"{' and '.join(sorted(_LAYER_KINDS))} are supported"
            )
        content = self._content.get(kind) or {}
        if not isinstance(content, dict):
            raise self._fields.wrong(self._key, "an object of objects", self._content)
        theta = local_theta if kind == "sliding_attention" else self._theta
        return self._read(self._section(content, kind), theta, rotary_dim)

    def share_of_head(self, default: float = 1.0) -> float:
        """Returns which share of a head's dimensions is rotated: the first. `proportional` has the
        key for another share, that of pairs among all."""
        scaling = self._section(self._content)
        if self._kind(scaling) == "proportional":
            return 1.0
        return scaling.number(
            "partial_rotary_factor", self._fields.number("partial_rotary_factor", default)
        )

    def query_scaling(self) -> tuple[float, int] | None:
        """Llama 4's, as (beta, length): a query at position p is multiplied by 1 + beta * log(1 +
        floor(p / length)). None where there is none."""
        scaling = self._section(self._content)
        if not scaling.get("llama_4_scaling_beta"):
            return None
        return (
            scaling.number("llama_4_scaling_beta"),
            scaling.count("original_max_position_embeddings"),
        )

    def sections(self, default: tuple[int, int, int]) -> tuple[int, int, int]:
        """See `RopeConfig`. default: where config.json does not say it."""
        scaling = self._section(self._content)
        given = scaling.get("mrope_section")
        if given is None:
            return default
        if (
            not isinstance(given, list)
            or len(given) != 3
            or not all(type(each) is int and 0 <= each <= _MAX_POSITIONS for each in given)
        ):
            raise scaling.wrong("mrope_section", "three numbers of pairs of dimensions", given)
        frame, row, column = given
        return frame, row, column

    def score_factor(self) -> float:
        """DeepSeek's factor of attention's scores, beside that of cosines and sines."""
        scaling = self._section(self._content)
        if not scaling.get("mscale_all_dim"):
            return 1.0
        growth = 0.1 * math.log(max(scaling.number("factor"), 1.0))
        return (1 + scaling.number("mscale_all_dim") * growth) ** 2

    def _section(self, content: dict[str, Any], kind: str = "") -> Fields:
        return Fields(f"{self._fields.path}: {self._key}{kind and '.'}{kind}", content)

    def _kind(self, scaling: Fields) -> str:
        older = scaling.text("type")  # transformers writes both
        given = scaling.text("rope_type") or older or "default"
        return self._kinds.get(given, given)

    def _read(self, scaling: Fields, theta: float, rotary_dim: int) -> RopeConfig:
        theta = scaling.number("rope_theta", theta)
        if theta <= 1:  # the frequencies would not fall
            raise InvalidModel(
                f"{self._fields.path}: 'rope_theta' must be more than 1, not {theta:g}"
            )
        kind = self._kind(scaling)
        if kind not in _KINDS:
            raise InvalidModel(
                f"{self._fields.path} has {shown(kind)} rope scaling; supported are "
                f"{', '.join(map(repr, _KINDS))}"
            )
        rope = _KINDS[kind](self._fields, theta, scaling, rotary_dim)
        for name in scaling.unread():
            if name not in _HARMLESS:
                raise InvalidModel(
                    f"{self._fields.path} has rotary positions with {name}: "
                    f"{shown_json(scaling.get(name))}, which is not understood and may change what "
                    "the model computes; delete the key if the model was trained without it"
                )
        return rope


def check_neutral(fields: Fields, reads: frozenset[str]) -> None:
    """Refuses what a family does not compute. reads: what it does."""
    for key in ("rope_scaling", "rope_parameters"):
        scaling = fields.mapping(key)
        for name, neutral in _NEUTRAL.items():
            value = scaling.get(name)
            if name not in reads and value is not None and not is_number(value, neutral):
                raise InvalidModel(
                    f"{fields.path} has rotary positions with {name}: {shown_json(value)}, which "
                    f"is not supported; only {json.dumps(neutral)} is"
                )


def longest_sequence(fields: Fields, rope: RopeConfig) -> int:
    """With YaRN, max_position_embeddings is mostly still the length that was trained on."""
    trained = fields.count("max_position_embeddings")
    if rope.kind != "yarn":
        return trained
    longest = rope.original_max_positions * rope.factor
    if longest > _MAX_POSITIONS:
        raise InvalidModel(
            f"{fields.path} has yarn rope scaling to {longest:.3g} positions; at most "
            f"{_MAX_POSITIONS:,} are supported: lower its factor"
        )
    return max(trained, int(longest))


def _default(fields: Fields, theta: float, scaling: Fields, rotary_dim: int) -> RopeConfig:
    for name in ("factor", "original_max_position_embeddings"):  # without an effect
        scaling.get(name)
    return RopeConfig(theta=theta)


def _linear(fields: Fields, theta: float, scaling: Fields, rotary_dim: int) -> RopeConfig:
    scaling.get("original_max_position_embeddings")
    return RopeConfig(theta=theta, kind="linear", factor=scaling.number("factor"))


def _fixed_ntk(fields: Fields, theta: float, scaling: Fields, rotary_dim: int) -> RopeConfig:
    """Source: Su 2023 (https://kexue.fm/archives/9706), for positions of any sequence."""
    factor = scaling.number("factor")
    share = factor ** (2 / rotary_dim)
    return RopeConfig(theta=theta * factor, kind="linear", factor=share)


def _dynamic(fields: Fields, theta: float, scaling: Fields, rotary_dim: int) -> RopeConfig:
    """Source: bloc97 and emozilla's NTK-aware scaling, as transformers has it."""
    trained = fields.count("max_position_embeddings")
    scaling.get("original_max_position_embeddings")
    factor = scaling.number("factor")
    if rotary_dim < 4 or not 1 <= factor * trained <= _MAX_POSITIONS:
        raise scaling.wrong("factor", f"a number that gives 1 to {_MAX_POSITIONS:,} tokens", factor)
    return RopeConfig(theta=theta, kind="dynamic", factor=factor, original_max_positions=trained)


def _llama3(fields: Fields, theta: float, scaling: Fields, rotary_dim: int) -> RopeConfig:
    low, high = scaling.number("low_freq_factor"), scaling.number("high_freq_factor")
    if high <= low:
        raise InvalidModel(
            f"{scaling.path}: 'high_freq_factor' ({high:g}) must be more than "
            f"'low_freq_factor' ({low:g})"
        )
    return RopeConfig(
        theta=theta,
        kind="llama3",
        factor=scaling.number("factor"),
        low_freq_factor=low,
        high_freq_factor=high,
        original_max_positions=_trained_length(fields, scaling),
    )


def _trained_length(fields: Fields, scaling: Fields) -> int:
    """The number of positions before scaling. Like transformers, prefers what config.json has
    beside the scaling to what is in it."""
    longest = fields.count("max_position_embeddings")
    own = scaling.count("original_max_position_embeddings", default=longest)
    return fields.count("original_max_position_embeddings", default=own)


def _yarn(fields: Fields, theta: float, scaling: Fields, rotary_dim: int) -> RopeConfig:
    """The defaults are those of transformers and of Peng et al. 2023 (arXiv:2309.00071)."""
    factor = scaling.number("factor")
    mscale, mscale_all_dim = 1.0, 0.0
    if scaling.get("mscale") and scaling.get("mscale_all_dim"):
        mscale, mscale_all_dim = scaling.number("mscale"), scaling.number("mscale_all_dim")
    scaling.get("mscale_all_dim")
    growth = 0.1 * math.log(max(factor, 1.0))
    return RopeConfig(
        theta=theta,
        kind="yarn",
        factor=factor,
        low_freq_factor=scaling.number("beta_slow", 1.0) if scaling.get("beta_slow") else 1.0,
        high_freq_factor=scaling.number("beta_fast", 32.0) if scaling.get("beta_fast") else 32.0,
        original_max_positions=_trained_length(fields, scaling),
        attention_factor=scaling.number(
            "attention_factor", (1 + mscale * growth) / (1 + mscale_all_dim * growth)
        ),
        truncate=scaling.flag("truncate", default=True),
    )


def _longrope(fields: Fields, theta: float, scaling: Fields, rotary_dim: int) -> RopeConfig:
    """Ding et al. 2024 (arXiv:2402.13753), with the defaults of transformers."""
    short, long = (
        _divisors(scaling, name, rotary_dim // 2) for name in ("short_factor", "long_factor")
    )
    longest = fields.count("max_position_embeddings")
    trained = _trained_length(fields, scaling)
    factor = scaling.number("factor", longest / trained)
    # For lengths of 1 there is no such logarithm; nobody has trained on them.
    growth = math.log(max(factor, 1.0)) / math.log(max(trained, 2))
    return RopeConfig(
        theta=theta,
        kind="longrope",
        divisors=short,
        long_divisors=() if long == short else long,
        original_max_positions=0 if long == short else trained,
        attention_factor=scaling.number("attention_factor", math.sqrt(1 + growth)),
    )


def _proportional(fields: Fields, theta: float, scaling: Fields, rotary_dim: int) -> RopeConfig:
    beside = fields.number("partial_rotary_factor", 1.0)
    share = scaling.number("partial_rotary_factor", beside)
    if share > 1:
        raise scaling.wrong("partial_rotary_factor", "at most 1", share)
    factor = scaling.number("factor", 1.0)
    return RopeConfig(theta=theta, kind="proportional", factor=factor, share=share)


def _divisors(scaling: Fields, name: str, count: int) -> tuple[float, ...]:
    factors = scaling.get(name)
    if (
        not isinstance(factors, list)
        or len(factors) != count
        or not all(type(each) in (int, float) and 1e-6 < each < 1e6 for each in factors)
    ):
        raise scaling.wrong(name, f"{count} positive numbers", factors)
    return tuple(map(float, factors))


_KINDS = {
    "default": _default,
    "linear": _linear,
    "fixed_ntk": _fixed_ntk,
    "dynamic": _dynamic,
    "llama3": _llama3,
    "yarn": _yarn,
    "longrope": _longrope,
    "proportional": _proportional,
}
