"""Tiny models of text and images with random weights, and images for them, by transformers."""

from collections.abc import Callable, Mapping
from hashlib import blake2b
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from transformers import (
    Gemma3Config,
    Gemma3ForConditionalGeneration,
    Gemma4Config,
    Gemma4ForConditionalGeneration,
    PreTrainedModel,
    Qwen3_5Config,
    Qwen3_5ForConditionalGeneration,
    Qwen3VLConfig,
    Qwen3VLForConditionalGeneration,
)
from transformers.models.gemma3.image_processing_pil_gemma3 import Gemma3ImageProcessorPil
from transformers.models.gemma4.image_processing_pil_gemma4 import Gemma4ImageProcessorPil
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from penstock.scheduler.types import Insert

_TEXT: Mapping[str, Any] = {
    "hidden_size": 48,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "vocab_size": 64,
}
_QWEN: Mapping[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 40,
    "depth": 3,
    "num_heads": 2,
    "out_hidden_size": 48,
    "num_position_embeddings": 25,
    "patch_size": 4,
}
_ROPE = {"rope_type": "default", "rope_theta": 10000.0}


class Encoded(NamedTuple):
    """An image as a request has it, and the rows that transformers makes of it. deepstack: None
    where there are none."""

    insert: Insert
    rows: Tensor
    deepstack: Tensor | None


class Family(NamedTuple):
    """make: the model. processor: of images, and for a call."""

    make: Callable[[], Any]
    processor: Any
    encode: Callable[[Any, Any, Any], Encoded]


def _qwen3_vl() -> PreTrainedModel:
    vision = {**_QWEN, "deepstack_visual_indexes": [0, 2]}
    text = {**_TEXT, "rope_parameters": {**_ROPE, "mrope_section": [4, 2, 2]}}
    return Qwen3VLForConditionalGeneration(Qwen3VLConfig(text_config=text, vision_config=vision))


def _qwen3_5() -> PreTrainedModel:
    sizes = {
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 2,
        "linear_key_head_dim": 8,
        "linear_value_head_dim": 8,
        "layer_types": ["linear_attention", "full_attention"],
        "rope_parameters": {
            **_ROPE,
            "mrope_section": [2, 1, 1],
            "mrope_interleaved": True,
            "partial_rotary_factor": 0.5,
        },
    }
    config = Qwen3_5Config(text_config={**_TEXT, **sizes}, vision_config=dict(_QWEN))
    return Qwen3_5ForConditionalGeneration(config)


def _gemma3(*, has_head: bool = False) -> PreTrainedModel:
    vision = {
        "hidden_size": 36,
        "intermediate_size": 40,
        "num_hidden_layers": 2,
        "num_attention_heads": 3,
        "image_size": 32,
        "patch_size": 4,
        "vision_use_head": has_head,
    }
    config = Gemma3Config(text_config=dict(_TEXT), vision_config=vision, mm_tokens_per_image=16)
    return Gemma3ForConditionalGeneration(config)


def _gemma4(**vision: Any) -> PreTrainedModel:
    sizes = {
        "hidden_size": 36,
        "intermediate_size": 40,
        "num_hidden_layers": 2,
        "num_attention_heads": 3,
        "num_key_value_heads": 3,
        "head_dim": 8,
        "patch_size": 4,
        "position_embedding_size": 64,
    }
    text = {
        **_TEXT,
        "layer_types": ["sliding_attention", "full_attention"],
        "global_head_dim": 16,
        "vocab_size_per_layer_input": 64,
        "hidden_size_per_layer_input": 8,
        "use_bidirectional_attention": "vision",
    }
    config = Gemma4Config(text_config=text, vision_config={**sizes, **vision}, audio_config=None)
    return Gemma4ForConditionalGeneration(config)


def _insert(content: np.ndarray[Any, Any], num_tokens: int, grid: tuple[int, int, int]) -> Insert:
    assert np.array_equal(content, content.astype(np.uint8))
    data = content.astype(np.uint8)
    num, size = data.shape
    digest = blake2b(data.tobytes(), digest_size=16).digest()
    return Insert(0, num_tokens, digest, (1, 1, num_tokens), data.tobytes(), (num, size), grid)


_RAW = {"do_rescale": False, "do_normalize": False}


