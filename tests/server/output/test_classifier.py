"""What clients read of logits, by what a model's directory says."""

import json
import math
from dataclasses import replace
from pathlib import Path
from struct import pack
from typing import Any

import pytest
import torch

from penstock.engine.executors.scripted import scripted_info
from penstock.server.output.classifier import Classifier

LOGITS = [3.0, -800.0, 0.5]
IDENTITY = "torch.nn.modules.linear.Identity"


def classifier_of(directory: Path, num_labels: int, problem: str | None = None) -> Classifier:
    labels = tuple(f"LABEL_{index}" for index in range(num_labels))
    made = Classifier.load(directory, replace(scripted_info(), labels=labels, problem_type=problem))
    assert made
    return made


def values(classifier: Classifier, *logits: float, **options: Any) -> list[float]:
    return classifier.values(pack(f"<{len(logits)}f", *logits), **options)


@pytest.mark.parametrize(
    ("problem", "expected"),
    [
        (None, torch.tensor(LOGITS).softmax(0)),
        ("single_label_classification", torch.tensor(LOGITS).softmax(0)),
        ("multi_label_classification", torch.tensor(LOGITS).sigmoid()),
        ("regression", torch.tensor(LOGITS)),
    ],
)
def test_the_activation_is_that_of_transformers_pipeline(
    tmp_path: Path, problem: str | None, expected: torch.Tensor
) -> None:
    classifier = classifier_of(tmp_path, 3, problem)
    assert values(classifier, *LOGITS) == pytest.approx(expected.tolist(), abs=1e-6)
    assert values(classifier, *LOGITS, activates=False) == LOGITS


@pytest.mark.parametrize(
    ("file", "config"),
    [
        ("config.json", {"sentence_transformers": {"activation_fn": IDENTITY}}),
        ("config.json", {"sbert_ce_default_activation_function": IDENTITY}),
        ("config_sentence_transformers.json", {"activation_fn": IDENTITY}),
        ("config.json", {}),
        ("config.json", {"sentence_transformers": 7}),
    ],
)
def test_a_score_is_a_sigmoid_unless_the_directory_names_none(
    tmp_path: Path, file: str, config: dict[str, Any]
) -> None:
    (tmp_path / file).write_text(json.dumps(config))
    is_identity = IDENTITY in json.dumps(config)
    expected = 2.0 if is_identity else 1 / (1 + math.exp(-2))
    assert values(classifier_of(tmp_path, 1), 2.0) == [pytest.approx(expected)]
    assert sum(values(classifier_of(tmp_path, 3), *LOGITS)) == pytest.approx(1)


def test_other_models_classify_nothing(tmp_path: Path) -> None:
    assert Classifier.load(tmp_path, scripted_info()) is None
