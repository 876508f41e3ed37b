"""`Drafter`: which drafts a step verifies, so that it gives the most tokens in a second.

A draft is worth as many tokens as its chance to be accepted, and costs what it adds to the step's
time. Drafts are taken in the order of their chances, for as long as each gives more tokens a second
than the step does without it: so at many streams, where each token costs its share of a product,
few are taken, and without repetition none. Sources are compared, and the best is taken.

Where the executor can propose drafts itself, by a model, it is told how many it is to propose after
a step: the same is asked of these, but what proposing takes is added to what they cost.

Where the device is a step behind, a sequence's last ids are not known yet. Then its source is
supposed to be right about them too, and its drafts are those after them: they are worth the chance
that all of it is right.
"""

from collections import deque
from collections.abc import Mapping
from collections.abc import Sequence as Items
from typing import NamedTuple

from penstock.scheduler.cache.sequence import Sequence
from penstock.scheduler.drafts.acceptance import MOST, Acceptance, Rates, RequestRate, chances
from penstock.scheduler.drafts.limits import DraftLimits
from penstock.scheduler.drafts.prices import MARGIN, DraftPrices, Price
from penstock.scheduler.drafts.proposals import Proposals
from penstock.scheduler.drafts.sources import MOST_MATCH, Found, Prediction, Source, Told
from penstock.scheduler.stats import DraftStats
from penstock.scheduler.step_model.live import LiveStepModel
from penstock.scheduler.types import SampledTokens

# After so many tokens without a draft one is tried that is not worth its time: it might be by now.
_PROBE_EVERY = 128


class _Offer(NamedTuple):
    """What a source has for a sequence. supposed: what it says of the ids in flight, before its
    drafts."""

    source: str
    rates: Rates
    supposed: list[int]
    token_ids: list[int]


class _Drafted(NamedTuple):
    """What is being verified: drafts after the ids that were supposed to be those from `length`
    on."""

    source: str
    rates: Rates
    length: int
    supposed: list[int]
    num_drafts: int


