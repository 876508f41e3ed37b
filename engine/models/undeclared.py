"""`check_tensors`: a checkpoint has no tensors but those that its config.json implies.

One that no part reads mostly means that config.json has lost a setting, such as attention_bias, or
layers. The model would be served, and every answer would be wrong.
"""

import logging
import re
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator
from pathlib import Path

from penstock.engine.files.safetensors import text_model_name
from penstock.engine.files.tensor_files import TensorFiles
from penstock.engine.models.config import LAYER, ModelConfig, index_and_name
from penstock.engine.models.errors import InvalidModel
from penstock.engine.models.parts.per_layer_inputs.config import TABLE

logger = logging.getLogger(__name__)

# The ends of names of tensors that hold the codes of all experts of a layer.
_STACKED_CODES = ("blocks", "scales")
_DRAFTS = "layers that draft the tokens after the next"
# Patterns of the names of tensors that change no answer.
_WITHOUT_EFFECT = {
    "tables of rotary positions, which are computed": re.compile(r".*\brotary_emb\.\w+"),
    "masks, which are computed": re.compile(r".*\b(masked_bias|attn\.bias)"),
    _DRAFTS: re.compile(r"(.*\.)?mtp\w*\..*"),
    "scales of a quantized KV cache": re.compile(r".*\.([kqv]|kv|prob|softmax)_scale"),
}
# DeepSeek's and GLM's have numbers after the other layers'. The first reads two states.
_DRAFTING = re.compile(r"model\.layers\.(\d+)\.eh_proj\..*")
_OUTPUT = "lm_head.weight"
_TIED = "an output layer, which config.json ties to the embedding"
_ENCODERS = "encoders of images or sound that are not served"
# The tensors of an encoder that is read, but for a head that is for images alone.
_OF_ENCODER = re.compile(r"(model\.)?(visual|vision_tower|multi_modal_projector|embed_vision)\..*")
_OF_IMAGES_ALONE = re.compile(r".*vision_tower\.(vision_model\.)?head\..*")
_HEADS = "heads of an encoder whose results are not served"
_OF_HEADS = re.compile(r"(.*\.)?((pooler|cls|lm_head|head|decoder)\..*|position_ids)")
_ZERO_BIASES = "biases that are zero"
_MOST_NAMES = 3  # in a message


def check_tensors(
    model_dir: Path,
    config: ModelConfig,
    *,
    has_head: bool = False,
    of_encoder: Collection[str] = (),
) -> None:
    """Logs the tensors without effect. config: of the whole model. has_head: whether those of
    layers that draft are read. of_encoder: those that an encoder reads. Raises InvalidModel where
    there are others."""
    files = TensorFiles(model_dir)
    declared = {files.place_of(name) for name in (*_declared(config), *of_encoder)}
    others = set(files.names) - declared
    if has_head:
        others = {name for name in others if not _WITHOUT_EFFECT[_DRAFTS].fullmatch(name)}
    without_effect: dict[str, list[str]] = defaultdict(list)
    unknown: list[str] = []
    found = (_DRAFTING.fullmatch(name) for name in map(_full, others))
    drafting = {int(match[1]) for match in found if match} - {*range(config.num_layers)}
    for stored in sorted(others - _codes(config, others)):
        is_drafting = index_and_name(_full(stored))[0] in drafting
        why = _DRAFTS if is_drafting else _without_effect(stored, config, files)
        if of_encoder and _OF_ENCODER.fullmatch(stored) and not _OF_IMAGES_ALONE.fullmatch(stored):
            why = None
        (unknown if why is None else without_effect[why]).append(stored)
    for why, names in without_effect.items():
        logger.info("%d tensors have no effect: %s (%s)", len(names), why, _shown(names))
    if unknown:
        raise InvalidModel(
            f"the safetensors in {model_dir} have {_shown(unknown)}, which config.json does "
            f"not imply{_advice(unknown, config)}; without them the answers would be wrong: use "
            "the config.json that belongs to these weights",
            brief="the checkpoint has tensors that config.json does not imply",
        )


def _declared(config: ModelConfig) -> Iterator[str]:
    """Yields the names of all tensors of plain weights, and of stacks of codes."""
    if config.per_layer_inputs is not None:
        yield f"{TABLE}.weight"
    for dense in config.pooled.layers if config.pooled is not None else ():
        yield from (() if dense.directory else dense.tensors)
    for prefix, table in config.tables:
        for name, _ in table.shapes():
            if name == _OUTPUT and config.head.is_tied:
                continue  # the part declares what the embedding's tensor is used for
            yield prefix + name
            if config.quantization is not None and name.endswith(".weight"):
                layer = name.removesuffix("weight")
                yield from (f"{prefix}{layer}{codes}" for codes in _STACKED_CODES)


def _codes(config: ModelConfig, names: Iterable[str]) -> set[str]:
    """Returns which of the names are tensors of layers that may be quantized. A bias is declared
    like one of a plain layer."""
    if config.quantization is None:
        return set()
    layers = {name for name, _, _ in config.quantizable()}
    found = set()
    for name in names:
        layer, _, kind = _full(name).rpartition(".")
        if layer in layers and kind != "bias":
            found.add(name)
    return found


def _without_effect(stored: str, config: ModelConfig, files: TensorFiles) -> str | None:
    """Returns in words why a tensor that no part has changes nothing; None where it may."""
    name = _full(stored)
    if name == _OUTPUT and config.head.is_tied:
        return _TIED
    if config.is_wrapped and name == stored and not name.startswith((LAYER, "lm_head.")):
        return _ENCODERS
    if config.is_encoder and _OF_HEADS.fullmatch(name):
        return _HEADS
    if name.endswith(".bias") and not files.get(stored).any():  # GPTQ writes one for every layer
        return _ZERO_BIASES
    return next((why for why, names in _WITHOUT_EFFECT.items() if names.fullmatch(name)), None)


def _full(stored: str) -> str:
    """The name under which a part would declare it."""
    return f"model.{stored}" if stored.startswith("layers.") else text_model_name(stored)


def _advice(unknown: list[str], config: ModelConfig) -> str:
    indices = [index_and_name(_full(name))[0] for name in unknown]
    if any(index is not None and index >= config.num_layers for index in indices):
        return f", whose num_hidden_layers is {config.num_layers}"
    if any(name.endswith(".bias") for name in unknown):
        return " (as attention_bias or mlp_bias would)"
    return ""


def _shown(names: list[str]) -> str:
    more = f" and {len(names) - _MOST_NAMES} more" if len(names) > _MOST_NAMES else ""
    return ", ".join(map(repr, names[:_MOST_NAMES])) + more
