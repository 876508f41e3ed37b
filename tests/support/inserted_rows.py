"""Prompts with inserts of random rows, and what a step needs to know of them."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from penstock.engine.encoders.positions import insert_positions, reaches
from penstock.engine.step.model_input import InsertedRows
from penstock.scheduler.types import Insert


def made_insert(
    start: int, grid: tuple[int, int, int], number: int = 0, *, is_whole: bool = False
) -> Insert:
    frames, rows, columns = grid
    digest = number.to_bytes(16, "big")
    return Insert(start, frames * rows * columns, digest, grid, is_whole=is_whole)


@dataclass(frozen=True, kw_only=True)
class InsertedPrompt:
    """rows: of all inserts, one after the other, (N, hidden_size). deepstack: (K, N, hidden_size),
    or None."""

    inserts: tuple[Insert, ...]
    rows: Tensor
    deepstack: Tensor | None

    @classmethod
    def random(
        cls, inserts: Sequence[Insert], hidden_size: int, *, num_deep: int = 0, seed: int = 5
    ) -> "InsertedPrompt":
        generator = torch.Generator().manual_seed(seed)
        num = sum(insert.num_tokens for insert in inserts)
        rows = torch.randn(num, hidden_size, generator=generator)
        deep = torch.randn(num_deep, num, hidden_size, generator=generator)
        return cls(inserts=tuple(inserts), rows=rows, deepstack=deep if num_deep else None)

    @property
    def places(self) -> Tensor:
        """Which tokens of the prompt they are: (N,) int64."""
        each = [torch.arange(each.start, each.start + each.num_tokens) for each in self.inserts]
        return torch.cat(each)

    def mask(self, num_tokens: int) -> Tensor:
        """(num_tokens,) bool: which of the prompt's tokens they are."""
        return torch.zeros(num_tokens, dtype=torch.bool).index_fill(0, self.places, True)


def of_inserts(
    query_starts: Sequence[int],
    rows: Sequence[tuple[int, int, int]],
    prompts: Mapping[int, InsertedPrompt],
) -> dict[str, Any]:
    """The fields of a `ModelInput` about inserts. query_starts: as of it. rows: slot, start and
    number of tokens of each. prompts: by slot."""
    if not any(slot in prompts for slot, *_ in rows):
        return {}
    at, own, deep, angles, ends = [], [], [], [], []
    has_spans = False
    for first, (slot, start, count) in zip(query_starts, rows, strict=False):
        end = start + count
        prompt = prompts.get(slot)
        inserts = () if prompt is None else prompt.inserts
        angles.append(insert_positions(inserts, start, end))
        reach = reaches(inserts, start, end)
        has_spans |= reach is not None
        ends.append(torch.arange(start + 1, end + 1) if reach is None else reach)
        if prompt is not None:
            here = (prompt.places >= start) & (prompt.places < end)
            at.append(prompt.places[here] - start + first)
            own.append(prompt.rows[here])
            if prompt.deepstack is not None:
                deep.append(prompt.deepstack[:, here])
    inserted = InsertedRows(torch.cat(own), torch.cat(at), torch.cat(deep, 1) if deep else None)
    return {
        "inserted": inserted if len(inserted.at) else None,
        "angle_positions": torch.cat(angles, 1),
        "reaches": torch.cat(ends) if has_spans else None,
    }
