"""The grammars of open requests: compiled once, held while they are needed, bounded in memory."""

from collections import Counter
from typing import Any

import pytest
from llguidance import LLMatcher

from penstock.engine.errors import BadGrammar
from penstock.engine.sampling.grammar import GrammarCompiler, Grammars, OpenGrammars
from penstock.scheduler.types import RequestId, SamplingParams
from tests.support.paths import DEMO_MODEL

EOS = (2, 0)


class Counting(GrammarCompiler):
    """Counts how often it compiles each grammar."""

    def __init__(self) -> None:
        super().__init__(DEMO_MODEL, 2048, EOS)
        self.counts: Counter[str] = Counter()

    def compile(self, grammar: str) -> LLMatcher:
        self.counts[grammar] += 1
        return super().compile(grammar)


@pytest.fixture
def compiler() -> Counting:
    return Counting()


def opened(compiler: GrammarCompiler, **options: Any) -> OpenGrammars:
    return OpenGrammars(Grammars(compiler), **options)


def sampling(number: int, num_bytes: int = 0) -> SamplingParams:
    grammar = LLMatcher.grammar_from_regex(f"x{number}")
    return SamplingParams(max_tokens=1, grammar=grammar, grammar_bytes=num_bytes)


def matcher(table: OpenGrammars, wanted: SamplingParams) -> LLMatcher:
    assert wanted.grammar is not None
    return table.matcher(wanted.grammar)


def test_hundreds_of_grammars_stay_compiled_while_their_requests_are_open(
    compiler: Counting,
) -> None:
    table = opened(compiler)
    wanted = [sampling(i) for i in range(300)]
    futures = [table.open(RequestId(str(i)), each) for i, each in enumerate(wanted)]
    for future, each in zip(futures, wanted, strict=True):
        assert future.result() is matcher(table, each)
    assert set(compiler.counts.values()) == {1}
    for i in range(300):
        table.close(RequestId(str(i)))
    assert table.num_open == 0


def test_a_grammar_is_compiled_once_for_all_that_have_it_and_goes_with_the_last(
    compiler: Counting,
) -> None:
    table, wanted = opened(compiler), sampling(1)
    futures = [table.open(RequestId(name), wanted) for name in "ab"]
    assert futures[0] is futures[1]
    futures[0].result()
    table.close(RequestId("a"))
    assert table.num_open == 1 and matcher(table, wanted)
    table.close(RequestId("b"))
    assert table.num_open == 0
    with pytest.raises(AssertionError, match="before its grammar"):
        matcher(table, wanted)


def test_beyond_the_memory_a_grammar_waits_for_others_to_end(compiler: Counting) -> None:
    table = opened(compiler, max_bytes=10_000)
    large = [sampling(i, 6_000) for i in range(3)]
    first, second, third = (table.open(RequestId(str(i)), each) for i, each in enumerate(large))
    shared = table.open(RequestId("shared"), large[0])  # behind those that came before it
    first.result()
    assert not (second.done() or third.done() or shared.done())
    table.close(RequestId("1"))  # aborted before it was compiled
    assert compiler.counts.keys() == {large[0].grammar}
    table.close(RequestId("0"))
    assert third.result() is matcher(table, large[2]) and not second.done()
    assert not shared.done()
    table.close(RequestId("2"))
    assert shared.result() is matcher(table, large[0])
    table.close(RequestId("shared"))
    assert table.num_open == 0


def test_a_grammar_larger_than_the_memory_is_compiled_alone(compiler: Counting) -> None:
    table = opened(compiler, max_bytes=100)
    table.open(RequestId("a"), sampling(1, 1_000)).result()
    waits = table.open(RequestId("b"), sampling(2))
    assert not waits.done()
    table.close(RequestId("a"))
    waits.result()


def test_a_grammar_that_does_not_compile_fails_its_future_also_when_it_had_to_wait(
    compiler: Counting,
) -> None:
    table = opened(compiler, max_bytes=100)
    table.open(RequestId("a"), sampling(1, 1_000)).result()
    broken = SamplingParams(max_tokens=1, grammar="start: /[/")
    future = table.open(RequestId("b"), broken)
    table.close(RequestId("a"))
    with pytest.raises(BadGrammar):
        future.result()
    table.close(RequestId("b"))
    assert table.num_open == 0
