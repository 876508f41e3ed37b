"""Files that llama.cpp's converter writes of every family have the logits of transformers, and
those of llama.cpp's server."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer

from penstock.engine.hub.gguf import check_gguf
from tests.bench.peers.models import convert_to_gguf
from tests.formats.llama_cpp import HOME, IS_INSTALLED, NOT_INSTALLED, LlamaServer
from tests.support.gguf_files import WRITTEN
from tests.support.paths import DEMO_MODEL, STORIES
from tests.support.tiny_models import HYBRID_FAMILIES, MAX_LEN, Harness, make_model, save

pytestmark = pytest.mark.skipif(not IS_INSTALLED, reason=NOT_INSTALLED)

# The converter leaves out Mistral's window, so that its file is a model without one, and wants a
# number of experts of every Gemma 4, which the unified one's configuration does not have.
_NOT_WRITTEN = ("mistral_window", "gemma4_unified_wrapped")
# llama.cpp's server has EXAONE 4's windows in models of 64 layers alone (src/models/exaone4.cpp),
# no bias of Qwen3's output projection (src/models/qwen3.cpp), which no published Qwen3 has, groups
# of experts as V3 has them in DeepSeek-V2 too (`build_moe_ffn` in src/llama-graph.cpp), and queries
# that are no products of latents in 26, 27 or 48 layers alone (src/models/deepseek2.cpp).
_WITHOUT_SERVER = ("exaone4", "qwen3_bias", "deepseek_v2", "deepseek_v2_lite", "youtu_direct")
_SLIDING, _FULL = "sliding_attention", "full_attention"
_YARN = {"rope_type": "yarn", "factor": 4.0, "truncate": False, "rope_theta": 150_000.0}
# What llama.cpp takes to be so, as it is in the published models.
_AS_PUBLISHED: dict[str, dict[str, Any]] = {
    # No bias of the output projection (src/models/seed-oss.cpp).
    "seed_oss": {"attention_out_bias": False},
    # The last two layers with keys and values have a window and none, and later ones read theirs
    # (`llama_model::create_memory` in src/llama-model.cpp).
    "gemma4_small_wrapped": {
        "layer_types": [_SLIDING, _SLIDING, _FULL, _SLIDING, _FULL, _SLIDING, _FULL]
    },
    # Keys as wide as values (src/models/qwen35.cpp), and every fourth layer with attention.
    **{name: {"linear_key_head_dim": 32} for name in HYBRID_FAMILIES},
    "qwen3_5_narrow": {
        "linear_key_head_dim": 13,
        "num_hidden_layers": 4,
        "layer_types": [*["linear_attention"] * 3, _FULL],
    },
    # llama.cpp truncates the bounds of YaRN's ramp (`ggml_rope_yarn_corr_dims` in ggml.c), gpt-oss
    # does not: here no pair of numbers is between them, in the published ones a few are.
    "gpt_oss": {"rope_parameters": {**_YARN, "original_max_position_embeddings": 16}},
}
# What config.json says in published checkpoints, and not as transformers saves it.
_PUBLISHED: dict[str, dict[str, Any]] = {
    "deepseek_v2": {"scoring_func": "softmax"},
    "deepseek_v2_lite": {"scoring_func": "softmax"},
    "deepseek_v3": {"scoring_func": "sigmoid"},
    # Of GLM-4.7-Flash llama.cpp knows the second by the number of its layers.
    "glm4_moe_lite": {"first_k_dense_replace": 1, "scoring_func": "sigmoid"},
    "youtu": {"bos_token_id": None},
}
# Tokens that the converter wants of every GLM.
_OF_GLM = ["<|endoftext|>", "[gMASK]", "<|user|>", "<|observation|>"]
# Of a tokenizer each, whose words the converter takes.
_BYTE_LEVEL = ("tokenizer.json", "tokenizer_config.json")
MAX_TOKENS, NUM_TOP = 12, 10
# llama.cpp keeps keys and values in float16, and rounds them.
TOLERANCE = 0.05


def converted(family: str, folder: Path) -> tuple[Any, Path]:
    """A tiny random model, and its file."""
    is_gemma4 = family.startswith("gemma4")
    if is_gemma4 and not STORIES.exists():
        pytest.skip("no trained model, whose tokenizer is of Gemma's kind")
    tokenizer, vocab_size = (STORIES, 512) if is_gemma4 else (DEMO_MODEL, 2048)
    vocab_size += len(_OF_GLM) * family.startswith("glm")
    sizes = {"vocab_size": vocab_size}
    if is_gemma4:  # llama.cpp has one size for both, as all published Gemma 4 do
        sizes["vocab_size_per_layer_input"] = vocab_size
    settings = WRITTEN[family] | _AS_PUBLISHED.get(family, {}) | sizes
    model = make_model(family, **settings)
    save(model, folder)
    for name in _BYTE_LEVEL:
        shutil.copy(tokenizer / name, folder)
    if family.startswith("glm"):
        tokens = Tokenizer.from_file(str(folder / "tokenizer.json"))
        tokens.add_special_tokens(_OF_GLM)
        tokens.save(str(folder / "tokenizer.json"))
    if published := _PUBLISHED.get(family):
        settings = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(settings | published))
    if family.startswith("phi4"):  # by which the converter tells Phi-4 from Phi-3
        settings = json.loads((folder / "tokenizer_config.json").read_text())
        settings["tokenizer_class"] = "GPT2Tokenizer"
        (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    path = folder / "model.gguf"
    convert_to_gguf(folder, path, "f32", HOME)
    return model, path


def without_whole_text(folder: Path) -> list[int]:
    """The ids that stand for parts of characters, and those that end an answer."""
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    texts = {index: tokenizer.decode([index]) for index in range(tokenizer.get_vocab_size())}
    return [index for index, text in texts.items() if not text or not text.isascii()]


def logits(path: Path, ids: list[int]) -> torch.Tensor:
    harness = Harness(path, num_sequences=1)
    harness.token_table[0, : len(ids)] = torch.tensor(ids)
    return harness.run([(0, 0, len(ids))])[0]


@pytest.mark.parametrize("family", [name for name in WRITTEN if name not in _NOT_WRITTEN])
def test_its_logits_are_those_of_the_model_and_of_llama_server(tmp_path: Path, family: str) -> None:
    model, path = converted(family, tmp_path)
    check_gguf(path)
    prompt = [int(each) for each in torch.arange(3, 43) * 11 % 500]
    with torch.inference_mode():
        expected = model(torch.tensor([prompt])).logits[0]
    torch.testing.assert_close(logits(path, prompt), expected, atol=1e-4, rtol=0)

    if family in _WITHOUT_SERVER:
        return
    theirs = LlamaServer(path)
    try:
        theirs.wait_until_ready()
        banned = without_whole_text(tmp_path)
        answer, tops = theirs.continuation(prompt, MAX_TOKENS, NUM_TOP, banned=banned)
    finally:
        theirs.stop()
    assert len(answer) == MAX_TOKENS
    assert len(prompt) + len(answer) <= MAX_LEN
    ours = logits(path, prompt + answer)[len(prompt) - 1 :].log_softmax(-1)
    for own, top in zip(ours, tops, strict=False):  # ours has one after the last
        found = {token_id: float(own[token_id]) for token_id in top}
        assert found == pytest.approx(top, abs=TOLERANCE)
