"""Everything that a start reads of a model's files, in this process and without a server; and
checkpoints of every kind of file that there is.

What takes seconds and depends on no file is left out: the measurements of the machine.
"""

import base64
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import sentencepiece
import torch
from gguf import GGMLQuantizationType as Type
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from penstock.engine.client import open_model
from penstock.engine.executors.cuda.device import Processor
from penstock.engine.hub.check import find_implementation
from penstock.engine.loading.cpu import CpuLoading
from penstock.engine.loading.fallback import FallbackLoading
from penstock.engine.models.config import ModelConfig
from penstock.engine.process.phases import Phases
from penstock.server.config import PoolerConfig
from penstock.server.output.pooling import Pooler
from penstock.server.prompt.tokenizer import GenerationDefaults, PromptEncoder
from tests.support.gguf_files import quantized, write_gguf
from tests.support.other_decoders import make_other
from tests.support.paths import ROOT
from tests.support.quantized_checkpoints import FORMATS, save_quantized
from tests.support.tiny_models import engine_config, make_model, save

TEMPLATE = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"


def start(model: Path) -> None:
    """Raises PenstockError for what cannot be served, and nothing else."""
    config = engine_config(model)
    directory = open_model(config).directory
    GenerationDefaults.load(directory)
    Pooler.load(directory, PoolerConfig())
    encoder = PromptEncoder.load(directory, None)
    encoder.encode("A house by the sea, 1984")
    is_ours = isinstance(find_implementation(directory), ModelConfig)
    loading = (CpuLoading if is_ours else FallbackLoading)(
        config, directory, None, Processor(), Phases()
    )
    with torch.inference_mode():
        loading.plan()
        loading.read(None)


def write_tokenizer(directory: Path, **settings: Any) -> Path:
    """Of single bytes, with a chat template unless `settings` have another."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(directory / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", **settings}
    (directory / "tokenizer_config.json").write_text(json.dumps(settings))
    return directory


def _single(path: Path) -> Path:
    save(make_model("llama3.2_tied", vocab_size=256), path)
    write_tokenizer(path)
    (path / "chat_template.jinja").write_text(TEMPLATE)
    more = path / "additional_chat_templates"
    more.mkdir()
    (more / "tool_use.jinja").write_text("{{ tools | tojson }}" + TEMPLATE)
    return path


def _sharded(path: Path) -> Path:
    save(make_model("qwen3_moe", vocab_size=256), path, max_shard_size="100KB")
    return write_tokenizer(path, chat_template=[{"name": "default", "template": TEMPLATE}])


def _hybrid(path: Path) -> Path:
    return write_tokenizer(save(make_model("qwen3_5_wrapped", vocab_size=256), path))


def _stacked(path: Path) -> Path:
    return write_tokenizer(save(make_model("gpt_oss", vocab_size=256), path))


def _coded(name: str) -> Callable[[Path], Path]:
    def write(path: Path) -> Path:
        model = make_model("llama2", vocab_size=256, intermediate_size=128)
        save_quantized(model, path, FORMATS[name])
        return write_tokenizer(path)

    return write


def _of_transformers(path: Path) -> Path:
    """A class of transformers computes it, and has stacked the experts that the file has apart."""
    return write_tokenizer(save(make_other("olmoe"), path))


def _gguf(path: Path) -> Path:
    model = make_model("llama2", vocab_size=256, hidden_size=256, intermediate_size=256)
    return write_gguf(path / "model.gguf", model, quantized(Type.Q4_K))


def _gguf_parts(path: Path) -> Path:
    return write_gguf(path / "m.gguf", make_model("qwen2", vocab_size=256), num_parts=2)


def _sentence_piece(path: Path) -> Path:
    """tokenizer.model alone, and no settings of it."""
    save(make_model("llama2", vocab_size=400), path)
    sentencepiece.SentencePieceTrainer.train(
        input=ROOT / "CONTRIBUTING.md",
        model_prefix=path / "tokenizer",
        vocab_size=400,
        model_type="bpe",
        byte_fallback=True,
        remove_extra_whitespaces=False,
        normalization_rule_name="identity",
        minloglevel=2,
    )
    (path / "tokenizer.vocab").unlink()
    return path


def _tekken(path: Path) -> Path:
    """Every byte is a token, and a few words are."""
    save(make_model("mistral_no_window", vocab_size=300), path)
    words = [bytes([byte]) for byte in range(256)] + [b"th", b"he", b"the"]
    content = {
        "config": {"pattern": r"\p{L}+|\P{L}", "default_num_special_tokens": 10},
        "vocab": [
            {"rank": rank, "token_bytes": base64.b64encode(word).decode()}
            for rank, word in enumerate(words)
        ],
        "special_tokens": [
            {"rank": rank, "token_str": text} for rank, text in enumerate(("<unk>", "<s>", "</s>"))
        ],
    }
    (path / "tekken.json").write_text(json.dumps(content))
    return path


# By name: writes a checkpoint into an empty directory, and returns what is served of it.
CHECKPOINTS: dict[str, Callable[[Path], Path]] = {
    "single": _single,
    "sharded": _sharded,
    "stacked": _stacked,
    "hybrid": _hybrid,
    "fp8": _coded("fp8-block"),
    "gptq": _coded("gptq4"),
    "awq": _coded("awq"),
    "compressed": _coded("ct-w4a16"),
    "transformers": _of_transformers,
    "gguf": _gguf,
    "gguf-parts": _gguf_parts,
    "sentencepiece": _sentence_piece,
    "tekken": _tekken,
}
