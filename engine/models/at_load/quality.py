"""How much of a model is lost when its weights are rounded: both models on one text.

Both are computed layer by layer, side by side, so that no more than one layer of each is in memory
for it. In float32: what bfloat16 rounds of the states would hide what 8 bits do to the weights.
The rounding of states, as products of the compiled step have it, is not part of the figures.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path

import torch
from tokenizers import Tokenizer
from torch import Tensor

from penstock.engine.memory.pool.kv_codes import KVPages
from penstock.engine.memory.pool.kv_pool import KVPool
from penstock.engine.memory.pool.kv_shape import KVShape
from penstock.engine.memory.pool.state_pool import StatePool
from penstock.engine.models.config import ModelConfig
from penstock.engine.models.decoder.model import read_layer
from penstock.engine.models.layers.linear import PlainLinear
from penstock.engine.models.parts.attention.rotary import RotaryTables
from penstock.engine.models.parts.delta_net.layer import DeltaNetLayer, segments_of
from penstock.engine.models.parts.norm.layer import rms_norm
from penstock.engine.models.parts.per_layer_inputs.layer import PerLayerInputsTable
from penstock.engine.models.parts.reader import PartReader, WeightSource
from penstock.engine.models.parts.vocabulary.layer import embed, scaled_logits
from penstock.engine.step.model_input import ModelInput

# More take longer than the rounding itself: each weight is multiplied by each token in both models.
_MAX_TOKENS = 256
_CPU = torch.device("cpu")
# Rows of logits that are compared together.
_NUM_ROWS = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class Quality:
    """How far the quantized model is from the unquantized one.

    kl_divergence: the mean over the tokens, in nats; kl_divergence_p99: its 99th percentile.
    top1_agreement: the share of tokens after which both find the same one likeliest. perplexity:
    of the quantized model on the text.
    """

    num_tokens: int
    kl_divergence: float
    kl_divergence_p99: float
    top1_agreement: float
    perplexity: float
    unquantized_perplexity: float


def token_ids_of_text(model_dir: Path, model: ModelConfig) -> list[int]:
    """The text that the figures are for. Empty where there is no tokenizer.json to read it with,
    and for an encoder, which has no distribution of a next token."""
    path = model_dir / "tokenizer.json"
    if not model.generates or not path.is_file():
        return []
    text = files(__package__).joinpath("text.txt").read_text(encoding="utf-8")
    token_ids: list[int] = Tokenizer.from_file(str(path)).encode(text).ids
    if max(token_ids) >= model.vocab_size:  # no tokenizer of this model's
        return []
    return token_ids[: min(_MAX_TOKENS, model.max_model_len)]


def compare(
    model: ModelConfig,
    unquantized: WeightSource,
    quantized: WeightSource,
    token_ids: list[int],
    device: torch.device = _CPU,
) -> Quality:
    """Both sources give the weights of `model` on this device, plain ones in float32. At least two
    tokens."""
    sides = (unquantized, quantized)
    step = _prompt(token_ids, device)
    attentions = (layer.attention for layer in model.layers)
    angles = RotaryTables(attentions, len(token_ids), device).at(step.positions)
    embedding = unquantized.read((model.vocab_size, model.hidden_size), "model.embed_tokens.weight")
    states = [embed(model.embedding, embedding, step.token_ids)] * 2
    del embedding
    inputs = [
        _inputs(model, weights, step.token_ids, before)
        for weights, before in zip(sides, states, strict=True)
    ]
    pools = [_OneByOne(model.kv_shape, len(token_ids), device) for _ in sides]
    for index in range(model.num_layers):
        after = []
        for weights, before, pool, own in zip(sides, states, pools, inputs, strict=True):
            layer = read_layer(model, weights, PlainLinear, index)
            x, mixer = layer.normed(before), layer.mixer
            if isinstance(mixer, DeltaNetLayer):
                state = StatePool(mixer.config.state_shape(1), 1, device).layer(0)
                mixed = mixer(x, *state, segments_of(step))
            else:
                mixed = mixer(x, index, angles[index], *pool.layer(index), step)
            after.append(layer.go_on(index, before, mixed, step, own[index]))
        states = after
    return _compared(
        [_logits(model, *side) for side in zip(sides, states, strict=True)], step.token_ids
    )


def _inputs(
    model: ModelConfig, weights: WeightSource, token_ids: Tensor, embedded: Tensor
) -> Sequence[Tensor | None]:
    """Returns the layers' own inputs, where the model has any."""
    if model.per_layer_inputs is None:
        return [None] * model.num_layers
    reader = PartReader(weights, PlainLinear, model.norm)
    return PerLayerInputsTable(model.per_layer_inputs, reader, maps_table=True)(token_ids, embedded)


