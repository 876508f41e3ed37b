"""`Drafter`: which drafts a step verifies, so that it gives the most tokens in a second.

A draft is worth as many tokens as its chance to be accepted, and costs what it adds to the step's
time. Drafts are taken in the order of their chances, for as long as each gives more tokens a second
than the step does without it: so at many streams, where each token costs its share of a product,
few are taken, and without repetition none. Sources are compared, and the best is taken.

Where the executor can propose drafts itself, by a model, it is told how many it is to propose after
a step: the same is asked of these, but what proposing takes is added to what they cost.
"""

from collections.abc import Mapping
from collections.abc import Sequence as Items
from typing import NamedTuple

from penstock.scheduler.cache.sequence import Sequence
from penstock.scheduler.drafts.acceptance import Acceptance, Rates, RequestRate, chances
from penstock.scheduler.drafts.prices import MARGIN, DraftPrices
from penstock.scheduler.drafts.proposals import Proposals
from penstock.scheduler.drafts.sources import MOST_MATCH, Prediction, Source, Told
from penstock.scheduler.stats import DraftStats
from penstock.scheduler.step_model.live import LiveStepModel
from penstock.scheduler.types import FurtherTokens, SampledTokens

# After so many tokens without a draft one is tried that is not worth its time: it might be by now.
_PROBE_EVERY = 128


class _Offer(NamedTuple):
    """What a source has for a sequence."""

    source: str
    rates: Rates
    token_ids: list[int]
    chances: list[float]


class _Drafted(NamedTuple):
    """What is being verified. expected: accepted drafts, by the rates of all."""

    source: str
    rates: Rates
    num_drafts: int
    expected: float


