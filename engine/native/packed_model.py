"""Packs a model: see `Model` and `Layer` of structs.h."""

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from ctypes import Structure
from functools import partial

from torch import Tensor

from penstock.engine.memory.pool.kv_codes import Codes, KVPages
from penstock.engine.memory.pool.kv_pool import LayerPools
from penstock.engine.memory.pool.kv_shape import KVHeads
from penstock.engine.models.decoder.model import DecoderLayer, LlamaModel
from penstock.engine.models.decoder.mtp import MtpHead
from penstock.engine.models.layers.linear import Linear, PlainLinear
from penstock.engine.models.parts.attention.layer import AttentionLayer
from penstock.engine.models.parts.delta_net.layer import DeltaNetLayer
from penstock.engine.models.parts.experts.layer import ExpertsLayer
from penstock.engine.models.parts.latent_attention.config import LatentAttention
from penstock.engine.models.parts.latent_attention.layer import LatentAttentionLayer
from penstock.engine.models.parts.mlp.config import MLP
from penstock.engine.models.parts.vocabulary.layer import multiplier
from penstock.engine.native.packing import Packable, Packer, parts, stored
from penstock.engine.native.structures import structure
from penstock.engine.ranks.shared_memory import SharedMemoryGroup


def samples(model: LlamaModel) -> list[Packable]:
    """Returns a layer of each format. Raises UnsupportedWeightFormat for one that no `Packer`
    packs."""
    found: dict[str, Packable] = {}
    ends = (model.fc,) if isinstance(model, MtpHead) else (model.lm_head,)
    for linear in (*ends, *(each for part in model.parts for each in part.linears.values())):
        for layer in stored(linear):
            found.setdefault(layer.weight_format, layer)
    return list(found.values())


def pack_model(
    packer: Packer,
    model: LlamaModel,
    pool: LayerPools,
    threads: int,
    target: Structure | None = None,
) -> tuple[Structure, list[Structure]]:
    """Returns the `Model`, and its layers, whose formats `samples` has checked. target: that of the
    served model, for a head that drafts for it."""
    config = model.config
    if target is None:
        embedding, head = _pack_ends(packer, model)
    else:
        embedding = target.embedding
        head = packer.filled("Head", model, config.head, linear=target.head.linear)
    attention, inputs = _AttentionPacker(packer, model, pool), model.per_layer_inputs
    latents = (each for each in config.attentions if isinstance(each, LatentAttention))
    with ThreadPoolExecutor(threads) as workers:
        pack = partial(_pack_layer, packer, attention)
        layers = list(workers.map(pack, range(config.num_layers), model.layers))
    kinds = attention.kinds()
    sources = () if inputs is None else (inputs, inputs.config)
    alpha, limit = (config.experts and config.experts.activation.clamp) or (0.0, 0.0)
    packed = structure("Model")(
        num_layers=config.num_layers,
        hidden=config.hidden_size,
        heads=config.num_heads,
        mlp=max(
            *(max(layer.mlp.size, layer.experts.shared.size) for layer in layers),
            inputs.shape[1] if inputs else 0,
        ),
        block_size=attention.block_size,
        kinds=packer.array("Heads", kinds),
        num_kinds=len(kinds),
        eps=config.norm.eps,
        layers=packer.array("Layer", layers),
        whole_qk_norm=any(attention.norms_whole for attention in config.attentions),
        has_post_norms=any(layer.norms.post for layer in config.layers),
        gelu=max(
            layer.mlp.activation.is_gelu + layer.mlp.activation.is_exact if layer.mlp else 0
            for layer in config.layers
        ),
        is_centred=config.norm.is_centred,
        norms_values=any(attention.norms_values for attention in config.attentions),
        latents=packer.filled("Latents", next(latents, None)),
        embedding=embedding,
        head=head,
        experts=packer.filled("Experts", config.experts, swiglu_alpha=alpha, swiglu_limit=limit),
        inputs=packer.filled("PerLayerInputs", *sources),
        merge=packer.filled("Merge", *([model] if isinstance(model, MtpHead) else ())),
        ranks=_ranks(model),
    )
    return packed, layers


