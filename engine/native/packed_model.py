"""Packs a model: see `Model` and `Layer` of structs.h."""

import itertools
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from ctypes import Structure
from functools import partial

from penstock.engine.memory.pool.kv_pool import LayerPools
from penstock.engine.models.decoder.model import DecoderLayer, LlamaModel
from penstock.engine.models.layers.linear import Linear
from penstock.engine.native.packing import Packer, check_format
from penstock.engine.native.parts.attention import AttentionPacker
from penstock.engine.native.parts.ends import pack_ends
from penstock.engine.native.parts.experts import describe_experts, pack_experts
from penstock.engine.native.parts.mlp import pack_mlp
from penstock.engine.native.parts.per_layer_inputs import pack_input, pack_inputs
from penstock.engine.native.structures import structure
from penstock.engine.ranks.shared_memory import SharedMemoryGroup

_MODEL, _LAYER, _RANKS = map(structure, ("Model", "Layer", "Ranks"))


def pack_model(
    packer: Packer, model: LlamaModel, pool: LayerPools, threads: int
) -> tuple[Structure, list[Structure]]:
    """Returns the `Model`, and its layers. Raises UnsupportedWeightFormat, before it packs
    anything."""
    for linear in _linears(model):
        check_format(linear)
    config = model.config
    embedding, head = pack_ends(packer, model)
    attention, inputs = AttentionPacker(packer, model, pool), model.per_layer_inputs
    with ThreadPoolExecutor(threads) as workers:
        pack = partial(_pack_layer, packer, attention)
        layers = list(workers.map(pack, range(config.num_layers), model.layers))
    kinds = attention.kinds()
    packed = _MODEL(
        num_layers=config.num_layers,
        hidden=config.hidden_size,
        heads=config.num_heads,
        mlp=max(*(layer.mlp.size for layer in layers), inputs.shape[1] if inputs else 0),
        block_size=pool.layer(0)[0].shape[1],
        kinds=packer.array(structure("Heads"), kinds),
        num_kinds=len(kinds),
        eps=config.norm.eps,
        layers=packer.array(_LAYER, layers),
        whole_qk_norm=any(attention.norms_whole for attention in config.attentions),
        has_post_norms=any(layer.norms.post for layer in config.layers),
        is_gelu=any(layer.mlp and layer.mlp.activation.is_gelu for layer in config.layers),
        norms_values=any(attention.norms_values for attention in config.attentions),
        embedding=embedding,
        head=head,
        experts=describe_experts(config.experts),
        inputs=pack_inputs(packer, inputs),
        ranks=_ranks(model),
    )
    return packed, layers


def _pack_layer(
    packer: Packer, attention: AttentionPacker, index: int, layer: DecoderLayer
) -> Structure:
    packed = _LAYER(
        **packer.norms(layer.norms, "input_norm", "attended_norm", "mlp_norm", "active_norm"),
        attention=attention.layer(index),
        scalar=1.0 if layer.norms.scalar is None else float(layer.norms.scalar),
    )
    if layer.mlp is not None:
        packed.mlp = pack_mlp(packer, layer.mlp)
    if layer.experts is not None:
        packed.experts = pack_experts(packer, layer.experts, layer.norms.mlp_norm)
    if layer.per_layer_input is not None:
        packed.input = pack_input(packer, layer.per_layer_input)
    return packed


def _ranks(model: LlamaModel) -> Structure:
    if model.group is None:
        return _RANKS()
    assert isinstance(model.group, SharedMemoryGroup), model.group
    group, all_reduce = model.group.all_reduce_lane
    return _RANKS(
        group=group, all_reduce=all_reduce, num=model.group.size, first_id=model.shard.first_id
    )


def _linears(model: LlamaModel) -> Iterator[Linear]:
    yield model.lm_head
    inputs = () if model.per_layer_inputs is None else (model.per_layer_inputs,)
    for part in itertools.chain(inputs, *(layer.parts for layer in model.layers)):
        yield from part.linears.values()
