"""A gated delta net: what a layer has in place of attention, and what torch computes with it.

Each value head keeps a matrix S, of key_dim rows and value_dim columns, that maps keys to values. A
token with query q, key k and value v, all of them heads of a short causal convolution, changes it
by the delta rule: what S gives for k is moved towards v, by the share beta, and what was there
before decays, by the factor exp(g):

    S <- exp(g) S;  S <- S + k (beta (v - k S));  o = q S

The tokens of a sequence are computed one after the other, so that what is kept of a sequence has
the same bits however its tokens are divided into steps. `recurrence.h` computes
the same. Source: Yang et al. 2024 (arXiv:2412.06464); the layer is Qwen3.5's.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from penstock.engine.models.layers.linear import Linear
from penstock.engine.models.parts.adapter import adapted
from penstock.engine.models.parts.delta_net.config import DeltaNet
from penstock.engine.models.parts.reader import PartLayer, PartReader
from penstock.engine.models.parts.tensors import Stack
from penstock.engine.step.model_input import AdapterRun, ModelInput

_L2_EPS = 1e-6


class Segment(NamedTuple):
    """Tokens from `first` to before `end` of a step, all of one sequence. They begin with the state
    `source`, with zeros where that is -1, and theirs becomes the state `target`."""

    first: int
    end: int
    source: int
    target: int


# A step has segments of each sequence: each begins where the one before ended.
Segments = Sequence[Sequence[Segment]]


def segments_of(step: ModelInput) -> Segments:
    """step: as the layers with a recurrence see it."""
    states = step.block_tables[:, 0].tolist()
    snapshots: dict[int, list[tuple[int, int]]] = {}
    for row, num_tokens, state in step.snapshots:
        snapshots.setdefault(row, []).append((num_tokens, state))
    found = []
    for row, own in enumerate(states):
        first, end = step.query_starts[row], step.query_starts[row + 1]
        source = -1 if step.context_lens[row] == end - first else own
        segments = []
        start = first
        for num_tokens, state in snapshots.get(row, ()):
            segments.append(Segment(start, first + num_tokens, source, state))
            start, source = first + num_tokens, state
        found.append([*segments, Segment(start, end, source, own)])
    return found


def torch_recurrence(
    layer: "DeltaNetLayer",
    projected: Tensor,
    gates: Tensor,
    matrices: Tensor,
    inputs: Tensor,
    segments: Segments,
) -> Tensor:
    """Returns what the layer's output projection reads, (T, values) float32, and writes the states
    of the segments.

    projected: (T, channels + values) float32, the convolution's inputs and the output gate. gates:
    (T, 2 * num_value_heads) float32. matrices, inputs: see `StatePool`.
    """
    config = layer.config
    out = projected.new_empty(len(projected), config.num_values)
    for first, end, source, target in (each for of_one in segments for each in of_one):
        matrix = torch.zeros_like(matrices[0]) if source < 0 else matrices[source].clone()
        window = torch.zeros_like(inputs[0]) if source < 0 else inputs[source].clone()
        for token in range(first, end):
            window = torch.cat((window, projected[token : token + 1, : config.num_channels]))
            mixed = functional.silu((window * layer.taps).sum(0))
            window = window[1:]
            query, key, value = _heads(config, mixed)
            beta, decay = gates[token].chunk(2)
            decay = layer.decay * functional.softplus(decay + layer.bias)
            matrix = matrix * decay.exp().view(-1, 1, 1)
            known = (key.unsqueeze(1) @ matrix).squeeze(1)
            added = (value - known) * beta.sigmoid().unsqueeze(1)
            matrix = matrix + key.unsqueeze(2) * added.unsqueeze(1)
            out[token] = (query.unsqueeze(1) @ matrix).flatten()
        matrices[target], inputs[target] = matrix, window
    heads = out.view(len(out), config.num_value_heads, config.value_dim)
    normed = functional.rms_norm(heads, layer.norm.shape, layer.norm, layer.eps)
    gate = projected[:, config.num_channels :].view_as(heads)
    return (normed * functional.silu(gate)).flatten(1)


def _heads(config: DeltaNet, mixed: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Returns, by value head, two (num_value_heads, key_dim) and (num_value_heads, value_dim)."""
    sizes = [config.num_keys, config.num_keys, config.num_values]
    query, key, value = torch.split(mixed, sizes)
    num_served = config.num_value_heads // config.num_key_heads

    def served(x: Tensor) -> Tensor:
        x = x.view(config.num_key_heads, config.key_dim)
        normed = x * torch.rsqrt((x * x).sum(-1, keepdim=True) + _L2_EPS)
        return normed.repeat_interleave(num_served, 0)

    return served(query) * config.key_dim**-0.5, served(key), value.view(-1, config.value_dim)


class DeltaNetLayer(PartLayer[DeltaNet]):
    """gates: give beta of each value head, and then what its decay is made of. qkv: the inputs of
    the convolution, and output gates. In float32 are taps: (num_taps, channels), of queries, keys
    and values; decay: -exp(A_log), and bias: (num_value_heads,); norm: (value_dim,)."""

    gates: Linear
    qkv: Linear
    output: Linear
    taps: Tensor
    decay: Tensor
    bias: Tensor
    norm: Tensor

    def __init__(self, config: DeltaNet, reader: PartReader) -> None:
        super().__init__(config, reader)
        self.taps = self.taps.squeeze(1).t().contiguous()
        self.decay = -self.decay.exp()

    def __call__(
        self,
        x: Tensor,
        matrices: Tensor,
        inputs: Tensor,
        segments: Segments,
        runs: tuple[AdapterRun, ...] = (),
        index: int = 0,
    ) -> Tensor:
        """Returns its output for x, (T, hidden_size), on this rank. runs, index: the tokens with
        adapters, and which layer of the model it is. The rest: see `torch_recurrence`."""
        projected = adapted(self.qkv, x, runs, index, Stack.QKV).float()
        gates = adapted(self.gates, x, runs, index, Stack.GATES).float()
        given = torch_recurrence(self, projected, gates, matrices, inputs, segments)
        return adapted(self.output, given.to(x.dtype), runs, index, Stack.OUTPUT)
