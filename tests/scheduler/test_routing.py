"""Which replica gets a request."""

from collections import Counter
from collections.abc import Sequence
from itertools import pairwise
from random import Random

from penstock.scheduler.routing import LeastLoaded, PrefixAware, RoundRobin, prefix_digests


def prompt(seed: int, num_tokens: int = 640) -> list[int]:
    random = Random(seed)
    return [random.randrange(500) for _ in range(num_tokens)]


def shares(chosen: Sequence[str]) -> list[float]:
    return [count / len(chosen) for count in Counter(chosen).values()]


def test_the_other_routers_choose_in_turn_or_by_load() -> None:
    num_open = {"a": 3.0, "b": 1.0, "c": 2.0}
    robin: RoundRobin[str] = RoundRobin()
    assert [robin.choose([], num_open) for _ in range(4)] == ["a", "b", "c", "a"]
    least: LeastLoaded[str] = LeastLoaded()
    assert least.choose([], num_open) == "b"
    idle: LeastLoaded[str] = LeastLoaded()
    assert [idle.choose([], {"a": 0, "b": 0}) for _ in range(4)] == ["a", "b", "a", "b"]


def test_digests_are_equal_as_far_as_prompts_and_salts_are() -> None:
    one, longer = prefix_digests(prompt(1)), prefix_digests(prompt(1) + prompt(2))
    assert len(one) == 10 and longer[:10] == one and len(longer) == 20
    assert not set(one) & set(prefix_digests(prompt(1), salt="another tenant"))
    assert prefix_digests(prompt(1, 63)) == []


def test_a_conversation_stays_where_it_is_cached_unless_too_much_waits_there() -> None:
    router: PrefixAware[str] = PrefixAware()
    num_open = {"a": 0.0, "b": 0.0, "c": 0.0}
    chat = prefix_digests(prompt(1))
    first = router.choose(chat, num_open)
    assert router.choose(prefix_digests(prompt(2)), num_open) != first
    longer = prefix_digests(prompt(1) + prompt(3, 128))
    assert router.choose(longer, num_open) == first
    busy = num_open | {first: 20.0}
    moved = router.choose(longer, busy)
    assert moved != first
    assert router.choose(longer, num_open | {first: 1.0}) == moved  # both have it now


def test_conversations_with_one_system_prompt_are_spread_evenly() -> None:
    """Each begins like all others; in a system without waiting, and in one where nothing ends."""
    system = prompt(0, 128)
    for is_busy in (False, True):
        router: PrefixAware[str] = PrefixAware()
        num_open = {"a": 0.0, "b": 0.0}
        chosen = []
        for number in range(1, 41):
            chosen.append(router.choose(prefix_digests(system + prompt(number)), num_open))
            num_open[chosen[-1]] += is_busy
        assert max(shares(chosen)) <= 0.55, chosen


class Running:
    """Requests that end in the order in which they were sent, some at a time."""

    def __init__(self, num: int) -> None:
        self.chosen: list[str] = []
        self._num = num

    @property
    def num_open(self) -> dict[str, float]:
        latest = self.chosen[-self._num :] if self._num else []
        return {name: float(latest.count(name)) for name in "ab"}


def test_requests_that_are_nearly_equal_are_not_all_sent_to_one_replica() -> None:
    router: PrefixAware[str] = PrefixAware()
    system, running = prompt(0, 2048), Running(6)
    for number in range(200):
        digests = prefix_digests(system + prompt(number, 64))
        running.chosen.append(router.choose(digests, running.num_open))
    assert max(shares(running.chosen)) <= 0.65


def test_a_conversation_alone_is_never_moved() -> None:
    router: PrefixAware[str] = PrefixAware()
    text: list[int] = []
    chosen = set()
    for turn in range(50):
        text += prompt(turn, 128)
        chosen.add(router.choose(prefix_digests(text), {"a": 0.0, "b": 0.0}))
    assert len(chosen) == 1


def test_turns_of_conversations_in_any_order_keep_their_replica_and_the_balance() -> None:
    for seed in range(10):
        random, running = Random(seed), Running(4)
        router: PrefixAware[str] = PrefixAware()
        turns = [chat for chat in range(8) for _ in range(6)]
        random.shuffle(turns)
        text = {chat: prompt(chat) for chat in range(8)}
        homes: dict[int, list[str]] = {chat: [] for chat in range(8)}
        for chat in turns:
            text[chat] = text[chat] + prompt(random.randrange(1 << 30), 128)
            running.chosen.append(router.choose(prefix_digests(text[chat]), running.num_open))
            homes[chat].append(running.chosen[-1])
        kept = sum(a == b for each in homes.values() for a, b in pairwise(each))
        assert kept >= 34  # of 40
        assert max(shares(running.chosen)) <= 0.65


def test_a_new_replica_gets_its_share_and_not_everything() -> None:
    router: PrefixAware[str] = PrefixAware()
    for number in range(40):
        router.choose(prefix_digests(prompt(number)), {"a": 0.0, "b": 0.0})
    three = {"a": 0.0, "b": 0.0, "c": 0.0}
    chosen = [router.choose(prefix_digests(prompt(100 + n)), three) for n in range(30)]
    assert Counter(chosen)["c"] <= 12
    assert router.choose(prefix_digests(prompt(100)), {"c": 0.0}) == "c"  # the others have gone


def test_an_index_keeps_the_beginnings_of_the_latest_prompts() -> None:
    router: PrefixAware[str] = PrefixAware(max_pieces=10)
    one = {"a": 0.0}
    router.choose(prefix_digests(prompt(1)), one)
    router.choose(prefix_digests(prompt(2, 256)), one)
    assert router._match("a", prefix_digests(prompt(1))) == 6
    assert router._match("a", prefix_digests(prompt(2, 256))) == 4
