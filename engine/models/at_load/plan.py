"""Which linear layers are rounded to how many bits, and how many bytes that makes of a model.

Nothing is read here: a model is planned with tensors that have shapes and no data.
"""

from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from penstock.engine.config import Quantization
from penstock.engine.models.at_load.rounding import GROUP_SIZE, Codes
from penstock.engine.models.at_load.weights import Part, QuantizedWeights
from penstock.engine.models.config import ModelConfig
from penstock.engine.models.decoder.model import LlamaModel
from penstock.engine.models.division.stage import Stage
from penstock.engine.models.formats.kept import CodePolicy
from penstock.engine.models.layers.linear import PlainLinear
from penstock.engine.models.parts.attention.config import Attention
from penstock.engine.models.parts.reader import WeightSource

# Counts changes of the rounding, of the layers of 8 bits, and of the text: part of the cache's key.
VERSION = 1
# Rows this short are of models so small that 4 bits save little and cost much.
_LEAST_COLUMNS_OF_4_BITS = 256
# These stay plain: gates of delta nets, few rows of which a state forgets or keeps what it has, and
# what latent attention computes with other than by products.
_PLAIN = (".linear_attn.in_proj_a", ".self_attn.kv_b_proj")
_META = torch.device("meta")


@dataclass(frozen=True, slots=True)
class Scheme:
    """A method for one model, or for a part of one. first_layer: of the whole, where the part has
    layers from that on; names count from it, and `model` from 0."""

    method: Quantization
    model: ModelConfig
    first_layer: int = 0

    def parts(self, names: tuple[str, ...], rows: int, in_features: int) -> list[Part]:
        """The parts of a layer that is stacked from `names`, in the order of its rows; none where
        it stays plain."""
        if names[-1].endswith(_PLAIN):
            return []
        if len(names) > 1 and names[-1].endswith(".v_proj"):
            index = int(names[-1].removeprefix("model.layers.").partition(".")[0])
            attention = self.model.layers[index - self.first_layer].attention
            assert isinstance(attention, Attention), names
            values = attention.kv_size
            stacked = [(names[:-1], rows - values), (names[-1:], values)]
        else:
            stacked = [(names, rows)]
        parts: list[Part] = []
        for group, num_rows in stacked:
            kind = self._kind(group[-1], in_features)
            if parts and parts[-1].kind is kind:
                before = parts.pop()
                group, num_rows = before.names + group, before.rows + num_rows
            parts.append(Part(group, num_rows, in_features, kind))
        return parts

    def _kind(self, name: str, in_features: int) -> Quantization:
        if self.method is not Quantization.INT4:
            return self.method
        if in_features < _LEAST_COLUMNS_OF_4_BITS:
            return Quantization.INT8
        # Measured on the demo model: at 8 bits, these lower the KL divergence by the most for each
        # byte that they add. Q4_K_M of llama.cpp keeps more bits for the same two.
        return (
            Quantization.INT8
            if name == "lm_head" or name.endswith(".v_proj")
            else Quantization.INT4
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """A model before it is read.

    weight_bytes: of all its weights. step_weight_bytes: as in `ModelInfo.weight_bytes`.
    expert_bytes: of all experts. parts: in the order in which a model reads them.
    """

    scheme: Scheme
    parts: tuple[Part, ...]
    weight_bytes: int
    step_weight_bytes: int
    expert_bytes: int

    @classmethod
    def of(
        cls,
        scheme: Scheme,
        dtype: torch.dtype,
        kept: CodePolicy | None = None,
        stage: Stage | None = None,
    ) -> "Plan":
        """dtype: of what stays unquantized: the embedding, norms and biases. kept: as in
        `QuantizedWeights`, for tensors without data. stage: whose layers the scheme is for, where
        there are several."""
        parts: list[Part] = []

        def shapes_of(part: Part) -> Codes:
            parts.append(part)
            return part.empty(_META)

        source = QuantizedWeights(_Shapes(dtype), scheme.parts, shapes_of, kept)
        model = LlamaModel(
            scheme.model,
            source if stage is None else stage.of(source),
            PlainLinear,
            max_model_len=1,
            device=_META,
            stage=stage,
            dtype=dtype,
        )
        return cls(
            scheme=scheme,
            parts=tuple(parts),
            weight_bytes=model.step_weight_bytes + model.expert_bytes + model.embedding.nbytes,
            step_weight_bytes=model.step_weight_bytes,
            expert_bytes=model.expert_bytes,
        )

    @property
    def weight_formats(self) -> frozenset[str]:
        return frozenset(part.weight_format for part in self.parts)

    @property
    def num_weights(self) -> int:
        """How many weights the linear layers have."""
        return sum(part.rows * part.in_features for part in self.parts)

    @property
    def group_size(self) -> int | None:
        """Weights of a row that have a scale of their own; None for all."""
        return None if self.scheme.method is Quantization.FP8 else GROUP_SIZE

    @property
    def bits_per_weight(self) -> float:
        """The mean of the linear layers, scales included."""
        sizes = (part.empty(_META) for part in self.parts)
        return 8 * sum(of.codes.nbytes + of.scales.nbytes for of in sizes) / self.num_weights


class _Shapes(WeightSource):
    """A source of weights without data."""

    def __init__(self, dtype: torch.dtype) -> None:
        self._empty = partial(torch.empty, dtype=dtype, device=_META)

    def read(self, shape: tuple[int, ...], *names: str, dtype: torch.dtype | None = None) -> Tensor:
        return self._empty(shape)
