"""`DeviceSampler`: the tables of all slots, and the launches that read them."""

from enum import IntEnum
from typing import Any

import torch
from torch import Tensor

from penstock.engine.kernels.launch import overlapped
from penstock.engine.kernels.sample.filters import BUCKETS, _coarse, _gather, _select
from penstock.engine.kernels.sample.rows import (
    CHUNK,
    FLAGS,
    IS_ADJUSTED,
    IS_FILTERED,
    IS_PENALISED,
    MAX_STOPS,
    WORDS,
    _finish,
    _scan,
    _scatter,
    dense_bias,
    encode,
)
from penstock.engine.kernels.sizes import next_power_of_2
from penstock.engine.memory.host import to_device
from penstock.engine.sampling.token_bans import has_token_bans
from penstock.scheduler.types import SamplingParams

# The most ids that are listed for a row; with 512 rows, 67 MB.
_MAX_LISTED = 16384


class Mode(IntEnum):
    """A step's rows need one of these; each mode includes the ones before it."""

    PLAIN = 0
    FILTERED = 1
    ADJUSTED = 2


def can_fuse(sampling: SamplingParams) -> bool:
    """Whether `DeviceSampler` supports it; otherwise `penstock.engine.sampling.sampler` does.

    Unsupported: DRY and XTC, bad words of several tokens, more than 20 stop ids with min_tokens,
    and token bans together with a grammar (whose end overrides them). Of logprobs, only the sampled
    id's.
    """
    if sampling.min_tokens > 0 and len(sampling.stop_token_ids) > MAX_STOPS:
        return False
    if sampling.dry or sampling.xtc or any(len(word) != 1 for word in sampling.bad_words):
        return False
    return sampling.grammar is None or not has_token_bans(sampling)


