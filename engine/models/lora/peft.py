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
from penstock.engine.files.json_file import Fields

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
        pattern = fields.get("layers_pattern") or ()
        self._layer_patterns = (pattern,) if isinstance(pattern, str) else tuple(pattern)
        self._rank = fields.count("r")
        self._alpha = fields.number("lora_alpha", 8)
        self._ranks, self._alphas = fields.mapping("rank_pattern"), fields.mapping("alpha_pattern")
        self._is_rslora = fields.flag("use_rslora")
        for name in _WITHOUT_EFFECT:
            fields.get(name)
        if unknown := fields.unread():
            raise AdapterRefused(
                f"{fields.path}: {', '.join(unknown)} is not known here, and may change what the "
                "adapter computes; merge the adapter into its base model"
            )

    def applies_to(self, name: str) -> bool:
        """Whether it changes this linear layer.

        Source: check_target_module_exists of PEFT's tuners_utils.
        """
        if self._excluded is not None and _matches(self._excluded, name):
            return False
        if self._targets == _ALL_LINEAR:
            return True
        if self._targets is None or not _matches(self._targets, name):
            return False
        if self._layers is None or isinstance(self._targets, str):
            return True
        patterns = [rf"(?:^|.*?\.){each}\.(\d+)\." for each in self._layer_patterns]
        found = (re.match(each, name) for each in patterns or [r".*?\.[^.]*\.(\d+)\."])
        index = next((match[1] for match in found if match), None)
        return index is not None and int(index) in self._layers

    def rank(self, name: str) -> int:
        """Raises AdapterRefused where it is more than it may be."""
        rank = self._by_pattern(self._ranks, name, self._rank)
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
        alpha = self._by_pattern(self._alphas, name, self._alpha)
        if not isinstance(alpha, int | float) or not math.isfinite(alpha):
            raise self._fields.wrong("alpha_pattern", "numbers by name", self._alphas)
        rank = self.rank(name)
        return alpha / math.sqrt(rank) if self._is_rslora else alpha / rank

    @staticmethod
    def _by_pattern(by_pattern: dict[str, object], name: str, default: object) -> object:
        """Source: get_pattern_key of PEFT's utils."""
        for pattern, value in by_pattern.items():
            if re.match(rf"(.*\.)?({pattern})$", name):
                return value
        return default


def _unsupported(fields: Fields) -> Iterator[str]:
    """Yields what is set that is not computed, and what to do."""
    if (kind := fields.text("peft_type")) != "LORA":
        yield f"peft_type is {kind!r}, and only LORA is supported"
    for name, what in _UNSUPPORTED.items():
        if fields.get(name):
            yield (
                f"{name} means {what}, which is not supported; merge the adapter into its base "
                "model, or train one without"
            )
    if (bias := fields.get("bias", "none")) != "none":
        yield (
            f"bias is {bias!r}, and trained biases are not supported; merge the adapter into its "
            "base model, or train one with bias 'none'"
        )
    init = fields.get("init_lora_weights")
    if isinstance(init, str) and init.lower().startswith(_CHANGES_BASE):
        yield (
            f"init_lora_weights is {init!r}, for which the base model's own weights were changed; "
            "convert it with PEFT's path_initial_model_for_weight_conversion"
        )


def _names_or_pattern(fields: Fields, name: str) -> tuple[str, ...] | str | None:
    value = fields.get(name)
    if isinstance(value, str):
        return value
    names = fields.names(name)
    return None if names is None else tuple(names)


def _matches(wanted: tuple[str, ...] | str, name: str) -> bool:
    if isinstance(wanted, str):
        return re.fullmatch(wanted, name) is not None
    return any(name == each or name.endswith(f".{each}") for each in wanted)


def _layers(fields: Fields) -> frozenset[int] | None:
    """None for all."""
    value = fields.get("layers_to_transform")
    indices: Iterable[object] = (value,) if isinstance(value, int) else value or ()
    if not isinstance(value, int | list | None) or not all(isinstance(i, int) for i in indices):
        raise fields.wrong("layers_to_transform", "a number or a list of them", value)
    return frozenset(i for i in indices if isinstance(i, int)) or None
