"""An adapter's adapter_config.json: which layers it changes, by what rank and with which factor.

What would change the answer and is not computed is refused by name. So is a setting that is not
known here: a later PEFT may mean by it another product than B(Ax).
"""

import math
import re
from collections.abc import Iterable, Iterator
from pathlib import Path

from penstock.engine.config import ADAPTER_FILES
from penstock.engine.errors import AdapterRefused
from penstock.engine.files.json_file import Fields, shown
from penstock.engine.models.lora.patterns import Matches, match

CONFIG = ADAPTER_FILES[0]

# These are not computed; an error calls them so.
_UNSUPPORTED = {
    "use_dora": "DoRA",
    "lora_bias": "biases of LoRA layers",
    "modules_to_save": "whole modules besides its low-rank layers",
    "fan_in_fan_out": "transposed weights",
    "trainable_token_indices": "changed token embeddings",
    "target_parameters": "layers of single parameters, as of experts",
    "layer_replication": "replicated layers",
    "alora_invocation_tokens": "invocation tokens (aLoRA)",
    "use_qalora": "QA-LoRA",
    "use_bdlora": "block-diagonal LoRA",
    "kasa_config": "KaSA",
    "monteclora_config": "MonteCLoRA",
    "arrow_config": "a router over adapters (Arrow)",
    "megatron_config": "layers of Megatron",
}
# How it was trained, or where it came from; without effect on what it computes.
_WITHOUT_EFFECT = (
    *("auto_mapping", "base_model_name_or_path", "revision", "task_type", "inference_mode"),
    *("lora_dropout", "init_lora_weights", "peft_version", "megatron_core", "loftq_config"),
    *("eva_config", "corda_config", "lora_ga_config", "qalora_group_size", "runtime_config"),
    *("ensure_weight_tying", "velora_config"),
)
# Initial values for which the base model's own weights were changed, too.
_CHANGES_BASE = ("pissa", "olora", "corda", "loftq", "lora_ga")
# `target_modules` says so for all linear layers but the output layer.
_ALL_LINEAR = "all-linear"
_MAX_ALPHA = 1e30

_Wanted = frozenset[str] | str  # names, or a pattern


