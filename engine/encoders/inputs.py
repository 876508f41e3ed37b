"""What a step's input says of the inserts of its sequences."""

from collections.abc import Callable, Mapping
from dataclasses import replace

import torch
from torch import Tensor

from penstock.engine.encoders.encoder import InsertRows
from penstock.engine.encoders.positions import insert_positions, reaches
from penstock.engine.step.model_input import InsertedRows, ModelInput
from penstock.scheduler.types import Insert, ScheduledBatch


def with_inserts(
    step: ModelInput,
    batch: ScheduledBatch,
    inserts_of: Mapping[int, tuple[Insert, ...]],
    rows_of: Callable[[Insert], InsertRows],
) -> ModelInput:
    """inserts_of: by slot, where there are any. rows_of: the rows of one that is encoded."""
    if not any(slot in inserts_of for slot in batch.slots):
        return step
    at: list[Tensor] = []
    made: list[InsertRows] = []
    angles, ends, has_spans = [], [], False
    rows = zip(step.query_starts, batch.slots, batch.starts, batch.num_tokens, strict=False)
    for first, slot, start, num_tokens in rows:
        end, inserts = start + num_tokens, inserts_of.get(slot, ())
        angles.append(insert_positions(inserts, start, end))
        reach = reaches(inserts, start, end)
        has_spans |= reach is not None
        ends.append(torch.arange(start + 1, end + 1) if reach is None else reach)
        for each in inserts:
            here = range(max(start, each.start), min(end, each.end))
            if here:
                at.append(torch.arange(here.start, here.stop) - start + first)
                own = slice(here.start - each.start, here.stop - each.start)
                embeddings, deepstack = rows_of(each)
                deepstack = None if deepstack is None else deepstack[:, own]
                made.append(InsertRows(embeddings[own], deepstack))
    inserted = None
    if made:
        deep = [each.deepstack for each in made if each.deepstack is not None]
        inserted = InsertedRows(
            torch.cat([each.embeddings for each in made]),
            torch.cat(at),
            torch.cat(deep, 1) if deep else None,
        )
    return replace(
        step,
        inserted=inserted,
        angle_positions=torch.cat(angles, 1),
        reaches=torch.cat(ends) if has_spans else None,
    )
