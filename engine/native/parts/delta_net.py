"""`NativeRecurrence`: the recurrence of gated delta nets in C++ (recurrence.cpp)."""

import ctypes
import weakref
from ctypes import c_int64, c_void_p
from itertools import accumulate, chain

import torch
from torch import Tensor

from penstock.engine.models.parts.delta_net.layer import DeltaNetLayer, Segments
from penstock.engine.native.structures import structure

_DELTA_NET = structure("DeltaNet", "models/parts/delta_net/recurrence.cpp")


class NativeRecurrence:
    """See `penstock.engine.models.parts.delta_net.layer.Recurrence`."""

    def __init__(self, library: ctypes.CDLL, num_threads: int) -> None:
        """library: see `load_delta_net_library`."""
        self._advance = library.penstock_delta_net
        self._advance.argtypes = (c_void_p, c_void_p)
        library.penstock_delta_net_team.restype = c_void_p
        self._team = c_void_p(library.penstock_delta_net_team(c_int64(num_threads)))
        weakref.finalize(self, library.penstock_delta_net_end, self._team)

    def __call__(
        self,
        layer: DeltaNetLayer,
        projected: Tensor,
        gates: Tensor,
        matrices: Tensor,
        inputs: Tensor,
        segments: Segments,
    ) -> Tensor:
        config = layer.config
        out = torch.empty(len(projected), config.num_values)
        projected, gates = projected.contiguous(), gates.contiguous()
        weights = (layer.taps, layer.decay, layer.bias, layer.norm)
        assert all(each.is_contiguous() for each in (*weights, matrices, inputs))
        numbers = list(chain.from_iterable(chain.from_iterable(segments)))
        each = (c_int64 * len(numbers))(*numbers)
        starts = [0, *accumulate(map(len, segments))]
        first_segments = (c_int64 * len(starts))(*starts)
        net = _DELTA_NET(
            key_heads=config.num_key_heads,
            value_heads=config.num_value_heads,
            key_dim=config.key_dim,
            value_dim=config.value_dim,
            num_taps=config.num_taps,
            eps=layer.eps,
            taps=layer.taps.data_ptr(),
            decay=layer.decay.data_ptr(),
            bias=layer.bias.data_ptr(),
            norm=layer.norm.data_ptr(),
            sequences=len(segments),
            segments=ctypes.addressof(each),
            first_segments=ctypes.addressof(first_segments),
            projected=projected.data_ptr(),
            gates=gates.data_ptr(),
            matrices=matrices.data_ptr(),
            inputs=inputs.data_ptr(),
            out=out.data_ptr(),
        )
        self._advance(self._team, ctypes.byref(net))
        return out