class _AttentionPacker:
    """See `AttentionLayer` and `Heads` of structs.h."""

    def __init__(self, packer: Packer, model: LlamaModel, pool: LayerPools) -> None:
        self._packer, self._model, self.pool = packer, model, pool
        # The first layer of each kind of heads.
        self._firsts: dict[KVHeads, int] = {}
        for index, config in enumerate(model.config.layers):
            if config.attention is not None:
                self._firsts.setdefault(config.attention.heads, index)
        self._kinds = list(self._firsts)

    @property
    def block_size(self) -> int:
        """Returns 0 where no layer has attention."""
        return next((self.pool.layer(first)[0].shape[1] for first in self._firsts.values()), 0)

    def kinds(self) -> Sequence[Structure]:
        tables = self._model.rotary.layers
        return [
            self._packer.filled("Heads", heads, tables[first], kv_heads=heads.num_kv_heads)
            for heads, first in self._firsts.items()
        ]

    def layer(self, index: int, layer: AttentionLayer | LatentAttentionLayer) -> Structure:
        packer, angles = self._packer, self._model.rotary.layers[index]
        num_rows = len(angles.cos) if angles.cos.stride(0) else 1
        both = self.pool.layer(index)
        given: dict[str, int | None] = {}
        if isinstance(layer, LatentAttentionLayer):  # its values are in its keys
            both = both[0], both[0]
            given = dict.fromkeys(("query_norm", "key_norm", "sinks"))
            given |= dict.fromkeys(("kv_parts", "has_gates", "has_spans", "is_two_sided"), 0)
        else:
            given["kv_parts"] = layer.config.num_kv_parts
        (keys, key_scales), (values, value_scales) = map(self._pages, both)
        return packer.filled(
            "AttentionLayer",
            layer,
            layer.config,
            keys=keys,
            values=values,
            key_scales=key_scales,
            value_scales=value_scales,
            cos=packer.address(angles.cos[:num_rows]),
            sin=packer.address(angles.sin[:num_rows]),
            angles_step=angles.cos.stride(0),
            group=self.pool.group_of(index),
            heads=self._kinds.index(layer.config.heads),
            **given,
        )

    def _pages(self, pages: KVPages) -> tuple[int | None, int | None]:
        """Returns where keys or values are, and their scales if they are codes."""
        if isinstance(pages, Codes):
            return self._packer.address(pages.codes), self._packer.address(pages.scales)
        return self._packer.address(pages), None


def _pack_layer(
    packer: Packer, attention: _AttentionPacker, index: int, layer: DecoderLayer
) -> Structure:
    norms, mlp = layer.norms, layer.mlp
    given: dict[str, Structure] = {}
    if isinstance(layer.mixer, DeltaNetLayer):
        given["delta_net"] = _pack_delta_net(packer, layer.mixer, attention.pool, index)
    else:
        given["attention"] = attention.layer(index, layer.mixer)
    if isinstance(layer.mixer, LatentAttentionLayer):
        given["latent"] = _pack_latent(packer, layer.mixer)
    if mlp is not None:
        given["mlp"] = _pack_mlp(packer, mlp.gate_up, mlp.down, mlp.config.size, mlp.config)
    if layer.experts is not None:
        given["experts"] = _pack_experts(packer, layer.experts, norms.mlp_norm)
    if layer.per_layer_input is not None:
        given["input"] = packer.filled("PerLayerInput", layer.per_layer_input)
    scalar = 1.0 if norms.scalar is None else float(norms.scalar)
    return packer.filled("Layer", norms, scalar=scalar, **given)


def _pack_delta_net(packer: Packer, net: DeltaNetLayer, pool: LayerPools, index: int) -> Structure:
    matrices, inputs = map(packer.address, pool.states(index))
    packed = packer.filled(
        "DeltaNetLayer",
        net,
        net.config,
        matrices=matrices,
        inputs=inputs,
        group=pool.group_of(index),
        projections=(structure("Linear") * 4)(*packer.linears(net.qkv)),
    )
    gates = packer.linears(net.gates)
    packed.projections[2 : 2 + len(gates)] = gates
    return packed