def _encode_qwen(model: Any, processor: Any, image: Any) -> Encoded:
    raw, found = processor(image, **_RAW), processor(image)
    grid = torch.from_numpy(found["image_grid_thw"])
    made = model.model.visual(torch.from_numpy(found["pixel_values"]), grid_thw=grid)
    stack = getattr(made, "deepstack_features", None)
    _, height, width = grid[0].tolist()
    insert = _insert(raw["pixel_values"], len(made.pooler_output), (1, height, width))
    return Encoded(insert, made.pooler_output, None if stack is None else torch.stack(stack))


def _encode_gemma3(model: Any, processor: Any, image: Any) -> Encoded:
    raw, found = processor(image, **_RAW), processor(image)
    rows = model.model.get_image_features(torch.from_numpy(np.stack(found["pixel_values"])))
    (pixels,) = np.stack(raw["pixel_values"])
    side = model.config.vision_config.patch_size
    channels, height, width = pixels.shape
    cut = pixels.reshape(channels, height // side, side, width // side, side)
    patches = cut.transpose(1, 3, 0, 2, 4).reshape(-1, channels * side**2)
    (pooled,) = rows.pooler_output
    return Encoded(_insert(patches, len(pooled), (1, height // side, width // side)), pooled, None)


def _encode_gemma4(model: Any, processor: Any, image: Any) -> Encoded:
    raw, found = processor(image, **_RAW), processor(image)
    numbers, places = (
        torch.from_numpy(np.stack(found[name])) for name in ("pixel_values", "image_position_ids")
    )
    rows = model.model.get_image_features(numbers, places).pooler_output[0]
    is_patch = places[0, :, 0] >= 0
    width, height = (places[0].max(0).values + 1).tolist()
    patches = np.stack(raw["pixel_values"])[0][is_patch.numpy()]
    return Encoded(_insert(patches, len(rows), (1, height, width)), rows, None)


FAMILIES: Mapping[str, Family] = {
    "qwen3_vl": Family(
        _qwen3_vl,
        Qwen2VLImageProcessorPil(patch_size=4, size={"shortest_edge": 64, "longest_edge": 64 * 64}),
        _encode_qwen,
    ),
    "qwen3_5": Family(
        _qwen3_5,
        Qwen2VLImageProcessorPil(
            patch_size=4,
            image_mean=[0.5] * 3,
            image_std=[0.5] * 3,
            size={"shortest_edge": 64, "longest_edge": 64 * 64},
        ),
        _encode_qwen,
    ),
    "gemma3": Family(
        _gemma3, Gemma3ImageProcessorPil(size={"height": 32, "width": 32}), _encode_gemma3
    ),
    "gemma3_head": Family(
        lambda: _gemma3(has_head=True),
        Gemma3ImageProcessorPil(size={"height": 32, "width": 32}),
        _encode_gemma3,
    ),
    "gemma4": Family(
        _gemma4, Gemma4ImageProcessorPil(patch_size=4, max_soft_tokens=70), _encode_gemma4
    ),
    "gemma4_standard": Family(
        lambda: _gemma4(use_clipped_linears=True, standardize=True),
        Gemma4ImageProcessorPil(patch_size=4, max_soft_tokens=70),
        _encode_gemma4,
    ),
}


def random_model(name: str) -> Any:
    """All its tensors are random: norms and bounds too."""
    torch.manual_seed(0)
    model = FAMILIES[name].make().eval()
    with torch.no_grad():
        for key, tensor in (*model.named_parameters(), *model.named_buffers()):
            if key.endswith(("_min", "_max")):
                tensor.fill_(2.5 if key.endswith("max") else -2.5)
            elif "std_" in key or (tensor.dim() == 1 and tensor.is_floating_point()):
                if "inv_freq" not in key:
                    tensor.normal_(0.8, 0.3)
            elif key.endswith(".weight") or "table" in key or "projection" in key:
                tensor.normal_(0.0, 0.15)
    return model


def save_model(name: str, model: Any, directory: Path) -> Path:
    model.save_pretrained(directory)
    FAMILIES[name].processor.save_pretrained(directory)
    return directory


def random_image(height: int, width: int, seed: int = 0) -> np.ndarray[Any, Any]:
    """(height, width, 3) uint8."""
    return np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)


def encode(name: str, model: Any, image: np.ndarray[Any, Any]) -> Encoded:
    family = FAMILIES[name]
    with torch.inference_mode():
        return family.encode(model, family.processor, image)
