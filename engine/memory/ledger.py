"""The ledger of a device's memory, which a start writes into the log."""

import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from penstock.engine.memory.pool.kv_layout import GroupPool
from penstock.engine.memory.pool.kv_pool import PoolSize
from penstock.scheduler.groups import StateGroup

logger = logging.getLogger(__name__)

# The order of the lines in the log.
_LINES = (
    *("weights", "encoder", "adapters", "kv_pool", "draft_model", "drafts", "activations"),
    *("graphs", "staging"),
    *("others", "free", "total"),
)
_ADAPTERS = "--max-loras of them, of --max-lora-rank"
_DRAFT_MODEL = "with keys and values of its own in as many blocks"


@dataclass(slots=True, kw_only=True)
class Ledger:
    """Where a device's memory goes, in bytes.

    others: in use before the start. adapters: of the most LoRA adapters of the highest rank; a GPU
    has it from the start, and a processor takes it as they are loaded. activations: the most that a
    step needs besides the rest. drafts: what a step keeps of drafts in recurrent layers, until it
    is known which are right, at most. staging: of blocks on their way to the host's memory and
    back. draft_model: its weights, and its keys and values. encoder: of images, the most of
    its rows that are kept; its weights are among the others. None: not measured on this device, or
    not a part of it. pool_notes: what the pools have.
    """

    total: int = 0
    others: int = 0
    weights: int = 0
    kv_pool: int = 0
    adapters: int | None = None
    activations: int | None = None
    drafts: int | None = None
    graphs: int | None = None
    staging: int | None = None
    draft_model: int | None = None
    encoder: int | None = None
    pool_notes: str = ""

    @property
    def free(self) -> int:
        parts = (self.others, self.weights, self.kv_pool, self.adapters, self.activations)
        more = (self.drafts, self.graphs, self.staging, self.draft_model, self.encoder)
        return self.total - sum(part or 0 for part in (*parts, *more))

    def log(self) -> None:
        notes = {"kv_pool": self.pool_notes, "adapters": _ADAPTERS, "draft_model": _DRAFT_MODEL}
        logger.info("memory, in GiB:")
        for name in _LINES:
            num_bytes = getattr(self, name)
            if num_bytes is not None:
                note = f"  ({notes[name]})" if name in notes else ""
                logger.info("%12s %9.3f%s", name, num_bytes / 2**30, note)


def pool_notes(size: PoolSize, pools: Sequence[GroupPool]) -> str:
    """What each pool has, for people."""
    return "; ".join(_pool_notes(size, pools))


def _pool_notes(size: PoolSize, pools: Sequence[GroupPool]) -> Iterator[str]:
    for num_blocks, pool in zip(size.by_group, pools, strict=True):
        if isinstance(pool.group, StateGroup):
            yield f"{num_blocks} recurrent states of {pool.block_bytes / 2**20:.1f} MiB"
            continue
        note = f"{num_blocks} blocks, {num_blocks * pool.block_size} tokens"
        window = pool.group.window
        yield note if window is None else f"{note} of layers with a window of {window}"