class _OneByOne:
    """Keys and values of one layer at a time, and of those that others read."""

    def __init__(self, kv: KVShape, num_tokens: int, device: torch.device) -> None:
        self._kv = kv
        self._num_tokens, self._device = num_tokens, device
        self._kept: dict[int, KVPool] = {}

    def layer(self, index: int) -> tuple[KVPages, KVPages]:
        source = self._kv.source_of(index)
        if source in self._kept:
            return self._kept[source].layer(0)
        one = KVShape((self._kv.heads[index],))
        pool = KVPool(one, 1, self._num_tokens, torch.float32, self._device)
        if self._kv.sources.count(source) > 1:
            self._kept[source] = pool
        return pool.layer(0)


def _logits(model: ModelConfig, weights: WeightSource, states: Tensor) -> Tensor:
    reader = PartReader(weights, PlainLinear, model.norm)
    norm, output = reader.vector(model.head.vectors["norm"]), model.head.linears["output"]
    shape = output.shape
    if not model.head.is_tied:
        head = reader.linear(output)
    else:
        head = weights.quantized(shape, None, "lm_head") or PlainLinear(
            weights.read(shape, "model.embed_tokens.weight"), None
        )
    return scaled_logits(model.head, head(rms_norm(states, norm, reader.eps)))


def _compared(logits: list[Tensor], token_ids: Tensor) -> Quality:
    """logits: of each token, (T, vocab_size), unquantized and quantized."""
    divergences, agreements, losses = [], [], []
    for first in range(0, len(token_ids), _NUM_ROWS):
        reference, rounded = (
            each[first : first + _NUM_ROWS].double().log_softmax(-1) for each in logits
        )
        divergences.append((reference.exp() * (reference - rounded)).sum(-1))
        agreements.append(reference.argmax(-1) == rounded.argmax(-1))
        following = token_ids[first + 1 : first + 1 + len(reference), None]
        losses.append(
            torch.stack(
                [-each[: len(following)].gather(-1, following) for each in (reference, rounded)]
            )
        )
    divergence = torch.cat(divergences)
    unquantized_loss, loss = torch.cat(losses, dim=1).mean((1, 2)).tolist()
    return Quality(
        num_tokens=len(token_ids),
        kl_divergence=float(divergence.mean()),
        kl_divergence_p99=float(divergence.quantile(0.99)),
        top1_agreement=float(torch.cat(agreements).double().mean()),
        perplexity=float(torch.tensor(loss).exp()),
        unquantized_perplexity=float(torch.tensor(unquantized_loss).exp()),
    )


def _prompt(token_ids: list[int], device: torch.device) -> ModelInput:
    """One sequence, which is in one block."""
    positions = torch.arange(len(token_ids), device=device)
    return ModelInput(
        token_ids=torch.tensor(token_ids, device=device),
        positions=positions,
        kv_slots=positions,
        block_tables=torch.zeros((1, 1), dtype=torch.int32, device=device),
        query_starts=[0, len(token_ids)],
        context_lens=[len(token_ids)],
        num_decodes=0,
        sample_rows=positions,
    )
