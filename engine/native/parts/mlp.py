"""Packs an MLP: see `MlpLayer` of structs.h."""

from ctypes import Structure

from penstock.engine.models.parts.mlp.layer import MLPLayer
from penstock.engine.native.packing import Packer
from penstock.engine.native.structures import structure

_LAYER = structure("MlpLayer")


def pack_mlp(packer: Packer, layer: MLPLayer) -> Structure:
    size = layer.config.size
    gate, up = packer.linears(layer.gate_up, size, size)
    return _LAYER(size=size, gate=gate, up=up, down=packer.linear(layer.down))
