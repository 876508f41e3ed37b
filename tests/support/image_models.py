"""Tiny models of text and images, and what transformers computes of random rows in place of images'
tokens: no encoder is needed for it."""

from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from penstock.engine.encoders.positions import insert_positions
from tests.support.inserted_rows import InsertedPrompt, made_insert
from tests.support.tiny_models import make_model

# By the names of `tiny_models`: further options.
IMAGE_FAMILIES: dict[str, dict[str, Any]] = {
    "qwen3_vl": {},
    "qwen3_vl_moe": {},
    "qwen3_5_wrapped": {},
    "qwen3_5_moe_wrapped": {},
    "gemma3_wrapped": {},
    "gemma4_small_wrapped": {},
    "gemma4_unified_wrapped": {},
}
_SECTIONS = {"mrope_section": [2, 1, 1], "partial_rotary_factor": 0.25, "rope_theta": 1e4}
for _name in ("qwen3_5_wrapped", "qwen3_5_moe_wrapped"):
    IMAGE_FAMILIES[_name] = {"rope_parameters": {**_SECTIONS, "rope_type": "default"}}
# Those of which tokens of an image attend to all of it, and those that add rows after layers.
WITH_SPANS = frozenset({"gemma3_wrapped", "gemma4_unified_wrapped"})
WITH_DEEPSTACK = frozenset({"qwen3_vl", "qwen3_vl_moe"})
_NUM_DEEP = 2


def make_image_model(family: str) -> Any:
    return make_model(family, **IMAGE_FAMILIES[family])


def made_prompt(family: str, hidden_size: int, *, first: int = 5, seed: int = 5) -> InsertedPrompt:
    """Two images in a prompt of 70 tokens."""
    is_whole = family in WITH_SPANS
    # Longer than a sliding window, and across pieces of the attention that is compiled.
    grids = [(1, 4, 5), (1, 3, 2)] if not is_whole else [(1, 1, 20), (1, 1, 6)]
    inserts = [
        made_insert(first, grids[0], 0, is_whole=is_whole),
        made_insert(first + 30, grids[1], 1, is_whole=is_whole),
    ]
    num_deep = _NUM_DEEP if family in WITH_DEEPSTACK else 0
    return InsertedPrompt.random(inserts, hidden_size, num_deep=num_deep, seed=seed)


@torch.inference_mode()
def logits_of_transformers(model: Any, ids: Tensor, prompt: InsertedPrompt) -> Tensor:
    """Of one prompt, whose ids these are, (T,): (T, vocab_size)."""
    text, mask = model.model.language_model, prompt.mask(len(ids))
    others: dict[str, Any] = {}
    embedded = text.embed_tokens(ids.where(~mask, 0))
    embedded[prompt.places] = prompt.rows.to(embedded.dtype)
    embedded = embedded[None]
    if "Qwen" in type(model).__name__:
        others["position_ids"] = insert_positions(prompt.inserts, 0, len(ids))[:, None]
    else:
        module = import_module(type(model).__module__)
        kinds = mask.int()[None]
        config = model.config.get_text_config()
        if prompt.inserts[0].is_whole:
            others["attention_mask"] = module.create_masks_for_vision_model(
                config=config,
                inputs_embeds=embedded,
                attention_mask=None,
                cache=None,
                position_ids=torch.arange(len(ids))[None],
                block_sequence_ids=module.get_block_sequence_ids_for_mask(kinds, device=ids.device),
            )
        if getattr(config, "hidden_size_per_layer_input", 0):
            padded = ids.where(~mask, config.pad_token_id)[None]
            others["per_layer_inputs"] = text.get_per_layer_inputs(padded)
    if prompt.deepstack is not None:
        deep = [each.to(embedded.dtype) for each in prompt.deepstack]
        others |= {"visual_pos_masks": mask[None], "deepstack_visual_embeds": deep}
    states = text(inputs_embeds=embedded, use_cache=False, **others).last_hidden_state
    logits: Tensor = model.lm_head(states)[0].float()
    if (
        cap := getattr(model.config.get_text_config(), "final_logit_softcapping", None)
    ) is not None:
        logits = torch.tanh(logits / cap) * cap
    return logits
