"""Random weights in the shapes of small models that people serve on CPUs, and their conversions.

Quantized checkpoints are compressed-tensors': vLLM for CPUs quantizes no model when it loads it.
Its kernels for 8 bits, and those that zentorch brings for 8 and 4 bits, take this format.

Speed depends on the shape and not on the values, so that no download is needed. The tokenizer is
the demo model's, with made-up words up to the vocabulary's size.
"""

import itertools
import json
import os
import shutil
import string
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.support.paths import DEMO_MODEL
from tests.support.quantized_checkpoints import (
    FORMATS,
    QuantizedFormat,
    compressed,
    pack_quantized,
)

_DEVIATION = 0.02  # of weights, as training starts with
_COMMON: dict[str, Any] = {
    "dtype": "bfloat16",
    "hidden_act": "silu",
    "initializer_range": _DEVIATION,
    "tie_word_embeddings": True,
    "bos_token_id": None,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
SHAPES: dict[str, dict[str, Any]] = {
    # SmolLM-135M's, with a longer context.
    "135m": _COMMON
    | {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": 49152,
        "hidden_size": 576,
        "intermediate_size": 1536,
        "num_hidden_layers": 30,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "head_dim": 64,
        "max_position_embeddings": 8192,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
    },
    # Qwen2.5-0.5B's.
    "500m": _COMMON
    | {
        "architectures": ["Qwen2ForCausalLM"],
        "model_type": "qwen2",
        "vocab_size": 151936,
        "hidden_size": 896,
        "intermediate_size": 4864,
        "num_hidden_layers": 24,
        "num_attention_heads": 14,
        "num_key_value_heads": 2,
        "max_position_embeddings": 8192,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1e6,
        "use_sliding_window": False,
    },
    # The layers of Qwen3.5-0.8B, three of four with a gated delta net, and a smaller vocabulary.
    "hybrid": _COMMON
    | {
        "architectures": ["Qwen3_5ForCausalLM"],
        "model_type": "qwen3_5_text",
        "vocab_size": 49152,
        "hidden_size": 1024,
        "intermediate_size": 3584,
        "num_hidden_layers": 24,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "head_dim": 256,
        "full_attention_interval": 4,
        "linear_num_key_heads": 16,
        "linear_num_value_heads": 16,
        "linear_key_head_dim": 128,
        "linear_value_head_dim": 128,
        "linear_conv_kernel_dim": 4,
        "max_position_embeddings": 8192,
        "rms_norm_eps": 1e-6,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 1e7,
            "partial_rotary_factor": 0.25,
            "mrope_interleaved": True,
            "mrope_section": [11, 11, 10],
        },
    },
}
_GROUP = 32  # as llama.cpp's and ours; 128 does not divide the rows of 135m
# By the end of a directory's name.
CHECKPOINTS: dict[str, QuantizedFormat] = {
    "w8a8": FORMATS["ct-w8a8"],
    "w4a16": QuantizedFormat(
        "compressed-tensors W4A16",
        compressed(
            "pack-quantized",
            num_bits=4,
            type="int",
            symmetric=True,
            strategy="group",
            group_size=_GROUP,
        ),
        pack_quantized(4, _GROUP, symmetric=True),
        "int4",
    ),
}
_QUANTIZED = {"q8_0": "Q8_0", "q4_0": "Q4_0"}

# llama.cpp's converter knows a tokenizer by the hash of what it makes of one text, and refuses all
# others. The demo model's splits a text as SmolLM's does.
_CONVERT = """
import runpy, sys
source, *arguments = sys.argv[1:]
sys.path.insert(0, source)
from conversion.base import TextModel
known = TextModel.get_vocab_base_pre
def split_of(self, tokenizer):
    try:
        return known(self, tokenizer)
    except NotImplementedError:
        return "smollm"
TextModel.get_vocab_base_pre = split_of
sys.argv = ["convert_hf_to_gguf.py", *arguments]
runpy.run_path(source + "/convert_hf_to_gguf.py", run_name="__main__")
"""


def write_model(shape: dict[str, Any], folder: Path) -> None:
    """A Hugging Face directory, in bfloat16. The last file that appears is config.json."""
    folder.mkdir(parents=True, exist_ok=True)
    generator = torch.Generator().manual_seed(0)
    # Qwen3.5 adds 1 to the weights of all norms but those of gated delta nets.
    norm = 0.0 if shape["model_type"].startswith("qwen3_5") else 1.0
    weights = {
        name: _random(name, size, generator, norm).to(torch.bfloat16)
        for name, size in _tensor_shapes(shape)
    }
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    _write_json(folder / "tokenizer.json", _tokenizer(shape["vocab_size"]))
    settings = json.loads((DEMO_MODEL / "tokenizer_config.json").read_text(encoding="utf-8"))
    settings["model_max_length"] = shape["max_position_embeddings"]
    _write_json(folder / "tokenizer_config.json", settings)
    _write_json(folder / "config.json", shape)