class PeftConfig:
    """Names of modules are those of the base model, such as "model.layers.0.self_attn.q_proj"."""

    def __init__(self, directory: Path, max_rank: int) -> None:
        """Raises PenstockError."""
        self._fields = fields = Fields.read(directory / CONFIG)
        self._max_rank = max_rank
        for reason in _unsupported(fields):
            raise AdapterRefused(f"{fields.path}: {reason}")
        self._targets = _names_or_pattern(fields, "target_modules")
        self._excluded = _names_or_pattern(fields, "exclude_modules")
        self._layers = _layers(fields)
        layers = fields.get("layers_pattern")
        layers = [layers] if isinstance(layers, str) else fields.names("layers_pattern") or []
        self._layer_patterns = [rf"(?:^|.*?\.){each}\.(\d+)\." for each in layers]
        self._rank = fields.count("r")
        self._alpha = fields.number("lora_alpha", 8)
        self._ranks, self._alphas = fields.mapping("rank_pattern"), fields.mapping("alpha_pattern")
        self._is_rslora = fields.flag("use_rslora")
        for name in _WITHOUT_EFFECT:
            fields.get(name)
        if unknown := fields.unread():
            raise AdapterRefused(
                f"{fields.path}: {', '.join(unknown)[:500]} is not known here, and may change "
                "what the adapter computes; merge the adapter into its base model"
            )

    def match(self, names: list[str]) -> None:
        """Tries the patterns on all names that anything is asked of. Raises AdapterRefused."""
        self._matches: dict[str, Matches] = {}
        for field, method, patterns in (
            ("target_modules", "fullmatch", _pattern(self._targets)),
            ("exclude_modules", "fullmatch", _pattern(self._excluded)),
            ("layers_pattern", "match", self._layer_patterns),
            # Source: get_pattern_key of PEFT's utils.
            ("rank_pattern", "match", [rf"(.*\.)?({each})$" for each in self._ranks]),
            ("alpha_pattern", "match", [rf"(.*\.)?({each})$" for each in self._alphas]),
        ):
            try:
                self._matches[field] = match(method, patterns, names)
            except ValueError as error:
                raise AdapterRefused(
                    f"{self._fields.path}: {field} {error}; write the layers' names instead"
                ) from None

    def applies_to(self, name: str) -> bool:
        """Whether it changes this linear layer. Source: check_target_module_exists of PEFT's
        tuners_utils."""
        if self._is_named("exclude_modules", self._excluded, name):
            return False
        if self._targets == _ALL_LINEAR:
            return True
        if not self._is_named("target_modules", self._targets, name):
            return False
        if self._layers is None or isinstance(self._targets, str):
            return True
        _, index = self._matches["layers_pattern"].get(name, (0, None))
        if not self._layer_patterns and (found := re.match(r".*?\.[^.]*\.(\d+)\.", name)):
            index = found[1]
        return index is not None and index.isdecimal() and int(index) in self._layers

    def _is_named(self, field: str, wanted: _Wanted, name: str) -> bool:
        if isinstance(wanted, str):
            return name in self._matches[field]
        parts = name.split(".")
        return any(".".join(parts[start:]) in wanted for start in range(len(parts)))

    def rank(self, name: str) -> int:
        """Raises AdapterRefused where it is more than it may be."""
        rank = self._by_pattern("rank_pattern", self._ranks, name, self._rank)
        if not isinstance(rank, int) or rank < 1:
            raise self._fields.wrong("rank_pattern", "positive integers by name", self._ranks)
        if rank > self._max_rank:
            raise AdapterRefused(
                f"{self._fields.path}: {name} has rank {rank}, and --max-lora-rank is "
                f"{self._max_rank}; start the server with --max-lora-rank {rank}"
            )
        return rank

    def scale(self, name: str) -> float:
        """Returns the factor of B(Ax)."""
        alpha = self._by_pattern("alpha_pattern", self._alphas, name, self._alpha)
        if not isinstance(alpha, int | float) or not abs(alpha) <= _MAX_ALPHA:
            raise self._fields.wrong("alpha_pattern", "numbers by name", self._alphas)
        rank = self.rank(name)
        return alpha / math.sqrt(rank) if self._is_rslora else alpha / rank

    def _by_pattern(
        self, field: str, by_pattern: dict[str, object], name: str, default: object
    ) -> object:
        found = self._matches[field].get(name)
        return list(by_pattern.values())[found[0]] if found else default


def _unsupported(fields: Fields) -> Iterator[str]:
    """Yields what is set that is not computed, and what to do."""
    if (kind := fields.text("peft_type")) != "LORA":
        yield f"peft_type is {shown(kind)}, and only LORA is supported"
    for name, what in _UNSUPPORTED.items():
        if fields.get(name):
            yield (
                f"{name} means {what}, which is not supported; merge the adapter into its base "
                "model, or train one without"
            )
    if (bias := fields.get("bias", "none")) != "none":
        yield (
            f"bias is {shown(bias)}, and trained biases are not supported; merge the adapter into "
            "its base model, or train one with bias 'none'"
        )
    init = fields.get("init_lora_weights")
    if isinstance(init, str) and init.lower().startswith(_CHANGES_BASE):
        yield (
            f"init_lora_weights is {shown(init)}, for which the base model's own weights were "
            "changed; convert it with PEFT's path_initial_model_for_weight_conversion"
        )


def _names_or_pattern(fields: Fields, name: str) -> _Wanted:
    value = fields.get(name)
    return value if isinstance(value, str) else frozenset(fields.names(name) or ())


def _pattern(wanted: _Wanted) -> list[str]:
    return [wanted] if isinstance(wanted, str) and wanted != _ALL_LINEAR else []


def _layers(fields: Fields) -> frozenset[int] | None:
    """None for all."""
    value = fields.get("layers_to_transform")
    indices: Iterable[object] = (value,) if isinstance(value, int) else value or ()
    if not isinstance(value, int | list | None) or not all(isinstance(i, int) for i in indices):
        raise fields.wrong("layers_to_transform", "a number or a list of them", value)
    return frozenset(i for i in indices if isinstance(i, int)) or None
