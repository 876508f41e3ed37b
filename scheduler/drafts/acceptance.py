"""`Acceptance`: how often drafts are accepted, by where they are from and how long they matched."""

from penstock.scheduler.drafts.sources import MOST_MATCH

# Positions of drafts that are told apart; those after them are as the last.
NUM_POSITIONS = 8
# Of what was seen, a later draft leaves this: some fifty drafts are remembered.
_MEMORY = 0.98
# So many drafts weigh as much as what is supposed of the first one, and of one after another.
_SUPPOSED, _FIRST = 2.0, 0.5
# Rates are computed again once there are new drafts to one in so many of those remembered.
_SHARE_NEW = 8.0
# So many of a request's own drafts weigh as much as what is known of all.
_PRIOR = 2.0
_REQUEST_MEMORY = 0.9
# Nothing is certain.
MOST = 0.98


class Rates:
    """Those of all drafts of one source and length of match: of a draft at each position, if those
    before it were accepted. One that was seldom tried is supposed to be as good as the one before
    it."""

    def __init__(self) -> None:
        self._tried = [0.0] * NUM_POSITIONS
        self._accepted = [0.0] * NUM_POSITIONS
        self._rates = [_FIRST] * NUM_POSITIONS
        self._expected = [0.0] * (NUM_POSITIONS + 1)
        self._num_new = 1.0  # drafts that were observed since the rates were computed

    def expected(self, num_drafts: int) -> float:
        """Accepted ones of a row with so many."""
        if self._num_new * _SHARE_NEW > self._tried[0]:
            self._compute()
        if num_drafts > NUM_POSITIONS:
            return sum(chances(self, 1.0, num_drafts))
        return self._expected[num_drafts]

    def first(self, num_drafts: int) -> list[float]:
        """Those of the first so many positions."""
        return self._rates[: max(0, num_drafts)] + self._rates[-1:] * (num_drafts - NUM_POSITIONS)

    def observe(self, num_drafts: int, num_accepted: int) -> None:
        all_tried, all_accepted = self._tried, self._accepted
        for at in range(min(num_drafts, num_accepted + 1, NUM_POSITIONS)):
            all_tried[at] = _MEMORY * all_tried[at] + 1.0
            all_accepted[at] = _MEMORY * all_accepted[at] + (at < num_accepted)
        self._num_new += 1.0

    def _compute(self) -> None:
        self._num_new = 0.0
        before, chance, expected = _FIRST, 1.0, 0.0
        for at, (tried, accepted) in enumerate(zip(self._tried, self._accepted, strict=True)):
            self._rates[at] = before = (accepted + _SUPPOSED * before) / (tried + _SUPPOSED)
            chance *= before if before < MOST else MOST
            expected += chance
            self._expected[at + 1] = expected


class RequestRate:
    """What one request's drafts do beside what is expected of all."""

    __slots__ = ("_accepted", "_expected")

    def __init__(self) -> None:
        self._accepted = self._expected = _PRIOR

    @property
    def factor(self) -> float:
        return self._accepted / self._expected

    def observe(self, num_accepted: int, expected: float) -> None:
        """expected: of the drafts that were reached, those accepted and the one after them, how
        many are by the rates of all."""
        self._accepted = _PRIOR + _REQUEST_MEMORY * (self._accepted - _PRIOR) + num_accepted
        self._expected = _PRIOR + _REQUEST_MEMORY * (self._expected - _PRIOR) + expected


class Acceptance:
    def __init__(self) -> None:
        self._rates: dict[str, list[Rates]] = {}

    def rates(self, source: str, match: int) -> Rates:
        """match: tokens, up to MOST_MATCH."""
        by_match = self._rates.get(source)
        if by_match is None:
            classes = [Rates() for _ in range(MOST_MATCH.bit_length() + 1)]
            by_match = [classes[each.bit_length()] for each in range(MOST_MATCH + 1)]
            self._rates[source] = by_match
        return by_match[match]


def chances(rates: Rates, factor: float, num_drafts: int) -> list[float]:
    """That each of a row's drafts is accepted, and so those before it."""
    chance, found = 1.0, []
    for rate in rates.first(num_drafts):
        of_this = rate * factor
        chance *= of_this if of_this < MOST else MOST
        found.append(chance)
    return found
