"""Speculative decoding: which drafts a step verifies, and what of them becomes text.

The executor drafts; how many ids, it says with each step's results (`SampledTokens.num_drafts`).
Drafts cause no preemption: which sequences run is decided without them.
"""

from penstock.scheduler.batch import Batch
from penstock.scheduler.cache.kv_cache import KVCache
from penstock.scheduler.cache.sequence import Sequence, Status
from penstock.scheduler.outputs import StepOutputs, output_of_drafts
from penstock.scheduler.types import SampledTokens, TokenLogprobs


class Drafts:
    """How many drafts the next row of each sequence may verify, and the sequences whose
    verification is in flight, so that their length is not known."""

    def __init__(self, kv: KVCache, max_num_batched_tokens: int) -> None:
        self._kv = kv
        self._max_num_batched_tokens = max_num_batched_tokens
        self._announced: dict[Sequence, int] = {}
        self._verifying: set[Sequence] = set()

    def without_verifying(self, sequences: list[Sequence]) -> list[Sequence]:
        """Those whose next row can be scheduled: it starts where the accepted drafts end."""
        if not self._verifying:
            return sequences
        return [sequence for sequence in sequences if sequence not in self._verifying]

    def announce(self, sequence: Sequence, num_drafts: int) -> None:
        """Its next row may verify this many, unless that row is launched already, with one token.

        So an executor whose steps are always launched one ahead has no drafts verified: one that
        drafts must not run ahead (`Executor.runs_ahead`).
        """
        if sequence.status is Status.DECODING and not sequence.num_in_flight:
            self._announced[sequence] = num_drafts

    def forget(self, sequence: Sequence) -> None:
        """It leaves its slot, and with it the executor's drafts."""
        self._announced.pop(sequence, None)

    def schedule(self, batch: Batch) -> None:
        """Lengthens the decode rows by the drafts that were announced for them.

        Limited by the token budget, the available blocks and max_tokens: those that do not fit are
        never verified.
        """
        if not self._announced:
            return
        budget = self._max_num_batched_tokens - len(batch.slots)
        block_size = self._kv.block_size
        for row, sequence in enumerate(batch.sampling):
            table, start = sequence.table.block_ids, sequence.num_computed
            num_free = (len(table) + self._kv.num_available) * block_size - start
            num_wanted = min(self._announced.get(sequence, 0), sequence.max_length - 1 - start)
            num_drafts = min(num_wanted, budget, num_free)
            if num_drafts <= 0:
                continue
            self._kv.grow(sequence, start + num_drafts, batch.table_updates)
            sequence.num_computed = start + num_drafts
            batch.num_tokens[row] += num_drafts
            batch.num_drafts[row] = num_drafts
            self._verifying.add(sequence)
            budget -= num_drafts
        self._announced.clear()

    def accept(
        self, batch: Batch, sampled: SampledTokens, outputs: StepOutputs
    ) -> tuple[list[int], list[TokenLogprobs | None] | None]:
        """Appends the accepted drafts to their sequences and to the outputs.

        Returns the rows' own ids and logprobs, which `Scheduler.update` appends next: an accepted
        draft that is a stop token replaces the row's own id, which would come after it.
        """
        if not batch.num_drafts:
            return sampled.token_ids, sampled.logprobs
        token_ids = list(sampled.token_ids)
        all_logprobs = list(sampled.logprobs) if sampled.logprobs else None
        for row, num_drafts in batch.num_drafts.items():
            sequence, accepted = batch.sampling[row], sampled.accepted.get(row, [])
            assert len(accepted) <= num_drafts, f"{len(accepted)} of {num_drafts} drafts accepted"
            self._verifying.discard(sequence)
            if sequence.status is Status.FINISHED or row in sampled.failed:
                continue
            sequence.reject_drafts(num_drafts - len(accepted))
            stops = (i for i, draft in enumerate(accepted) if draft[0] in sequence.stop_token_ids)
            if (stop := next(stops, None)) is not None:
                token_ids[row], entry = accepted[stop]
                accepted = accepted[:stop]
                if all_logprobs:
                    all_logprobs[row] = entry
            sequence.token_ids += [draft.token_id for draft in accepted]
            if sequence.is_running:
                self._kv.trim(sequence)
                self._kv.cache_full_blocks(sequence)
            if accepted:
                outputs.add(output_of_drafts(sequence, accepted))
        return token_ids, all_logprobs