class Drafter:
    def __init__(
        self,
        sources: Items[Source],
        most: int,
        step_model: LiveStepModel | None = None,
        proposes: str | None = None,
    ) -> None:
        """sources: besides grammars. most: drafts of a row. step_model: predicts what drafts cost;
        without it, a guess. proposes: what does in the executor, if anything does."""
        self._grammar = Told("grammar")
        self._proposals = None if proposes is None else Proposals(proposes)
        own = () if self._proposals is None else (self._proposals,)
        self._sources: tuple[Source, ...] = (self._grammar, *sources, *own)
        self._most = most
        self._acceptance, self._prices = Acceptance(), DraftPrices(step_model)
        self._rate_of: dict[Sequence, RequestRate] = {}
        self._verified: dict[Sequence, _Drafted] = {}
        self._num_since_probe = 0
        self._stats = {source.name: DraftStats(source.name) for source in self._sources}

    def hear(self, sequences: Items[Sequence], sampled: SampledTokens) -> None:
        """What the executor has found for the next step. sequences: of the rows that sampled, which
        have their new ids."""
        for row, token_ids in sampled.forced.items():
            if sequences[row].is_running:
                self._grammar.tell(sequences[row], token_ids)
        if self._proposals is not None:
            self._proposals.hear(sequences, sampled)

    def want(self, sequences: Items[Sequence]) -> tuple[int, ...]:
        """How many drafts the executor is to propose for each of these, the rows of a step that is
        about to run; empty for none."""
        if self._proposals is None:
            return ()
        rates = self._acceptance.rates(self._proposals.name, MOST_MATCH)
        most_expected, rows = rates.expected(self._most), []
        for sequence in sequences:
            # After this step's token; and the step that verifies them has a token more than drafts.
            limit = min(sequence.max_length - len(sequence.token_ids) - 2, self._most)
            other = self._verified.get(sequence)
            if other is not None and other.rates.expected(self._most) > most_expected:
                limit = 0  # its drafts are from a better source, which may well go on
            rows.append(chances(rates, self._rate(sequence).factor, limit))
        price = self._prices.of(len(sequences), sum([each.num_computed for each in sequences]))
        return self._proposals.wanted(sequences, rows, price)

    def propose(
        self, decodes: Items[Sequence], limits: Items[int], most_of_all: int
    ) -> list[tuple[int, ...]]:
        """The drafts of each of a step's decodes. limits: the most of each."""
        offers = [
            self._best_offer(sequence, min(limit, self._most))
            for sequence, limit in zip(decodes, limits, strict=True)
        ]
        self._num_since_probe += len(decodes)
        if not any(offers):
            return [()] * len(decodes)
        nums = self._worth_while(decodes, offers, most_of_all)
        drafts: list[tuple[int, ...]] = []
        for sequence, offer, num in zip(decodes, offers, nums, strict=True):
            if offer is None or not num:
                drafts.append(())
                continue
            expected = offer.rates.expected(num)
            self._verified[sequence] = _Drafted(offer.source, offer.rates, num, expected)
            drafts.append(tuple(offer.token_ids[:num]))
        return drafts

    def judge_rows(
        self,
        sequences: Items[Sequence],
        drafts: Items[Items[int]],
        further: Mapping[int, FurtherTokens],
    ) -> None:
        """Of a step's drafts. sequences: of all rows that sampled, those with drafts first."""
        for row, of_row in enumerate(drafts):
            if of_row:
                accepted = further.get(row)
                num_accepted = len(accepted.token_ids) if accepted else 0
                self.judge(sequences[row], num_accepted)

    def judge(self, sequence: Sequence, num_accepted: int) -> None:
        """Of the drafts that were verified last."""
        drafted = self._verified.pop(sequence, None)
        if drafted is None:
            return  # it has ended meanwhile
        drafted.rates.observe(drafted.num_drafts, num_accepted)
        self._rate_of[sequence].observe(num_accepted, drafted.expected)
        if drafted.source == Prediction.name:
            sequence.num_predicted += num_accepted
            sequence.num_mispredicted += drafted.num_drafts - num_accepted
        stats = self._stats[drafted.source]
        self._stats[drafted.source] = stats.plus(drafted.num_drafts, num_accepted)

    def drop(self, sequence: Sequence) -> None:
        """The drafts that were proposed last are not verified."""
        self._verified.pop(sequence, None)

    def end(self, sequence: Sequence) -> None:
        self._rate_of.pop(sequence, None)
        self._verified.pop(sequence, None)
        for source in self._sources:
            source.end(sequence)

    @property
    def stats(self) -> tuple[DraftStats, ...]:
        return tuple(self._stats.values())

    def _best_offer(self, sequence: Sequence, most: int) -> _Offer | None:
        if most < 1:
            return None
        best, most_expected = None, 0.0
        for source in self._sources:
            found = source.find(sequence)
            if found is None:
                continue
            rates = self._acceptance.rates(source.name, found.match)
            expected = rates.expected(min(most, len(found.text) - found.at))
            if expected > most_expected:
                best, most_expected = (source.name, rates, found), expected
        if best is None:
            return None
        name, rates, (text, at, _) = best
        token_ids = text[at : at + most]
        found_chances = chances(rates, self._rate(sequence).factor, len(token_ids))
        own = self._proposals
        if own is not None and sequence is own.probed and name == own.name:
            found_chances[0] = 1.0
        return _Offer(name, rates, token_ids, found_chances)

    def _rate(self, sequence: Sequence) -> RequestRate:
        rate = self._rate_of.get(sequence)
        if rate is None:
            rate = self._rate_of[sequence] = RequestRate()
        return rate

    def _worth_while(
        self, decodes: Items[Sequence], offers: Items[_Offer | None], most: int
    ) -> list[int]:
        """How many drafts of each offer to take."""
        nums = [0] * len(offers)
        num_tokens, positions = len(decodes), sum([each.num_computed for each in decodes])
        step_s, draft_s = self._prices.of(num_tokens, positions)
        ranked = sorted(
            [
                (chance, -number, row)
                for row, offer in enumerate(offers)
                if offer is not None
                for number, chance in enumerate(offer.chances)
            ],
            reverse=True,
        )
        expected = float(num_tokens)
        for chance, _, row in ranked[:most]:
            if chance * step_s <= MARGIN * draft_s * expected:
                break
            nums[row] += 1
            expected += chance
            step_s += draft_s
        if any(nums):
            self._num_since_probe = 0
        elif self._num_since_probe >= _PROBE_EVERY and most:
            self._num_since_probe = 0
            nums[ranked[0][2]] = 1
        return nums
