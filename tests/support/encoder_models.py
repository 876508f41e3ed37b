"""Tiny encoders of text with random weights, as transformers saves them."""

from pathlib import Path
from typing import Any

import torch
import transformers
from tokenizers import Tokenizer
from tokenizers.processors import TemplateProcessing
from torch import Tensor

from tests.support.starts import write_tokenizer

_SIZES = {
    "vocab_size": 97,
    "hidden_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "intermediate_size": 80,
}
# The family's name in transformers' classes, and its settings.
ENCODERS: dict[str, tuple[str, dict[str, Any]]] = {
    "bert": ("Bert", {"max_position_embeddings": 64}),
    "roberta": (
        "Roberta",
        {"max_position_embeddings": 66, "type_vocab_size": 1, "pad_token_id": 1},
    ),
    "xlm-roberta": (
        "XLMRoberta",
        {"max_position_embeddings": 66, "type_vocab_size": 1, "pad_token_id": 1},
    ),
    "modernbert": (
        "ModernBert",
        {
            "max_position_embeddings": 64,
            "local_attention": 8,
            **dict.fromkeys(("pad_token_id", "bos_token_id", "cls_token_id"), 1),
            **dict.fromkeys(("eos_token_id", "sep_token_id"), 2),
        },
    ),
    "nomic_bert": ("NomicBert", {"max_position_embeddings": 64}),
    "gte": ("Gte", {"max_position_embeddings": 64, "pad_token_id": 0}),
}


def make_encoder(family: str, head: str = "Model", seed: int = 0, **options: Any) -> Any:
    """head: the end of its class, such as ForSequenceClassification."""
    name, settings = ENCODERS[family]
    torch.manual_seed(seed)
    config = getattr(transformers, f"{name}Config")(**{**_SIZES, **settings, **options})
    model = getattr(transformers, f"{name}{head}")(config).eval()
    with torch.no_grad():  # norms and biases are made as ones and zeros
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.05)
    return model


def states_of(model: Any, ids: Tensor) -> Tensor:
    """The last layer's states of one text: (T, hidden_size)."""
    with torch.no_grad():
        states: Tensor = model(ids[None], attention_mask=torch.ones_like(ids[None]))[0][0]
    return states


def save_encoder(family: str, path: Path, **options: Any) -> Any:
    model = make_encoder(family, **options)
    model.save_pretrained(path)
    return model


def write_encoder_tokenizer(directory: Path, *, segments: bool = True) -> Tokenizer:
    """Of single bytes, with ids below 258, and with the special tokens of BERT, or of RoBERTa,
    which tells a model of no segments."""
    names = ["input_ids", *["token_type_ids"][: int(segments)], "attention_mask"]
    tokens = {"cls_token": "[CLS]", "sep_token": "[SEP]"}
    write_tokenizer(directory, **tokens, model_max_length=64, model_input_names=names)
    path = str(directory / "tokenizer.json")
    tokenizer = Tokenizer.from_file(path)
    tokenizer.add_special_tokens(["[CLS]", "[SEP]"])
    tokenizer.post_processor = TemplateProcessing(
        single="[CLS] $A [SEP]",
        pair="[CLS] $A [SEP] $B:1 [SEP]:1" if segments else "[CLS] $A [SEP] [SEP] $B [SEP]",
        special_tokens=[(each, tokenizer.token_to_id(each)) for each in ("[CLS]", "[SEP]")],
    )
    tokenizer.save(path)
    return tokenizer
