"""Tiny models of text and images through HTTP: prompts and greedy answers are transformers'."""

import io
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from PIL import Image

from tests.server.media.test_processors import FAMILIES, reference
from tests.support.image_prompts import data_url, picture, write_prompt_files
from tests.support.serving import RunningServer

NUM_TOKENS = 24
PICTURES = (picture(96, 64), picture(200, 130))


def saved_model(directory: Path, family: str) -> Any:
    """transformers' model with random weights, which are in the directory."""
    write_prompt_files(directory, family)
    settings = (directory / "config.json").read_text(encoding="utf-8")
    config = transformers.AutoConfig.from_pretrained(directory, attn_implementation="eager")
    model = getattr(transformers, config.architectures[0])(config).eval()
    generator = torch.Generator().manual_seed(0)
    for name, parameter in model.named_parameters():
        noise = torch.randn(parameter.shape, generator=generator)
        is_factor = "norm" in name and name.endswith("weight")
        parameter.data = 1 + noise / 4 if is_factor else noise / 8
    model.save_pretrained(directory)
    (directory / "config.json").write_text(settings, encoding="utf-8")
    return model


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_answers_about_pictures_are_those_of_transformers(family: str, tmp_path: Path) -> None:
    model = saved_model(tmp_path, family)
    parts: list[dict[str, Any]] = [{"type": "text", "text": "What "}]
    sent = list(parts)
    for content in PICTURES:
        parts += [{"type": "image"}, {"type": "text", "text": " or"}]
        image_url = {"url": data_url(content)}
        sent += [{"type": "image_url", "image_url": image_url}, {"type": "text", "text": " or"}]
    server = RunningServer(
        *("--model", str(tmp_path), "--served-model-name", "m", "--dtype", "float32"),
        *("--max-model-len", "600", "--kv-cache-memory-bytes", str(1 << 25)),
    )
    try:
        server.wait_until_ready()
        first, again = (
            server.chat(
                model="m",
                messages=[{"role": "user", "content": sent}],
                max_tokens=NUM_TOKENS,
                temperature=0,
                ignore_eos=True,
                logprobs=True,
                return_token_ids=True,
            ).json()
            for _ in range(2)
        )
    finally:
        server.stop()
    processor = reference(tmp_path, family)
    text = processor.tokenizer.apply_chat_template(
        [{"role": "user", "content": parts}], tokenize=False, add_generation_prompt=True
    )
    inputs = processor(
        images=[Image.open(io.BytesIO(content)) for content in PICTURES],
        text=[text],
        add_special_tokens=False,
        return_tensors="pt",
    )
    inputs.pop("num_soft_tokens_per_image", None)
    prompt = inputs["input_ids"][0].tolist()
    assert first["prompt_token_ids"] == prompt
    made = model.generate(
        **inputs,
        max_new_tokens=NUM_TOKENS,
        do_sample=False,
        eos_token_id=None,
        pad_token_id=0,
        output_logits=True,
        return_dict_in_generate=True,
    )
    ids = first["choices"][0]["token_ids"]
    assert ids == made.sequences[0][len(prompt) :].tolist()
    expected = [
        torch.log_softmax(each[0], -1)[i].item() for i, each in zip(ids, made.logits, strict=True)
    ]
    found = [each["logprob"] for each in first["choices"][0]["logprobs"]["content"]]
    assert found == pytest.approx(expected, abs=1e-4)
    assert again["choices"][0]["token_ids"] == ids
    assert again["usage"]["prompt_tokens_details"]["cached_tokens"] > 0
