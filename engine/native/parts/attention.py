"""Packs attention: see `AttentionLayer` and `Heads` of structs.h."""

from collections.abc import Sequence
from ctypes import Structure

from penstock.engine.memory.pool.kv_codes import Codes, KVPages
from penstock.engine.memory.pool.kv_pool import LayerPools
from penstock.engine.memory.pool.kv_shape import KVHeads
from penstock.engine.models.decoder.model import LlamaModel
from penstock.engine.native.packing import Packer


class AttentionPacker:
    def __init__(self, packer: Packer, model: LlamaModel, pool: LayerPools) -> None:
        self._packer, self._model, self._pool = packer, model, pool
        # The first layer of each kind of heads.
        self._firsts: dict[KVHeads, int] = {}
        for index, layer in enumerate(model.layers):
            self._firsts.setdefault(layer.attention.config.heads, index)
        self._kinds = list(self._firsts)

    def kinds(self) -> Sequence[Structure]:
        tables = self._model.rotary.layers
        return [
            self._packer.filled("Heads", heads, tables[first], kv_heads=heads.num_kv_heads)
            for heads, first in self._firsts.items()
        ]

    def layer(self, index: int) -> Structure:
        packer, angles = self._packer, self._model.rotary.layers[index]
        layer = self._model.layers[index].attention
        num_rows = len(angles.cos) if angles.cos.stride(0) else 1
        (keys, key_scales), (values, value_scales) = map(self._pages, self._pool.layer(index))
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
            group=self._pool.group_of(index),
            heads=self._kinds.index(layer.config.heads),
            kv_parts=layer.config.num_kv_parts,
        )

    def _pages(self, pages: KVPages) -> tuple[int | None, int | None]:
        """Returns where keys or values are, and their scales if they are codes."""
        if isinstance(pages, Codes):
            return self._packer.address(pages.codes), self._packer.address(pages.scales)
        return self._packer.address(pages), None