class Drafter:
    def __init__(
        self,
        sources: Items[Source],
        most: int,
        step_model: LiveStepModel | None = None,
        proposes: str | None = None,
        limits: DraftLimits | None = None,
    ) -> None:
        """sources: besides grammars. most: drafts of a row. step_model: predicts what drafts cost;
        without it, a guess. proposes: what does in the executor, if anything does.
        limits: the executor's."""
        self._grammar, self._limits = Told("grammar"), limits
        self._proposals = None if proposes is None else Proposals(proposes)
        own = () if self._proposals is None else (self._proposals,)
        self._sources: tuple[Source, ...] = (self._grammar, *sources, *own)
        self._most = most
        self._acceptance, self._prices = Acceptance(), DraftPrices(step_model)
        self._rate_of: dict[Sequence, RequestRate] = {}
        self._verified: dict[Sequence, deque[_Drafted]] = {}  # in the order of steps
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
            limit = min(sequence.max_length - len(sequence.token_ids) - 2, self._most_of(sequence))
            verified = self._verified.get(sequence)
            if verified and verified[-1].rates.expected(self._most) > most_expected:
                limit = 0  # its drafts are from a better source, which may well go on
            rows.append(chances(rates, self._rate(sequence).factor, limit))
        return self._proposals.wanted(sequences, rows, self._price(sequences))

    def may_pay(self, decodes: Items[Sequence]) -> bool:
        """Whether a draft of a step of these is looked for at all: one that is nearly certain would
        be worth its time, or one is to be tried."""
        if self._num_since_probe >= _PROBE_EVERY:
            return True
        if self._proposals is not None and self._proposals.probed is not None:
            return True
        step_s, draft_s = self._price(decodes)
        return MOST * step_s > MARGIN * draft_s * len(decodes)

    def _price(self, decodes: Items[Sequence]) -> Price:
        return self._prices.of(len(decodes), sum([each.num_computed for each in decodes]))

    def propose(
        self,
        decodes: Items[Sequence],
        limits: Items[int],
        most_of_all: int,
        in_flight: Mapping[Sequence, Items[Items[int]]] = {},
    ) -> list[tuple[int, ...]]:
        """The drafts of each of a step's decodes. limits: the most of each. in_flight: the drafts
        of its rows whose results are not known, in the order of steps."""
        if (own := self._limits) is not None:
            most_of_all = max(0, min(most_of_all, own.num_tokens - len(decodes)))
            limits = [
                min(limit, own.per_row) if own.takes(each.request.sampling) else 0
                for each, limit in zip(decodes, limits, strict=True)
            ]
        self._num_since_probe += len(decodes)
        if not self.may_pay(decodes):
            return [()] * len(decodes)
        offers = [
            self._best_offer(
                sequence, min(limit, self._most_of(sequence)), in_flight.get(sequence, ())
            )
            for sequence, limit in zip(decodes, limits, strict=True)
        ]
        if not any(offers):
            return [()] * len(decodes)
        nums = self._worth_while(decodes, offers, most_of_all)
        drafts: list[tuple[int, ...]] = []
        for sequence, offer, num in zip(decodes, offers, nums, strict=True):
            if offer is None or not num:
                drafts.append(())
                continue
            source, rates, supposed, _ = offer
            drafted = _Drafted(source, rates, len(sequence.token_ids), supposed, num)
            self._verified.setdefault(sequence, deque()).append(drafted)
            drafts.append(tuple(offer.token_ids[:num]))
        return drafts

    def judge(self, sequence: Sequence, num_accepted: int) -> None:
        """Of its drafts in the oldest step in flight, whose ids it does not have yet."""
        if sequence not in self._verified:
            return  # it has ended meanwhile
        drafted = self._verified[sequence].popleft()
        supposed, known = drafted.supposed, sequence.token_ids[drafted.length :]
        num_tried, num_right = len(supposed), _num_equal(supposed, known) if supposed else 0
        if supposed == known:
            num_tried, num_right = num_tried + drafted.num_drafts, num_right + num_accepted
        reached = drafted.rates.first(min(num_tried, num_right + 1))
        self._rate(sequence).observe(num_right, sum(reached))
        drafted.rates.observe(num_tried, num_right)
        if drafted.source == Prediction.name:
            before = sequence.predicted or (0, 0)
            num_rejected = drafted.num_drafts - num_accepted
            sequence.predicted = before[0] + num_accepted, before[1] + num_rejected
        stats = self._stats[drafted.source]
        self._stats[drafted.source] = stats.plus(drafted.num_drafts, num_accepted)

    def drop(self, sequence: Sequence) -> None:
        """The drafts that were proposed last are not verified."""
        self._verified[sequence].pop()

    def end(self, sequence: Sequence) -> None:
        self._rate_of.pop(sequence, None)
        self._verified.pop(sequence, None)
        for source in self._sources:
            source.end(sequence)

    @property
    def stats(self) -> tuple[DraftStats, ...]:
        return tuple(self._stats.values())

    def _most_of(self, sequence: Sequence) -> int:
        of_request = sequence.request.max_drafts
        return self._most if of_request is None else min(of_request, self._most)

    def _best_offer(
        self, sequence: Sequence, most: int, in_flight: Items[Items[int]]
    ) -> _Offer | None:
        if most < 1:
            return None
        best, most_expected = None, 0.0
        reach = most
        if in_flight:
            reach += sum([1 + len(drafts) for drafts in in_flight])
        for source in self._sources:
            found = source.find(sequence)
            if found is None:
                continue
            rates = self._acceptance.rates(source.name, found.match)
            token_ids = _following(found, sequence, reach)
            num_supposed = _num_supposed(token_ids, in_flight) if in_flight else 0
            num = min(most, len(token_ids) - num_supposed)
            expected = _expected(rates, num_supposed, num)
            if expected > most_expected:
                best = source.name, rates, token_ids[: num_supposed + num], num_supposed
                most_expected = expected
        if best is None:
            return None
        name, rates, token_ids, num_supposed = best
        return _Offer(name, rates, token_ids[:num_supposed], token_ids[num_supposed:])

    def _chances(self, sequence: Sequence, offer: _Offer) -> list[float]:
        """That each of its drafts is accepted."""
        num, factor = len(offer.supposed), self._rate(sequence).factor
        found = chances(offer.rates, factor, num + len(offer.token_ids))[num:]
        if self._is_probe(sequence, offer):
            found[0] = 1.0
        return found

    def _is_probe(self, sequence: Sequence, offer: _Offer) -> bool:
        """It was asked for to be tried."""
        own = self._proposals
        return own is not None and sequence is own.probed and offer.source == own.name

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
        step_s, draft_s = self._price(decodes)
        expected = float(len(decodes))
        least = MARGIN * draft_s * expected / step_s
        likeliest, probed = 0.0, 0
        ranked: list[tuple[float, int, int]] = []
        for row, offer in enumerate(offers):
            if offer is None:
                continue
            # No draft of it is likelier; and taken after others, one is to be likelier than alone.
            most_likely = offer.rates.first(1)[0] * self._rate(decodes[row]).factor
            if self._is_probe(decodes[row], offer):
                most_likely = 1.0
            if most_likely > likeliest:
                likeliest, probed = most_likely, row
            if most_likely > least:
                found = self._chances(decodes[row], offer)
                ranked += [(chance, -number, row) for number, chance in enumerate(found)]
        ranked.sort(reverse=True)
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
            nums[probed] = 1
        return nums


def _expected(rates: Rates, num_supposed: int, num_drafts: int) -> float:
    """Accepted drafts, after ids that are right if the source is."""
    if num_drafts < 1:
        return 0.0
    before = rates.expected(num_supposed) if num_supposed else 0.0
    return rates.expected(num_supposed + num_drafts) - before


def _following(found: Found, sequence: Sequence, most: int) -> list[int]:
    """What was found; what a sequence repeats, it is to repeat again."""
    token_ids = found.text[found.at : found.at + most]
    if found.text is sequence.token_ids:
        while len(token_ids) < most:
            token_ids += token_ids[: most - len(token_ids)]
    return token_ids


def _num_supposed(token_ids: Items[int], in_flight: Items[Items[int]]) -> int:
    """How many ids the rows in flight give if these are right: of each, those of its drafts that
    are as these, and one more."""
    num = 0
    for drafts in in_flight:
        num += _num_equal(drafts, token_ids[num:]) + 1
    return num


def _num_equal(first: Items[int], second: Items[int]) -> int:
    """How many of the first ids of both are equal."""
    return next(
        (at for at, (one, other) in enumerate(zip(first, second, strict=False)) if one != other),
        min(len(first), len(second)),
    )
