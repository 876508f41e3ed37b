"""Where drafts come from: what followed the last few tokens when they stood somewhere before.

Of two places the one whose text before it agrees longer is taken, the latest or the one that was
followed until now. (Prompt lookup, Saxena 2023; SuffixDecoding, Oliaro et al. 2024, which keeps
finished answers too, in a suffix tree.)
"""

from collections import OrderedDict, deque
from collections.abc import Sequence as Items
from typing import NamedTuple, Protocol

from penstock.scheduler.cache.sequence import Sequence

# Tokens that must agree: two do so everywhere.
_LEAST = 3
# A longer match says no more.
MOST_MATCH = 16
# Of a long text, as many tokens as are looked up in, from its end on.
_MAX_TEXT = 65_536
# Tokens of finished answers, of a tenant and of all: each takes some 200 bytes.
_MAX_OF_TENANT, _MAX_OF_ALL = 65_536, 262_144
# Ids are below this; three of them are one number, which takes less memory than a tuple.
_BITS = 21
_KEY = (1 << 3 * _BITS) - 1


class Found(NamedTuple):
    """Drafts are the tokens of `text` from `at` on. match: how many before them are the last ones
    of the sequence."""

    text: list[int]
    at: int
    match: int


class Source(Protocol):
    """name: as metrics have it."""

    @property
    def name(self) -> str: ...

    def find(self, sequence: Sequence) -> Found | None: ...

    def end(self, sequence: Sequence) -> None:
        """The sequence has ended; one that was never looked at is no error."""
        ...


class OwnText:
    """The prompt, and the answer so far."""

    name = "ngram"

    def __init__(self) -> None:
        self._known: dict[Sequence, tuple[_Places, _Follower]] = {}

    def find(self, sequence: Sequence) -> Found | None:
        known = self._known.get(sequence)
        if known is None:
            known = self._known[sequence] = _Places(), _Follower()
        places, follower = known
        places.add(sequence.token_ids)
        return follower.find(sequence.token_ids, places)

    def end(self, sequence: Sequence) -> None:
        self._known.pop(sequence, None)


class Prediction:
    """What the client expects, from its beginning on; after a difference, where it agrees again."""

    name = "prediction"

    def __init__(self) -> None:
        self._known: dict[Sequence, tuple[_Places, _Follower]] = {}

    def find(self, sequence: Sequence) -> Found | None:
        if not sequence.request.prediction:
            return None
        known = self._known.get(sequence)
        if known is None:
            text, places = list(sequence.request.prediction), _Places()
            places.add(text)
            known = places, _Follower(text, -sequence.num_prompt_tokens)
            self._known[sequence] = known
        places, follower = known
        return follower.find(sequence.token_ids, places)

    def end(self, sequence: Sequence) -> None:
        self._known.pop(sequence, None)


class Told:
    """What the executor has found: what a grammar has next where it leaves no choice of text, such
    as the keys of an object (the text may be divided into other tokens than these); or what a model
    proposes."""

    def __init__(self, name: str) -> None:
        self.name = name
        self._told: dict[Sequence, tuple[int, list[int]]] = {}

    def tell(self, sequence: Sequence, token_ids: Items[int]) -> None:
        """These follow its last token."""
        self._told[sequence] = len(sequence.token_ids), list(token_ids)

    def find(self, sequence: Sequence) -> Found | None:
        length, token_ids = self._told.get(sequence, (0, []))
        return Found(token_ids, 0, MOST_MATCH) if length == len(sequence.token_ids) else None

    def end(self, sequence: Sequence) -> None:
        self._told.pop(sequence, None)


