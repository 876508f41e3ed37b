"""`Acceptance`: how often drafts are accepted, by where they are from and how long they matched."""

from penstock.scheduler.drafts.sources import MOST_MATCH

# Positions of drafts that are told apart; those after them are as the last.
NUM_POSITIONS = 8
# Of what was seen, a later draft leaves this: some fifty drafts are remembered.
_MEMORY = 0.98
# So many drafts weigh as much as what is supposed of the first one, and of one after another.
_SUPPOSED, _FIRST = 2.0, 0.5
# So many of a request's own drafts weigh as much as what is known of all.
_PRIOR = 2.0
_REQUEST_MEMORY = 0.9
# Nothing is certain.
_MOST = 0.98


class Rates:
    """Those of all drafts of one source and length of match: of a draft at each position, if those
    before it were accepted. One that was seldom tried is supposed to be as good as the one before
    it."""

    def __init__(self) -> None:
        self._tried = [0.0] * NUM_POSITIONS
        self._accepted = [0.0] * NUM_POSITIONS
        self._rates = [_FIRST] * NUM_POSITIONS
        self._expected: dict[int, float] = {}

    def expected(self, num_drafts: int) -> float:
        """Accepted ones of a row with so many."""
        known = self._expected.get(num_drafts)
        if known is None:
            known = self._expected[num_drafts] = sum(chances(self, 1.0, num_drafts))
        return known

    def __getitem__(self, position: int) -> float:
        return self._rates[position if position < NUM_POSITIONS else NUM_POSITIONS - 1]

    def observe(self, num_drafts: int, num_accepted: int) -> None:
        for at in range(min(num_drafts, num_accepted + 1, NUM_POSITIONS)):
            self._tried[at] = _MEMORY * self._tried[at] + 1.0
            self._accepted[at] = _MEMORY * self._accepted[at] + (at < num_accepted)
        self._expected.clear()
        before = _FIRST
        for at, (tried, accepted) in enumerate(zip(self._tried, self._accepted, strict=True)):
            before = (accepted + _SUPPOSED * before) / (tried + _SUPPOSED)
            self._rates[at] = before


class RequestRate:
    """What one request's drafts do beside what is expected of all."""

    __slots__ = ("_accepted", "_expected")

    def __init__(self) -> None:
        self._accepted = self._expected = _PRIOR

    @property
    def factor(self) -> float:
        return self._accepted / self._expected

    def observe(self, num_accepted: int, expected: float) -> None:
        """expected: accepted drafts, by the rates of all."""
        self._accepted = _PRIOR + _REQUEST_MEMORY * (self._accepted - _PRIOR) + num_accepted
        self._expected = _PRIOR + _REQUEST_MEMORY * (self._expected - _PRIOR) + expected


class Acceptance:
    def __init__(self) -> None:
        self._rates: dict[tuple[str, int], Rates] = {}

    def rates(self, source: str, match: int) -> Rates:
        """match: tokens, up to MOST_MATCH."""
        key = source, min(match, MOST_MATCH).bit_length()
        found = self._rates.get(key)
        if found is None:
            found = self._rates[key] = Rates()
        return found


def chances(rates: Rates, factor: float, num_drafts: int) -> list[float]:
    """That each of a row's drafts is accepted, and so those before it."""
    chance, found = 1.0, []
    for position in range(num_drafts):
        chance *= min(_MOST, rates[position] * factor)
        found.append(chance)
    return found