def _pack_latent(packer: Packer, layer: LatentAttentionLayer) -> Structure:
    """Both matrices of a head are packed where they are, the first one mirrored."""
    to_latents, to_values = [], []
    for keys, values in zip(*layer.expansions, strict=True):
        mirrored = keys.t().contiguous()
        to_latents.append(PlainLinear(keys.view(mirrored.shape).copy_(mirrored), None))
        to_values.append(PlainLinear(values, None))
    return packer.filled(
        "LatentLayer",
        layer,
        to_latents=packer.array("Linear", list(map(packer.packed, to_latents))),
        to_values=packer.array("Linear", list(map(packer.packed, to_values))),
    )


def _pack_mlp(
    packer: Packer, gate_up: Linear, down: Linear, size: int, config: MLP | None = None
) -> Structure:
    """config: None for a shared expert's."""
    if config is not None and not config.has_gate:
        [only] = packer.linears(gate_up, size)
        return structure("MlpLayer")(size=size, gate=only, down=packer.linear(down))
    gate, up = packer.linears(gate_up, size, size)
    if config is not None and config.has_up_first:
        gate, up = up, gate
    return structure("MlpLayer")(size=size, gate=gate, up=up, down=packer.linear(down))


def _pack_experts(packer: Packer, layer: ExpertsLayer, mlp_norm: Tensor | None) -> Structure:
    """mlp_norm: the norm of what router and experts read where the layer has no MLP."""
    num, size = layer.config.num_experts, layer.config.size
    gates_and_ups = packer.linears(layer.gate_up, *[size] * (2 * num))
    downs = packer.linears(layer.down, *[layer.config.hidden_size] * num)
    each = zip(gates_and_ups[::2], gates_and_ups[1::2], downs, strict=True)
    experts = [structure("Expert")(*expert) for expert in each]
    given: dict[str, int | None] = {}
    if not layer.config.is_beside_mlp:
        given = dict.fromkeys(("router_norm", "input_norm"), packer.norm(mlp_norm))
        given |= dict.fromkeys(("factors", "mlp_norm", "output_norm"))
    packed = packer.filled("ExpertsLayer", layer, each=packer.array("Expert", experts), **given)
    if size := layer.config.shared_size:
        if layer.config.has_shared_gate:
            packed.router[1] = packer.linear(layer.shared_gate)
        packed.shared = _pack_mlp(packer, layer.shared_gate_up, layer.shared_down, size)
    return packed


def _pack_ends(packer: Packer, model: LlamaModel) -> tuple[Structure, Structure]:
    """Returns the embedding and the head, which may be the same matrix."""
    config, table = model.config, model.embedding
    [output] = parts(model.lm_head, packer.dtype)
    # Without an output layer the embedding stays as it is, and an encoder's rows torch gathers.
    has_head = len(model.norm) > 0 and config.generates
    given = {"linear": packer.packed(output)} if has_head else {}
    head = packer.filled("Head", model, config.head, **given)
    # Codes that are widened, as of odd columns, are not the embedding, which was never rounded.
    is_shared = has_head and config.head.is_tied and output is model.lm_head
    shared = output if is_shared and isinstance(output, PlainLinear) else None
    embedding = structure("Embedding")(
        table=packer.address(shared.weight if shared else table),  # once in memory
        is_in_bands=shared is not None,
        rows=config.vocab_size,
        multiplier=multiplier(config.embedding, packer.dtype),
    )
    return embedding, head


def _ranks(model: LlamaModel) -> Structure:
    if model.group is None:
        return structure("Ranks")()
    assert isinstance(model.group, SharedMemoryGroup), model.group
    group, all_reduce = model.group.all_reduce_lane
    num, first_id = model.group.size, model.shard.first_id
    return structure("Ranks")(group=group, all_reduce=all_reduce, num=num, first_id=first_id)