class DeviceSampler:
    """Per-slot tables, and the launches that read them."""

    def __init__(
        self,
        max_num_seqs: int,
        vocab_size: int,
        device: torch.device,
        *,
        max_rows: int | None = None,
        max_listed: int = _MAX_LISTED,
    ) -> None:
        """max_rows: the most in a step, by default max_num_seqs. max_listed: see the package.

        Slot max_num_seqs belongs to the rows that pad a graph, and is greedy.

        Memory: 132 kB per row, nearly all for the lists; see also `allow_adjustments`.
        """
        rows = max_rows or max_num_seqs
        chunks = -(-vocab_size // CHUNK.value)

        def empty(*size: int, dtype: torch.dtype = torch.int32) -> Tensor:
            return torch.empty(*size, dtype=dtype, device=device)

        self._vocab_size, self._chunks, self._max_rows = vocab_size, chunks, rows
        self._device = device
        self._table = torch.zeros(max_num_seqs + 1, WORDS.value, dtype=torch.int32, device=device)
        self._parts = empty(4, rows, chunks, dtype=torch.float32)
        self._part_ids = empty(rows, chunks)
        self._counts = empty(rows, chunks, BUCKETS.value)
        self._masses = empty(rows, chunks, dtype=torch.int64)
        self._keys, self._ids = empty(2, rows, min(max_listed, vocab_size)).unbind()
        # For each row with filters in the last step: the bits of the largest z that survived.
        self.limits = empty(rows)
        self._flags = [0] * (max_num_seqs + 1)
        self._updates: dict[int, list[int]] = {}
        self._dense: list[tuple[int, SamplingParams, list[int], int]] = []
        self._bias: Tensor | None = None
        self._seen: Tensor | None = None
        self._masks: Tensor | None = None

    @property
    def masks(self) -> Tensor:
        """(slots, words) int32, `GrammarTable.memory` on the device; the caller writes it."""
        assert self._masks is not None, "allow_adjustments must be called first"
        return self._masks

    def allow_adjustments(self) -> None:
        """Allocates what Mode.ADJUSTED reads, 8 bytes per id and slot. Call it before capture."""
        if self._bias is not None:
            return
        slots, size = len(self._flags), self._vocab_size
        self._bias = torch.zeros(slots, size, device=self._device)
        # Per id: twice its count in the output, plus 1 if it is in the prompt.
        self._seen = torch.zeros(slots, size, dtype=torch.int32, device=self._device)
        words = -(-size // 32)
        self._masks = torch.full((slots, words), -1, dtype=torch.int32, device=self._device)

    def assign(
        self, slot: int, sampling: SamplingParams, seed: int, token_ids: list[int], num_prompt: int
    ) -> None:
        """A sequence enters `slot` with these tokens; takes effect at the next `flush`."""
        assert can_fuse(sampling), sampling
        words, biased = encode(sampling, seed, num_prompt, self._vocab_size)
        self._flags[slot] = words[FLAGS.value]
        self._updates[slot] = words
        self._dense = [update for update in self._dense if update[0] != slot]
        if biased or words[FLAGS.value] & IS_PENALISED.value:
            self._dense.append((slot, sampling, token_ids, num_prompt))

    def flush(self) -> None:
        """Writes the updates to the tables, mostly with one copy to the device and one launch."""
        if any(words[FLAGS.value] & IS_ADJUSTED.value for words in self._updates.values()):
            self.allow_adjustments()
        for slot, sampling, token_ids, num_prompt in self._dense:
            self._fill(slot, sampling, token_ids, num_prompt)
        self._dense = []
        if self._updates:
            rows = [[slot, *words] for slot, words in self._updates.items()]
            updates = to_device(rows, torch.int32, self._device)
            _scatter[(len(rows),)](updates, self._table, WORDS=WORDS, num_warps=1)
            self._updates = {}

    def mode(self, slots: list[int]) -> Mode:
        """The lowest mode that rows of these slots need."""
        flags = 0
        for slot in slots:
            flags |= self._flags[slot]
        if flags & IS_ADJUSTED.value:
            return Mode.ADJUSTED
        return Mode.FILTERED if flags & IS_FILTERED.value else Mode.PLAIN

    def sample(
        self,
        logits: Tensor,
        slots: Tensor,
        positions: Tensor,
        ids: Tensor,
        logprobs: Tensor,
        mode: Mode,
    ) -> None:
        """Writes ids, (S,) int32; and logprobs, (S,) float32, of rows that request them.

        logits: (S, V) of the model's type or float32, never written. slots, positions: (S,) int32;
        positions are those being sampled. In a graph, all of them must keep their addresses. In
        Mode.ADJUSTED a sampled id counts as output at once: the next call must be for the next
        position, unless `assign` comes first.
        """
        num_rows, size = logits.shape
        assert num_rows <= self._max_rows and size == self._vocab_size, (num_rows, size)
        assert logits.stride(1) == 1, logits.stride()
        assert self._bias is not None or mode is not Mode.ADJUSTED, (
            "allow_adjustments must be called first"
        )
        source = self._source(logits, slots, positions, mode)
        chunks, padded = self._chunks, next_power_of_2(self._chunks)
        listing = {"counts": self._counts, "masses": self._masses, "CHUNKS": padded}
        lists = {"keys": self._keys, "list_ids": self._ids, "list_size": self._keys.shape[1]}
        results = {"ids": ids, "logprobs": logprobs, "CHUNKS": padded}
        grid = (num_rows, chunks)
        _scan[grid](**source, part_ids=self._part_ids, num_warps=8)
        _finish[(num_rows,)](**source, **results, part_ids=self._part_ids, num_warps=1)
        if mode is not Mode.PLAIN:
            _coarse[grid](**source, **listing, num_warps=8)
            _gather[grid](**source, **listing, **lists, num_warps=8)
            results["limits"] = self.limits
            # Otherwise ptxas would spill a register or two to raise occupancy.
            _select[(num_rows,)](**source, **(listing | lists | results), num_warps=8, maxnreg=128)

    def _source(
        self, logits: Tensor, slots: Tensor, positions: Tensor, mode: Mode
    ) -> dict[str, Any]:
        """The arguments that all passes have."""
        return {
            "logits": logits,
            "slots": slots,
            "positions": positions,
            "table": self._table,
            # A placeholder of the same type, which avoids another compilation.
            "bias": self._parts if self._bias is None else self._bias,
            "seen": self._table if self._seen is None else self._seen,
            "masks": self._table if self._masks is None else self._masks,
            "parts": self._parts,
            "size": logits.shape[1],
            "stride": logits.stride(0),
            "part_stride": self._parts.stride(0),
            "ADJUSTED": mode is Mode.ADJUSTED,
            **overlapped(),
        }

    def _fill(
        self, slot: int, sampling: SamplingParams, token_ids: list[int], num_prompt: int
    ) -> None:
        """Writes one slot's rows of the tables that have a column for each id."""
        assert self._bias is not None and self._seen is not None
        self._bias[slot] = dense_bias(sampling, self._vocab_size, self._device)
        ids = to_device(token_ids, torch.int64, self._device)
        seen = self._seen[slot].zero_()
        seen.index_fill_(0, ids[:num_prompt], 1)  # `seen[...] = 1` would wait for the device
        output = ids[num_prompt:]
        seen.index_add_(0, output, torch.full_like(output, 2, dtype=torch.int32))
