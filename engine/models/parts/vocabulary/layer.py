"""The input embedding and the output layer in torch."""

import torch
from torch import Tensor
from torch.nn import functional

from penstock.engine.models.parts.norm.layer import normed
from penstock.engine.models.parts.reader import PartReader
from penstock.engine.models.parts.vocabulary.config import Embedding, Head


def embed(config: Embedding, table: Tensor, token_ids: Tensor) -> Tensor:
    """The states before the first layer: (T, hidden_size)."""
    states = functional.embedding(token_ids, table)
    return states if config.multiplier == 1 else states * multiplier(config, table.dtype)


class EmbeddedSums:
    """What is added to the rows of tokens, and the norm of the sum: see `Embedding`."""

    def __init__(self, config: Embedding, reader: PartReader) -> None:
        linears, self.config, self.eps = config.linears, config, reader.eps
        self.positions = reader.weight(linears["positions"]) if config.num_positions else None
        self.types = reader.weight(linears["types"]) if config.num_types else None
        self.norm = reader.vector(config.vectors["norm"]) if config.has_norm else None

    @classmethod
    def read(cls, config: Embedding, reader: PartReader) -> "EmbeddedSums | None":
        """Returns None where tokens are their rows alone."""
        return cls(config, reader) if config.has_norm else None

    @property
    def num_bytes(self) -> int:
        """Of the norm: a step gathers few rows of the tables."""
        return 0 if self.norm is None else self.norm.nbytes

    def __call__(self, rows: Tensor, positions: Tensor, segments: Tensor | None) -> Tensor:
        """rows: of the tokens, (T, hidden_size). positions: (T,) int64. segments: (T,) int64, which
        of the prompt's texts each is of, None for the first."""
        if self.positions is not None:
            rows = rows + functional.embedding(
                positions + self.config.first_position, self.positions
            )
        if self.types is not None:
            if segments is None or len(self.types) == 1:
                rows = rows + self.types[0]
            else:
                rows = rows + functional.embedding(segments, self.types)
        return normed(rows, self.norm, self.eps)


def multiplier(config: Embedding, dtype: torch.dtype) -> float:
    """Rounded to the type of the states, as Gemma was trained."""
    return float(torch.tensor(config.multiplier, dtype=dtype))


def scaled_logits(config: Head, logits: Tensor) -> Tensor:
    """Logits of what the output layer gives: float32."""
    logits = logits.float()
    if config.multiplier != 1:
        logits = logits * config.multiplier
    if config.softcap is not None:
        logits = torch.tanh(logits / config.softcap) * config.softcap
    return logits
