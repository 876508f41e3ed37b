"""Packs what is before and after the layers: see `Embedding` and `Head` of structs.h."""

from ctypes import Structure

from penstock.engine.models.decoder.model import LlamaModel
from penstock.engine.models.layers.linear import PlainLinear
from penstock.engine.models.parts.embedding.layer import multiplier
from penstock.engine.native.packing import Packer, parts
from penstock.engine.native.structures import structure

_EMBEDDING, _HEAD, _LINEAR = map(structure, ("Embedding", "Head", "Linear"))


def pack_ends(packer: Packer, model: LlamaModel) -> tuple[Structure, Structure]:
    """Returns the embedding and the head, which may be the same matrix."""
    config, table = model.config, model.embedding
    [output] = parts(model.lm_head, packer.dtype)
    has_head = len(model.norm) > 0
    head = _HEAD(
        norm=packer.norm(model.norm),
        linear=packer.packed(output) if has_head else _LINEAR(),
        multiplier=config.head.multiplier,
        softcap=config.head.softcap or 0.0,
    )
    is_shared = has_head and config.head.is_tied and isinstance(output, PlainLinear)
    if is_shared and isinstance(output, PlainLinear):  # then it is in memory once
        table = output.weight
    embedding = _EMBEDDING(
        table=packer.address(table),
        is_in_bands=is_shared,
        rows=config.vocab_size,
        multiplier=multiplier(config.embedding, packer.dtype),
    )
    return embedding, head
