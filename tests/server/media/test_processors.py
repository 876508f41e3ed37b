"""Prompts and pixels against transformers' own processors, on random pictures of many sizes."""

import asyncio
import importlib
import io
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from transformers import PreTrainedTokenizerFast

from penstock.server.media.decoder import ImageDecoder
from penstock.server.media.families import ImageFamily
from penstock.server.media.fetcher import ImageFetcher
from penstock.server.media.reader import ImageReader
from penstock.server.prompt.tokenizer import PromptEncoder
from tests.support.image_prompts import GEMMA3, GEMMA4, QWEN, write_prompt_files

FAMILIES = (QWEN, GEMMA3, GEMMA4)
_PROCESSORS = {
    QWEN: ("qwen3_vl.processing_qwen3_vl", "Qwen3VLProcessor"),
    GEMMA3: ("gemma3.processing_gemma3", "Gemma3Processor"),
    GEMMA4: ("gemma4.processing_gemma4", "Gemma4Processor"),
}
SIZES = [(96, 64), (1, 1), (333, 77), (700, 911), (3, 40), (64, 64)]


def pictures() -> list["Image.Image"]:
    rng = np.random.default_rng(3)
    return [Image.fromarray(rng.integers(0, 256, (h, w, 3), np.uint8)) for w, h in SIZES]


def file_of(image: "Image.Image") -> bytes:
    file = io.BytesIO()
    image.save(file, "PNG")
    return file.getvalue()


def reference(directory: Path, family: str) -> Any:
    """transformers' processor of the family, whose videos nobody reads."""
    module, name = _PROCESSORS[family]
    found = getattr(importlib.import_module(f"transformers.models.{module}"), name)
    # Its class for videos needs torchvision, and its constructor looks for that class.
    kind = type(name, (found,), {"check_argument_for_proper_class": lambda *_: None})
    tokenizer = PreTrainedTokenizerFast.from_pretrained(directory)
    module, name = load_family(directory).processor
    pil = getattr(importlib.import_module(f"transformers.models.{module}"), name)
    given = {"image_processor": pil.from_pretrained(directory), "tokenizer": tokenizer}
    if family == GEMMA3:
        given["image_seq_length"] = 4
    if family == GEMMA4:
        given["feature_extractor"] = None
    if family != GEMMA3:
        given["video_processor"] = None
    return kind(**given)


def load_family(directory: Path) -> ImageFamily:
    encoder = PromptEncoder.load(directory, None)
    family = ImageFamily.load(directory, lambda i: encoder.token_names([i])[0])
    assert family is not None
    return family


@pytest.mark.parametrize("family", FAMILIES)
def test_ids_and_pixels_are_those_of_transformers(family: str, tmp_path: Path) -> None:
    write_prompt_files(tmp_path, family)
    ours, theirs = load_family(tmp_path), reference(tmp_path, family)
    encoder = PromptEncoder.load(tmp_path, None)
    reader = ImageReader(ours, ImageDecoder(ours), ImageFetcher((), 1), 9)
    images = pictures()
    try:
        decoded = [asyncio.run(reader.decoder.decode(file_of(image))) for image in images]
    finally:
        reader.close()
    parts: list[dict[str, str]] = []
    for i in range(len(images)):
        parts += [{"type": "text", "text": "\n" * (i % 3) + "what? \n"}, {"type": "image"}]
    messages: list[Mapping[str, Any]] = [
        {"role": "user", "content": [*parts, {"type": "text", "text": "\nand\n\n"}]}
    ]
    template = encoder.chat_template()
    text = template.render(messages)
    ids, inserts = reader.with_rows(
        text, lambda t: encoder.encode(t, add_special_tokens=False), decoded, info()
    )
    expected = theirs(
        images=images,
        text=text,
        add_special_tokens=False,
        images_kwargs={"do_rescale": False, "do_normalize": False},
    )
    assert list(ids) == list(np.asarray(expected["input_ids"]).reshape(-1))
    (image_id,) = {ids[i.start] for i in inserts}
    for insert in inserts:
        assert set(ids[insert.start : insert.start + insert.num_tokens]) == {image_id}
    assert ids.count(image_id) == sum(i.num_tokens for i in inserts)
    assert len(inserts) == len(images)
    check_pixels(family, expected, inserts)


def check_pixels(family: str, expected: Any, inserts: Any) -> None:
    made = [np.frombuffer(i.content, np.uint8).reshape(i.patches) for i in inserts]
    pixels = expected["pixel_values"]
    if family == QWEN:
        assert (np.concatenate(made) == np.asarray(pixels)).all()
        grids = np.asarray(expected["image_grid_thw"]).tolist()
        assert [list(i.patch_grid) for i in inserts] == grids
    elif family == GEMMA4:
        for patches, padded, positions, insert in zip(
            made, pixels, expected["image_position_ids"], inserts, strict=True
        ):
            real = np.asarray(positions)[:, 0] >= 0
            assert (patches == np.asarray(padded)[real]).all()
            _, rows, columns = insert.patch_grid
            there = [[x, y] for y in range(rows) for x in range(columns)]
            assert np.asarray(positions)[real].tolist() == there
    else:
        # A convolution with one patch's identity as its weights is what an encoder reads of it.
        whole = torch.tensor(np.asarray(pixels), dtype=torch.float32)
        weights = torch.eye(3 * 14 * 14).view(-1, 3, 14, 14)
        read = torch.nn.functional.conv2d(whole, weights, stride=14).flatten(2).transpose(1, 2)
        assert (torch.tensor(np.stack(made), dtype=torch.float32) == read).all()


def info() -> Any:
    from penstock.engine.executors.scripted import scripted_info

    return scripted_info(takes_images=True, max_model_len=4096)
