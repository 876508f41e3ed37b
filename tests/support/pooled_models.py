"""Tiny models with heads on pooled states, with random weights, as their makers save them."""

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import save_file
from torch import Tensor, nn

from penstock.scheduler.types import Pooling
from tests.support.encoder_models import make_encoder, states_of
from tests.support.scheduling import make_request
from tests.support.stepping import SteppedEngine
from tests.support.tiny_models import ALL_FAMILIES, made_config, make_model

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
    """Mean pooling, dense layers, of these sizes each to the next, and what normalizes; the first
    layer has a bias."""
    torch.manual_seed(1)
    layers, modules = [], []
    for number, (inputs, outputs) in enumerate(pairwise(sizes)):
        has_bias = number == 0
        layers.append(nn.Linear(inputs, outputs, bias=has_bias))
        function = f"{type(activation).__module__}.{type(activation).__qualname__}"
        sizes_of = {"in_features": inputs, "out_features": outputs, "bias": has_bias}
        modules.append(("Dense", {**sizes_of, "activation_function": function}))
    pooling = {"word_embedding_dimension": sizes[0], "pooling_mode_mean_tokens": True}
    save_modules(path, ("Pooling", pooling), *modules, ("Normalize", {}))
    for number, layer in enumerate(layers, start=2):
        weights = {f"linear.{name}": each.detach() for name, each in layer.named_parameters()}
        save_file(weights, path / f"{number}_Dense" / "model.safetensors")
    return nn.Sequential(*(part for layer in layers for part in (layer, activation)))


def save_embedding_gemma(path: Path, **options: Any) -> tuple[Any, nn.Sequential]:
    model = make_model("gemma3", use_bidirectional_attention=True, **options).model
    model.save_pretrained(path)
    return model, save_dense(path, [64, 128, 64], nn.Identity())


def mean_of(model: Any, layers: nn.Module, ids: list[int]) -> Tensor:
    """The dense layers of the mean of all states."""
    embedding: Tensor = layers(states_of(model, torch.tensor(ids)).mean(0)).detach()
    return embedding


YES, NO = 41, 7


def save_reranker(path: Path, found_by: str, **options: Any) -> tuple[Any, Path]:
    """As Qwen3-Reranker, found by the name that the hub's cache gives it, by the keys of vLLM's
    --hf-overrides, or by sentence-transformers' module. Returns where it is, too."""
    names = ("models--Qwen--Qwen3-Reranker-0.6B", "snapshots", "0123")
    path = path.joinpath(*names) if found_by == "name" else path / "model"
    model = make_model("qwen3", **options)
    model.save_pretrained(path)
    (path / "tokenizer.json").write_text(json.dumps({"model": {"vocab": {"no": NO, "yes": YES}}}))
    if found_by == "keys":
        config = json.loads((path / "config.json").read_text())
        config |= {"architectures": ["Qwen3ForSequenceClassification"]}
        config |= {"classifier_from_token": ["no", "yes"], "is_original_qwen3_reranker": True}
        (path / "config.json").write_text(json.dumps(config))
    elif found_by == "module":
        save_modules(path, ("LogitScore", {"true_token_id": YES, "false_token_id": NO}))
    return model, path


def score_of(model: Any, ids: list[int]) -> Tensor:
    """The logit of yes less that of no, after a text: (1,)."""
    with torch.no_grad():
        logits = model(torch.tensor(ids)[None]).logits[0, -1]
    score: Tensor = (logits[YES] - logits[NO])[None]
    return score


def pooled_by(engine: SteppedEngine, texts: list[list[int]], pooling: Pooling) -> list[Tensor]:
    """What comes of texts, under a scheduler."""
    requests = [make_request("a", ids, max_tokens=0, pooling=pooling) for ids in texts]
    prompts = [outputs[-1].prompt for outputs in engine.run(requests)]
    embeddings = [prompt.embedding for prompt in prompts if prompt is not None]
    assert len(embeddings) == len(texts)
    return [torch.frombuffer(bytearray(each or b""), dtype=torch.float32) for each in embeddings]
