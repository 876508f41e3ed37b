"""`Proposals`: drafts that the executor proposes, by a model, and how many it is asked for.

Proposing takes a call for each draft of the longest row, whatever the number of rows, and before
the first one the tokens of the sequence have to be computed for what proposes. That begins once the
answer is so long that drafts would have saved as much time as it takes: nobody knows how long an
answer will be, and this way it costs at most twice what was best.
"""

from collections import deque
from collections.abc import Iterable
from collections.abc import Sequence as Items

from penstock.scheduler.cache.sequence import Sequence
from penstock.scheduler.drafts.prices import MARGIN, Price
from penstock.scheduler.drafts.sources import Told
from penstock.scheduler.types import SampledTokens

# A draft is tried that does not seem worth its time: at once, after so many tokens without one, and
# twice as many after each try in a row. A try is of so many steps, since its sequence has to be
# computed once for all of them, and the first call finds nothing in the caches.
_PROBE_EVERY, _MAX_PROBE_EVERY, _PROBE_STEPS = 16, 4096, 3
# A call computes so many tokens of a sequence in little more time than one.
_FEW = 16
# While nothing is known: the time of a call, as a share of a step's, and that of a token to catch
# up on, as a share of a call's.
_UNKNOWN_CALL, _UNKNOWN_TOKEN = 0.25, 0.125
# So many of the latest times are remembered.
_NUM_KEPT = 7


class Proposals(Told):
    """A source whose drafts are asked for."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.probed: Sequence | None = None
        """Its draft was asked for to be tried."""
        self._num_probes_left = 0
        self._call_s, self._token_s = (deque[float](maxlen=_NUM_KEPT) for _ in range(2))
        self._followed: dict[Sequence, int] = {}  # how long it was when it last had drafts
        self._num_since_probe = self._probe_every = _PROBE_EVERY

    def wanted(
        self, sequences: Items[Sequence], rows: Items[list[float]], price: Price
    ) -> tuple[int, ...]:
        """How many each is to have after the step; empty where none is to have any. rows: the
        chances of each one's drafts. price: of a step, and of verifying a draft."""
        nums = self._worth_while(sequences, rows, price)
        self._num_since_probe += len(sequences)
        if any(nums):
            self._num_since_probe, self._probe_every = 0, _PROBE_EVERY
            self.probed, self._num_probes_left = None, 0
        elif (row := self._to_probe(sequences, rows)) is not None:
            nums[row] = 1
        return tuple(nums) if any(nums) else ()

    def _to_probe(self, sequences: Items[Sequence], rows: Items[list[float]]) -> int | None:
        """Which row is to have a draft to be tried."""
        before, self.probed = self.probed, None
        can = {sequence: row for row, sequence in enumerate(sequences) if rows[row]}
        if before in can and self._num_probes_left:
            self._num_probes_left -= 1
            self.probed = before
        elif can and self._num_since_probe >= self._probe_every:
            self.probed = min(can, key=self._lag)
            self._num_probes_left, self._num_since_probe = _PROBE_STEPS - 1, 0
            self._probe_every = min(2 * self._probe_every, _MAX_PROBE_EVERY)
        return None if self.probed is None else can[self.probed]

    def hear(self, sequences: Items[Sequence], sampled: SampledTokens) -> None:
        """What became of `wanted`. sequences: with the step's ids."""
        num_calls = max(map(len, sampled.proposed.values()), default=0)
        if sampled.num_caught_up:
            rest_s = sampled.proposing_s - num_calls * _typical(self._call_s, 0.0)
            self._token_s.append(max(0.0, rest_s) / sampled.num_caught_up)
        elif num_calls:
            self._call_s.append(sampled.proposing_s / num_calls)
        for row, token_ids in sampled.proposed.items():
            if sequences[row].is_running:
                self.tell(sequences[row], token_ids)
                self._followed[sequences[row]] = len(sequences[row].token_ids)

    def end(self, sequence: Sequence) -> None:
        super().end(sequence)
        self._followed.pop(sequence, None)

    def _worth_while(
        self, sequences: Items[Sequence], rows: Items[list[float]], price: Price
    ) -> list[int]:
        nums = [0] * len(rows)
        (time_s, draft_s), expected = price, float(len(rows))
        call_s = _typical(self._call_s, _UNKNOWN_CALL * time_s)
        saved_s = [
            sum(max(0.0, (chance * time_s - call_s) / len(rows) - draft_s) for chance in chances)
            for chances in rows
        ]
        token_s = _typical(self._token_s, _UNKNOWN_TOKEN * call_s)
        left = [
            row
            for row, sequence in enumerate(sequences)
            if self._is_begun(sequence, saved_s[row], token_s)
        ]
        while left:
            left = [
                row
                for row in left
                if nums[row] < len(rows[row])
                and rows[row][nums[row]] * time_s > MARGIN * draft_s * expected
            ]
            more = sum(rows[row][nums[row]] for row in left)
            cost_s = call_s + draft_s * len(left)
            # What calls take was measured, and needs no margin.
            if more * time_s <= (call_s + MARGIN * draft_s * len(left)) * expected:
                break
            for row in left:
                nums[row] += 1
            expected += more
            time_s += cost_s
        return nums

    def _is_begun(self, sequence: Sequence, saved_s: float, token_s: float) -> bool:
        """Whether it has been computed, or is worth it by now. saved_s: by the drafts of a step."""
        length, lag = len(sequence.token_ids), self._lag(sequence)
        since = max(length - lag, sequence.num_prompt_tokens)
        return lag <= _FEW or (length - since) * saved_s >= lag * token_s

    def _lag(self, sequence: Sequence) -> int:
        """How many of its tokens are not computed for proposals, or more than are."""
        return len(sequence.token_ids) - self._followed.get(sequence, 0)


def _typical(values: Iterable[float], unknown: float) -> float:
    """The lower quartile, since calls after a pause take longer than those of steps in a row."""
    ordered = sorted(values)
    return ordered[(len(ordered) - 1) // 4] if ordered else unknown