def write_checkpoint(model: Path, target: Path, quantized: QuantizedFormat) -> None:
    """A Hugging Face directory of the same model, with the linear layers' weights in codes."""
    with tempfile.TemporaryDirectory(dir=target.parent) as folder:
        whole = Path(folder, target.name)
        shutil.copytree(model, whole)
        weights: dict[str, Tensor] = {}
        for name, weight in load_file(model / "model.safetensors").items():
            if name.endswith("proj.weight"):
                tensors, _ = quantized.pack(weight.float().numpy())
                layer = name.removesuffix("weight")
                weights |= {f"{layer}{end}": each.contiguous() for end, each in tensors.items()}
            else:
                weights[name] = weight
        save_file(weights, whole / "model.safetensors", metadata={"format": "pt"})
        config = json.loads((model / "config.json").read_text(encoding="utf-8"))
        _write_json(whole / "config.json", config | {"quantization_config": quantized.settings})
        whole.rename(target)


def write_gguf(model: Path, file: Path, llama: Path) -> None:
    """`file` in bfloat16, after NAME-q8_0.gguf and NAME-q4_0.gguf beside it.

    llama: as `install` makes it. Raises CalledProcessError.
    """
    with tempfile.TemporaryDirectory(dir=file.parent) as folder:
        whole = Path(folder, file.name)
        convert_to_gguf(model, whole, "bf16", llama)
        for suffix, kind in _QUANTIZED.items():
            smaller = Path(folder, f"{file.stem}-{suffix}.gguf")
            quantize_gguf(whole, smaller, kind, llama)
            smaller.rename(file.with_name(smaller.name))
        whole.rename(file)


def convert_to_gguf(model: Path, file: Path, dtype: str, llama: Path) -> None:
    """By llama.cpp's own converter. dtype: bf16, f16 or f32. Raises CalledProcessError."""
    config = json.loads((model / "config.json").read_text(encoding="utf-8"))
    # It expects of Qwen3.5 the layers that draft, unless it is told that there are none.
    is_hybrid = str(config.get("model_type")).startswith("qwen3_5")
    _run(
        *(sys.executable, "-c", _CONVERT, llama / "source", model),
        *("--outtype", dtype, "--outfile", file),
        *(("--no-mtp",) if is_hybrid else ()),
        PYTHONPATH=str(llama / "site"),
    )


def quantize_gguf(whole: Path, smaller: Path, kind: str, llama: Path) -> None:
    """kind: as llama.cpp names it, such as Q4_K_M. Raises CalledProcessError."""
    _run(llama / "build" / "bin" / "llama-quantize", whole, smaller, kind, "1")


def write_openvino(model: Path, target: Path, environment: Path, weights: Iterable[str]) -> None:
    """An OpenVINO model and its tokenizer. weights: a format, and more of the exporter's flags.

    The exporter has no bfloat16; a server that computes in it converts the weights when it loads.
    environment: one that has optimum-intel. Raises CalledProcessError.
    """
    with tempfile.TemporaryDirectory(dir=target.parent) as folder:
        whole = Path(folder, target.name)
        _run(
            *(environment / "bin" / "optimum-cli", "export", "openvino", "--model", model),
            *("--task", "text-generation-with-past", "--weight-format"),
            *weights,
            whole,
            HF_HUB_OFFLINE="1",
            DO_NOT_TRACK="1",
        )
        whole.rename(target)


def _run(*command: str | Path, **environment: str) -> None:
    subprocess.run(command, check=True, env=os.environ | environment)


def _tensor_shapes(shape: dict[str, Any]) -> Iterator[tuple[str, tuple[int, ...]]]:
    """As transformers' class of the model has them, in its order."""
    auto: Any = transformers.AutoModelForCausalLM
    with torch.device("meta"):
        model = auto.from_config(transformers.AutoConfig.for_model(**shape))
    for name, tensor in model.state_dict().items():
        if name != "lm_head.weight":  # tied
            yield name, tuple(tensor.shape)


def _random(name: str, size: tuple[int, ...], generator: torch.Generator, norm: float) -> Tensor:
    """norm: of the norms' weights."""
    if "norm" in name:
        return torch.full(size, 1.0 if "linear_attn" in name else norm)
    return torch.randn(size, generator=generator) * _DEVIATION


def _tokenizer(vocab_size: int) -> dict[str, Any]:
    tokenizer = json.loads((DEMO_MODEL / "tokenizer.json").read_text(encoding="utf-8"))
    # A made-up word has no merges: it is a token since it is in the vocabulary. So a text that a
    # server generated has as many tokens when it is sent back.
    tokenizer["model"]["ignore_merges"] = True
    vocab: dict[str, int] = tokenizer["model"]["vocab"]
    words = (word for word in _words() if word not in vocab)
    for word in itertools.islice(words, vocab_size - len(vocab)):
        vocab[word] = len(vocab)
    assert sorted(vocab.values()) == [*range(vocab_size)], vocab_size
    return tokenizer  # type: ignore[no-any-return]


def _words() -> Iterator[str]:
    """With a space before them, which a byte-level vocabulary writes as G with a dot."""
    for length in itertools.count(3):
        for letters in itertools.product(string.ascii_lowercase, repeat=length):
            yield "\u0120" + "".join(letters)


def _write_json(file: Path, value: object) -> None:
    file.write_text(json.dumps(value, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
