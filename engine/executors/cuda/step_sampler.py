"""Chooses the sampler of each row of a GPU's step, and whether a captured graph samples it.

Nearly all rows are sampled by `DeviceSampler`, in the graph that computes their logits. A row with
a grammar needs its mask first, which the host computes while the model runs; what no kernel does
(`can_fuse`) is left to `penstock.engine.sampling.sampler.Sampler`. Steps with such rows, or with
penalties or bias, sample after the graph, whose own ids are then ignored.
A request keeps its sampler, so its ids do not depend on the other rows of the batch.
"""

from dataclasses import replace

import torch
from torch import Tensor

from penstock.engine.kernels.sample.sampler import DeviceSampler, Mode, can_fuse
from penstock.engine.memory.host import tensor_to_device, to_device
from penstock.engine.sampling.grammar_table import GrammarTable
from penstock.engine.sampling.sampler import ReadLogprobs, Sampler
from penstock.scheduler.types import SamplingParams, SlotAssignment

# The modes that graphs are captured with, the one that takes more memory first. Rarer ones would be
# captured while requests wait; launched after a graph they cost the host some 50 us, which is free.
GRAPH_MODES = (Mode.FILTERED, Mode.PLAIN)
# The settings that the kernels get for a slot that another sampler samples.
_GREEDY = SamplingParams(max_tokens=1, temperature=0.0)


class StepSampler:
    """Per-slot sampling settings: `assign`, then sample each step's rows in one of two ways."""

    def __init__(
        self,
        max_num_seqs: int,
        vocab_size: int,
        device: torch.device,
        grammars: GrammarTable,
        most_drafted: int = 0,
    ) -> None:
        """most_drafted: tokens of steps with drafts."""
        max_rows = max(max_num_seqs, most_drafted)
        self._fused = DeviceSampler(max_num_seqs, vocab_size, device, max_rows=max_rows)
        self._eager = Sampler(max_num_seqs, vocab_size, device, grammars)
        self._grammars = grammars
        self._device = device
        self._unfused: set[int] = set()
        self._with_logprobs: set[int] = set()
        self._prompt_lengths = [0] * max_num_seqs
        self._ids = torch.zeros(max_rows, dtype=torch.int32, device=device)
        self._logprobs = torch.zeros(max_rows, device=device)

    def assign(self, assignment: SlotAssignment) -> None:
        """A sequence enters its slot; takes effect with the next `flush`."""
        slot, sampling, seed = assignment.slot, assignment.sampling, assignment.seed
        num_prompt = assignment.num_prompt_tokens
        self._prompt_lengths[slot] = num_prompt
        self._unfused.discard(slot)
        self._with_logprobs.discard(slot)
        if sampling.num_logprobs is not None:
            self._with_logprobs.add(slot)
        if not can_fuse(sampling):
            self._unfused.add(slot)
        if slot in self._unfused or slot in self._with_logprobs:
            self._eager.assign(slot, sampling, seed)
        # The other sampler computes logprobs.
        fused = _GREEDY if slot in self._unfused else replace(sampling, num_logprobs=None)
        self._fused.assign(slot, fused, seed, list(assignment.token_ids), num_prompt)

    def flush(self) -> None:
        """Sends the assignments to the device."""
        self._fused.flush()

    def graph_mode(self, slots: list[int]) -> Mode | None:
        """How a graph samples these rows; None where they are sampled after it."""
        if self._grammars.constrains_any(slots) or not self._unfused.isdisjoint(slots):
            return None
        mode = self._fused.mode(slots)
        return mode if mode in GRAPH_MODES else None

    def sample(self, logits: Tensor, slots: Tensor, positions: Tensor, mode: Mode) -> Tensor:
        """Launches kernels, and nothing else, so that a graph can capture it. Ids, (S,) int32.

        logits: (S, V). slots, positions: (S,) int32; the positions to sample.
        """
        num_rows = len(slots)
        ids = self._ids[:num_rows]
        self._fused.sample(logits, slots, positions, ids, self._logprobs[:num_rows], mode)
        return ids

    def sample_after_graph(
        self,
        logits: Tensor,
        slots: list[int],
        lengths: list[int],
        device_slots: Tensor,
        device_lengths: Tensor,
        token_table: Tensor,
    ) -> Tensor:
        """The same for rows of every kind; waits for the masks of those with a grammar.

        lengths: the positions that are sampled; device_slots and device_lengths say the same.
        """
        self._upload_masks(slots)
        ids = self.sample(logits, device_slots, device_lengths, self._fused.mode(slots))
        rows = [row for row, slot in enumerate(slots) if slot in self._unfused]
        if rows:
            index = to_device(rows, torch.int64, self._device)
            chosen = self._eager.sample_ids(
                logits[index].float(),
                [slots[row] for row in rows],
                [lengths[row] for row in rows],
                token_table,
                [self._prompt_lengths[slots[row]] for row in rows],
            )
            ids[index] = chosen.to(ids.dtype)
        return ids

    def logprobs(self, logits: Tensor, slots: list[int], ids: Tensor) -> ReadLogprobs | None:
        """See `Sampler.logprobs`; None where no row wants any."""
        if self._with_logprobs.isdisjoint(slots):
            return None
        return self._eager.logprobs(logits, slots, ids.long())

    def _upload_masks(self, slots: list[int]) -> None:
        self._grammars.wait()
        constrained = [
            slot
            for slot in slots
            if self._grammars.is_constrained(slot) and slot not in self._unfused
        ]
        if not constrained:
            return
        words = self._grammars.words_per_row
        memory = torch.frombuffer(self._grammars.memory, dtype=torch.int32).view(-1, words)
        index = to_device(constrained, torch.int64, self._device)
        self._fused.masks[index] = tensor_to_device(memory[constrained], self._device)


class NoSampler:
    """In the place of a `StepSampler`, where another rank samples: its ids come to where these
    are."""

    def __init__(self, max_num_seqs: int, device: torch.device) -> None:
        self._ids = torch.zeros(max_num_seqs, dtype=torch.int32, device=device)

    def assign(self, assignment: SlotAssignment) -> None:
        pass

    def flush(self) -> None:
        pass

    def graph_mode(self, slots: list[int]) -> None:
        pass

    def sample_after_graph(self, logits: Tensor, slots: list[int], *_: object) -> Tensor:
        return self._ids[: len(slots)]

    def logprobs(self, *_: object) -> None:
        pass
