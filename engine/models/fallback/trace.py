"""Finds how a class's layers call attention, by one pass of a few tokens through it.

The class says by its masks which positions a token attends to. What makes a mask is asked about
positions that no short prompt has, up to the longest sequence.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface
from transformers.masking_utils import AttentionMaskInterface, eager_mask

from penstock.engine.kernels.attention.gathered import visible
from penstock.engine.models.fallback.attention import (
    PAGED,
    TRACED,
    AttentionLayer,
    Call,
    attend_densely,
    attention_function,
)
from penstock.engine.models.fallback.source import UnsupportedClass

# A class may hand these to attention without a change of the result: dropout, which is off;
# what its mask says too; what asks for other outputs.
_WITHOUT_EFFECT = frozenset(
    {
        *("dropout", "sliding_window", "is_causal", "position_ids", "position_embeddings"),
        *("use_cache", "cache_position", "output_attentions", "output_hidden_states"),
        *("output_router_logits", "return_dict", "past_key_values", "num_items_in_batch"),
    }
)
_UNDERSTOOD = frozenset({"scaling", "softcap", "s_aux"})
# Where what a mask says is compared with causal attention and a window.
_NUM_PROBES = 16

# True where the query at a position attends to the key at another; all arguments are tensors.
_SeesKey = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]


def register() -> None:
    """Makes the names in `attention` known to transformers."""
    AttentionInterface.register(PAGED, attention_function)
    AttentionInterface.register(TRACED, attention_function)
    AttentionMaskInterface.register(TRACED, _traced_mask)


def _traced_mask(*, mask_function: _SeesKey, **options: Any) -> Tensor | None:
    """A mask as any, which remembers what made it. None where a class needs none."""
    mask: Tensor | None = eager_mask(mask_function=mask_function, **options)
    if mask is not None:
        mask.penstock_sees_key = mask_function  # type: ignore[attr-defined]
    return mask


class Trace:
    """See `Attends`: a pass that finds the layers. Attention itself is dense."""

    def __init__(self, architecture: str, max_model_len: int) -> None:
        self._architecture = architecture
        self._max_model_len = max_model_len
        self._windows: dict[_SeesKey, int | None] = {}
        self.layers: dict[nn.Module, AttentionLayer] = {}

    def __call__(self, call: Call) -> Tensor:
        module, query, key, value, mask, options = call
        for name, given in options.items():
            is_given = given is not None and given is not False
            if is_given and name not in _UNDERSTOOD | _WITHOUT_EFFECT:
                raise self._refuse(f"its attention also takes {name!r}, which ours does not")
        if module in self.layers:
            raise self._refuse("one of its layers attends twice")
        if key.shape[0] != query.shape[0] or value.shape[:2] != key.shape[:2]:
            raise self._refuse("its keys and values are not of this step's tokens alone")
        sees_key: _SeesKey | None = getattr(mask, "penstock_sees_key", None)
        if sees_key is None:
            raise self._refuse("its layers do not say by a mask which positions a token attends to")
        layer = AttentionLayer(
            index=len(self.layers),
            num_heads=query.shape[1],
            num_kv_heads=key.shape[1],
            key_dim=key.shape[2],
            value_dim=value.shape[2],
            window=self._window(sees_key, query.device),
        )
        self.layers[module] = layer
        positions = torch.arange(len(query), device=query.device)
        key, value = key.transpose(0, 1), value.transpose(0, 1)
        return attend_densely(query, key, value, positions, layer.window, options)

    def _window(self, sees_key: _SeesKey, device: torch.device) -> int | None:
        if sees_key not in self._windows:
            with device:  # of what the function compares positions with
                self._windows[sees_key] = self._probed(sees_key)
        return self._windows[sees_key]

    def _probed(self, sees_key: _SeesKey) -> int | None:
        """The window by the last position, checked at others."""
        last = self._max_model_len - 1
        zero = torch.zeros((), dtype=torch.int64)
        keys = torch.arange(last + 2)

        def seen(position: int) -> Tensor:
            return torch.as_tensor(sees_key(zero, zero, torch.tensor(position), keys)).expand(
                len(keys)
            )

        count = int(seen(last).sum())
        window = None if count > last else count
        for position in {round(last * i / _NUM_PROBES) for i in range(_NUM_PROBES + 1)}:
            if not torch.equal(seen(position), visible(torch.tensor(position), last + 2, window)):
                raise self._refuse(
                    "some of its layers attend to other positions than all before a token, or the "
                    "last ones before it"
                )
        return window

    def _refuse(self, why: str) -> UnsupportedClass:
        return UnsupportedClass(self._architecture, why)
