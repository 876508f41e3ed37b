"""Packs layers' own inputs: see `PerLayerInput` and `PerLayerInputs` of structs.h."""

from ctypes import Structure

from penstock.engine.models.parts.per_layer_inputs.layer import (
    PerLayerInputLayer,
    PerLayerInputsTable,
)
from penstock.engine.native.packing import Packer
from penstock.engine.native.structures import structure

_LAYER, _INPUTS = structure("PerLayerInput"), structure("PerLayerInputs")


def pack_input(packer: Packer, layer: PerLayerInputLayer) -> Structure:
    return _LAYER(
        gate=packer.linear(layer.gate),
        projection=packer.linear(layer.projection),
        norm=packer.norm(layer.norm),
    )


def pack_inputs(packer: Packer, table: PerLayerInputsTable | None) -> Structure:
    if table is None:
        return _INPUTS()
    return _INPUTS(
        projection=packer.linear(table.projection),
        norm=packer.norm(table.norm),
        size=table.shape[1],
        scale=table.scale,
    )
