"""`Drafter`: which drafts a step verifies, so that it gives the most tokens in a second.

A draft is worth as many tokens as its chance to be accepted, and costs what it adds to the step's
time. Drafts are taken in the order of their chances, for as long as each gives more tokens a second
than the step does without it: so at many streams, where each token costs its share of a product,
few are taken, and without repetition none. Sources are compared, and the best is taken.
"""

from collections.abc import Mapping
from collections.abc import Sequence as Items
from typing import NamedTuple

from penstock.scheduler.cache.sequence import Sequence
from penstock.scheduler.drafts.acceptance import Acceptance, Rates, RequestRate, chances
from penstock.scheduler.drafts.prices import DraftPrices
from penstock.scheduler.drafts.sources import Grammar, Prediction, Source
from penstock.scheduler.stats import DraftStats
from penstock.scheduler.step_model.live import LiveStepModel
from penstock.scheduler.types import FurtherTokens

# A draft is to give so many times the tokens that its time is worth: prices are of a fit, which is
# even where tiles of products make steps.
_MARGIN = 1.5
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
        self, sources: Items[Source], most: int, step_model: LiveStepModel | None = None
    ) -> None:
        """sources: besides grammars. most: drafts of a row. step_model: predicts what drafts cost;
        without it, a guess."""
        self._grammar = Grammar()
        self._sources, self._most = (self._grammar, *sources), most
        self._acceptance, self._prices = Acceptance(), DraftPrices(step_model)
        self._rate_of: dict[Sequence, RequestRate] = {}
        self._verified: dict[Sequence, _Drafted] = {}
        self._num_since_probe = 0
        self._stats = {source.name: DraftStats(source.name) for source in self._sources}

    def force(self, sequences: Items[Sequence], forced: Mapping[int, Items[int]]) -> None:
        """The grammars of sequences have these ids next. forced: by row."""
        for row, token_ids in forced.items():
            if sequences[row].is_running:
                self._grammar.force(sequences[row], token_ids)

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
        rate = self._rate_of.get(sequence)
        if rate is None:
            rate = self._rate_of[sequence] = RequestRate()
        token_ids = text[at : at + most]
        return _Offer(name, rates, token_ids, chances(rates, rate.factor, len(token_ids)))

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
            if chance * step_s <= _MARGIN * draft_s * expected:
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
