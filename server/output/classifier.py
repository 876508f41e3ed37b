"""What clients read of a classifier's logits: probabilities of labels, or a reranker's score."""

import math
from array import array
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from penstock.engine.client import ModelInfo, read_model_object


@dataclass(frozen=True, slots=True)
class Classifier:
    labels: tuple[str, ...]
    activation: Callable[["array[float]"], list[float]]

    @classmethod
    def load(cls, directory: Path, info: ModelInfo) -> Self | None:
        """None for a model that is none. The activation is that of transformers' pipeline, but for
        a score that sentence-transformers, and so vLLM, leave as it is."""
        if not info.labels:
            return None
        config = read_model_object(directory / "config.json")
        of_texts = read_model_object(directory / "config_sentence_transformers.json")
        settings = config.get("sentence_transformers") or of_texts
        named = settings.get("activation_fn") if isinstance(settings, dict) else None
        named = named or config.get("sbert_ce_default_activation_function")
        is_score = len(info.labels) == 1
        if info.problem_type == "regression" or (is_score and str(named).endswith(".Identity")):
            return cls(info.labels, list)
        has_several = info.problem_type == "multi_label_classification"
        return cls(info.labels, _sigmoid if is_score or has_several else _softmax)

    def values(self, state: bytes, *, activates: bool = True) -> list[float]:
        """state: pooled, float32. activates: False for the logits themselves."""
        logits = array("f", state)
        return self.activation(logits) if activates else list(logits)


def _sigmoid(logits: "array[float]") -> list[float]:
    return [(1 + math.tanh(logit / 2)) / 2 for logit in logits]  # exp would overflow


def _softmax(logits: "array[float]") -> list[float]:
    high = max(logits)
    weights = [math.exp(logit - high) for logit in logits]
    total = math.fsum(weights)
    return [weight / total for weight in weights]