class FinishedAnswers:
    """Those of the same tenant and cache salt: whoever may not find another's prompt in the cache
    may not learn of another's answers by the speed of drafts. The oldest go first."""

    name = "suffix"

    def __init__(self, max_of_tenant: int = _MAX_OF_TENANT, max_of_all: int = _MAX_OF_ALL) -> None:
        self._max_of_tenant, self._max_of_all = max_of_tenant, max_of_all
        self._answers: OrderedDict[tuple[str, str], _Answers] = OrderedDict()
        self._followers: dict[Sequence, _Follower] = {}
        self.num_tokens = 0
        """Of all answers that are kept."""

    def find(self, sequence: Sequence) -> Found | None:
        answers = self._answers.get(_owner(sequence))
        if answers is None:
            return None
        follower = self._followers.get(sequence)
        if follower is None:
            follower = self._followers[sequence] = _Follower()
        return follower.find(sequence.token_ids, answers.places)

    def end(self, sequence: Sequence) -> None:
        self._followers.pop(sequence, None)
        answer = sequence.token_ids[sequence.num_prompt_tokens :][-self._max_of_tenant :]
        if len(answer) <= _LEAST:
            return
        answers = self._answers.setdefault(_owner(sequence), _Answers())
        self._answers.move_to_end(_owner(sequence))
        answers.add(answer)
        self.num_tokens += len(answer)
        while answers.num_tokens > self._max_of_tenant:
            self.num_tokens -= answers.drop_oldest()
        while self.num_tokens > self._max_of_all:
            owner, oldest = next(iter(self._answers.items()))
            self.num_tokens -= oldest.drop_oldest()
            if not oldest.num_tokens:
                del self._answers[owner]


def _owner(sequence: Sequence) -> tuple[str, str]:
    return sequence.request.tenant, sequence.request.cache_salt


class _Places:
    """The latest place of each few tokens in some texts: a text, and where it goes on after."""

    def __init__(self) -> None:
        self._place_of: dict[int, tuple[list[int], int]] = {}
        self._num_added = 0

    def add(self, text: list[int]) -> None:
        """What is new of one text, which grows."""
        length, place_of = len(text), self._place_of
        start = self._num_added or max(_LEAST, length - _MAX_TEXT)
        if start < length:
            key = _key(text, start)
            for at in range(start, length):
                place_of[key] = text, at
                key = (key << _BITS | text[at]) & _KEY
            self._num_added = length

    def add_another(self, text: list[int]) -> None:
        self._num_added = 0
        self.add(text)

    def remove(self, text: list[int]) -> None:
        place_of = self._place_of
        for at in range(_LEAST, len(text)):
            key = _key(text, at)
            place = place_of.get(key)
            if place is not None and place[0] is text:
                del place_of[key]

    def find(self, token_ids: list[int]) -> tuple[list[int], int] | None:
        """Where the last tokens of these have stood before."""
        return self._place_of.get(_key(token_ids, len(token_ids)))


class _Answers:
    """Those of one tenant."""

    def __init__(self) -> None:
        self.places = _Places()
        self.num_tokens = 0
        self._texts: deque[list[int]] = deque()

    def add(self, text: list[int]) -> None:
        self.places.add_another(text)
        self._texts.append(text)
        self.num_tokens += len(text)

    def drop_oldest(self) -> int:
        """Returns how many tokens it had."""
        text = self._texts.popleft()
        self.places.remove(text)
        self.num_tokens -= len(text)
        return len(text)


class _Follower:
    """Knows which place a sequence follows."""

    def __init__(self, text: list[int] | None = None, ahead: int = 0) -> None:
        """ahead: of the place in the text, relative to the end of the sequence."""
        self._text, self._ahead = text or [], ahead

    def find(self, token_ids: list[int], places: _Places) -> Found | None:
        length = len(token_ids)
        if length < _LEAST:
            return None
        text, at = self._text, length + self._ahead
        match = _match(token_ids, text, at) if 0 < at < len(text) else 0
        # No other place agrees longer than the most that is looked at.
        if match < MOST_MATCH and (place := places.find(token_ids)) is not None:
            other, other_at = place
            if other_at != at or other is not text:
                other_match = _match(token_ids, other, other_at)
                if other_match > match:
                    text, at, match = other, other_at, other_match
                    self._text, self._ahead = text, at - length
        return Found(text, at, match) if match else None


def _match(token_ids: list[int], text: list[int], at: int) -> int:
    """How many tokens before `at` in the text are the last of these, up to MOST_MATCH."""
    if at >= MOST_MATCH and text[at - MOST_MATCH : at] == token_ids[-MOST_MATCH:]:
        return MOST_MATCH  # the usual case of what is repeated, at a tenth of the time
    end = len(token_ids)
    most = min(MOST_MATCH, at, end)
    for i in range(1, most + 1):
        if text[at - i] != token_ids[end - i]:
            return i - 1
    return most


def _key(text: list[int], at: int) -> int:
    """Of the tokens before `at`."""
    return (text[at - 3] << _BITS | text[at - 2]) << _BITS | text[at - 1]
