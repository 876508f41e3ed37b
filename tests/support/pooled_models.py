"""Tiny models with heads on pooled states, with random weights, as their makers save them."""

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import save_file
from torch import Tensor, nn

from tests.support.encoder_models import make_encoder
from tests.support.tiny_models import ALL_FAMILIES, made_config

LABELS = {0: "no", 1: "perhaps", 2: "yes"}
# Classifiers, by what they are called here: the family, and settings.
ENCODERS: dict[str, tuple[str, dict[str, Any]]] = {
    "bert": ("bert", {}),
    "roberta": ("roberta", {}),
    "xlm-roberta": ("xlm-roberta", {}),
    "modernbert": ("modernbert", {"classifier_pooling": "cls"}),
    "modernbert_mean": (
        "modernbert",
        {"classifier_pooling": "mean", "classifier_bias": True, "norm_bias": True},
    ),
    "nomic_bert": ("nomic_bert", {}),
    "gte": ("gte", {}),
}
DECODERS = ("llama2", "mistral_window", "qwen2", "qwen3", "gemma3")


def make_classifier(name: str, **options: Any) -> Any:
    """transformers' model."""
    labels: dict[str, Any] = {
        "id2label": LABELS,
        "label2id": {label: i for i, label in LABELS.items()},
    }
    if name in ENCODERS:
        family, own = ENCODERS[name]
        return make_encoder(family, "ForSequenceClassification", **labels, **own, **options)
    torch.manual_seed(0)
    config = made_config(name, **labels, pad_token_id=0, **options)
    model = getattr(transformers, f"{ALL_FAMILIES[name][0]}ForSequenceClassification")(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.05)
    return model.eval()


def logits_of(model: Any, ids: list[int], num_first: int = 0) -> Tensor:
    """num_first: of the tokens, those of the first text; 0: all."""
    types = {}
    if num_first:
        types["token_type_ids"] = (torch.arange(len(ids)) >= num_first).long()[None]
    with torch.no_grad():
        given = torch.tensor(ids)[None]
        logits: Tensor = model(given, attention_mask=torch.ones_like(given), **types).logits[0]
    return logits


def save_modules(path: Path, *modules: tuple[str, dict[str, Any]]) -> None:
    """Writes modules.json and their settings: the class of each, and its config.json."""
    listed = [
        {"idx": 0, "name": "0", "path": "", "type": "sentence_transformers.models.Transformer"}
    ]
    for index, (kind, config) in enumerate(modules, start=1):
        name = f"{index}_{kind}"
        (path / name).mkdir()
        (path / name / "config.json").write_text(json.dumps(config))
        kind = f"sentence_transformers.models.{kind}"
        listed.append({"idx": index, "name": str(index), "path": name, "type": kind})
    (path / "modules.json").write_text(json.dumps(listed))


def save_dense(path: Path, sizes: list[int], activation: nn.Module) -> nn.Sequential:
    """Mean pooling and dense layers, of these sizes each to the next; the first has a bias."""
    torch.manual_seed(1)
    layers, modules = [], []
    for number, (inputs, outputs) in enumerate(pairwise(sizes)):
        has_bias = number == 0
        layers.append(nn.Linear(inputs, outputs, bias=has_bias))
        function = f"{type(activation).__module__}.{type(activation).__qualname__}"
        sizes_of = {"in_features": inputs, "out_features": outputs, "bias": has_bias}
        modules.append(("Dense", {**sizes_of, "activation_function": function}))
    pooling = {"word_embedding_dimension": sizes[0], "pooling_mode_mean_tokens": True}
    save_modules(path, ("Pooling", pooling), *modules)
    for number, layer in enumerate(layers, start=2):
        weights = {f"linear.{name}": each.detach() for name, each in layer.named_parameters()}
        save_file(weights, path / f"{number}_Dense" / "model.safetensors")
    return nn.Sequential(*(part for layer in layers for part in (layer, activation)))
