"""Grammars in the engine: compiled while steps run, and enforced id by id."""

import shutil
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from llguidance import LLMatcher

from penstock.engine.errors import BadGrammar
from penstock.engine.executors.scripted import ScriptedExecutor, scripted_info
from penstock.engine.sampling.grammar import GrammarCompiler, Grammars
from penstock.engine.sampling.grammar_table import GrammarTable
from penstock.engine.step.loop import EngineLoop
from penstock.engine.step.messages import Abort, FromEngine, Refused, StepReport, Submit
from penstock.scheduler.config import SchedulerConfig
from penstock.scheduler.groups import KVGroup
from penstock.scheduler.scheduler import Scheduler
from penstock.scheduler.types import (
    FinishReason,
    Request,
    RequestId,
    SamplingParams,
    SlotAssignment,
)
from tests.support.grammars import prepare
from tests.support.inbox import ListInbox
from tests.support.paths import DEMO_MODEL
from tests.support.scheduling import make_request

VOCAB_SIZE, EOS = 2048, (2, 0)
AB = LLMatcher.grammar_from_regex("[ab]{1,3}")


@pytest.fixture(scope="module")
def grammars() -> Grammars:
    return Grammars(GrammarCompiler(DEMO_MODEL, VOCAB_SIZE, EOS))


def table_with(
    grammars: Grammars, grammar: str, *output_ids: int, num_prompt: int = 2, **fields: Any
) -> GrammarTable:
    """One sequence in slot 3 of 8."""
    sampling = SamplingParams(max_tokens=9, grammar=grammar, stop_token_ids=EOS, **fields)
    ids = (*range(7, 7 + num_prompt), *output_ids)
    table = GrammarTable(grammars, 8, VOCAB_SIZE)
    prepare(table, sampling)
    table.assign(SlotAssignment(3, ids, num_prompt, ((),), sampling, 0))
    return table


def allowed(table: GrammarTable) -> list[int]:
    table.start([1, 3])
    table.wait()
    words = table.memory[3 * table.words_per_row : 4 * table.words_per_row]
    return [i for i in range(VOCAB_SIZE) if words[i // 32] >> i % 32 & 1]


def advance(table: GrammarTable, slots: list[int], token_ids: list[int]) -> frozenset[int]:
    """With the sequences that have the slots now."""
    return table.advance(slots, token_ids, table.constraints(slots))


def test_a_complete_grammar_allows_only_the_end(grammars: Grammars) -> None:
    table = table_with(grammars, LLMatcher.grammar_from_regex("[ab]{2}"))
    for _ in range(2):
        ids = allowed(table)
        assert ids and not table.must_end(3) and not set(EOS) & set(ids)
        single = next(i for i in ids if i < 256)
        assert advance(table, [1, 3], [5, single]) == frozenset()
    assert allowed(table) == sorted(EOS) and table.must_end(3)
    assert advance(table, [3], [2]) == frozenset()


def test_an_id_is_chosen_among_those_that_the_mask_allows(grammars: Grammars) -> None:
    table = table_with(grammars, LLMatcher.grammar_from_regex("[a-z0-9]{2,9}"))
    ids = allowed(table)
    assert [table.choose(3, EOS[0], n) for n in range(len(ids))] == ids
    assert table.choose(3, EOS[0], len(ids) + 2) == ids[2]
    assert all(table.choose(3, i, 0) == i for i in ids)


def test_masks_from_several_threads_are_the_same(
    grammars: Grammars, monkeypatch: pytest.MonkeyPatch
) -> None:
    schema = LLMatcher.grammar_from_json_schema({"type": "array", "items": {"type": "integer"}})
    inline = allowed(table_with(grammars, schema))
    monkeypatch.setattr("penstock.engine.sampling.grammar_table._MIN_PARALLEL_WORDS", 1)
    assert allowed(table_with(grammars, schema)) == inline


def test_the_cache_is_bounded_by_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("penstock.engine.sampling.grammar._MAX_CACHED_BYTES", 10_000)
    cache = Grammars(GrammarCompiler(DEMO_MODEL, VOCAB_SIZE, EOS))
    futures = [cache.compile(f'start: "{i}"', 3000) for i in range(9)]
    assert cache.num_cached == 3
    assert cache.compile('start: "8"', 3000) is futures[8]
    assert cache.compile('start: "0"', 3000) is not futures[0]
    cache.compile('start: "x"', 20_000)  # too large for it, so it is alone
    assert cache.num_cached == 1
    for future in futures:
        future.result()


def test_an_optional_end_can_be_put_off(grammars: Grammars) -> None:
    table = table_with(grammars, AB, 67)
    assert set(EOS) < set(allowed(table))
    table = table_with(grammars, AB, 67, grammar_to_the_end=True)
    assert not set(EOS) & set(allowed(table))
    table = table_with(grammars, AB, 67, 67, 67, grammar_to_the_end=True)
    assert allowed(table) == sorted(EOS)


def test_a_preempted_sequence_continues_after_its_output(grammars: Grammars) -> None:
    through = table_with(grammars, AB)
    for token_id in (67, 68):
        allowed(through)
        advance(through, [3], [token_id])
    assert allowed(through) == allowed(table_with(grammars, AB, 67, 68))


def test_an_id_outside_the_grammar_fails_only_its_row(grammars: Grammars) -> None:
    table = table_with(grammars, AB)
    allowed(table)
    assert advance(table, [1, 3], [5, 5]) == {1}


def test_the_id_of_a_slots_last_sequence_is_not_consumed_by_the_next_ones_grammar(
    grammars: Grammars,
) -> None:
    table = table_with(grammars, AB)
    allowed(table)
    launched = table.constraints([3])
    letters = LLMatcher.grammar_from_regex("[a-z]{6}")
    sampling = SamplingParams(max_tokens=9, grammar=letters)
    prepare(table, sampling)
    table.assign(SlotAssignment(3, (5,), 1, ((),), sampling, 0))
    assert table.advance([3], [67], launched) == frozenset()
    assert allowed(table) == allowed(table_with(grammars, letters))


def test_a_slot_forgets_its_grammar(grammars: Grammars) -> None:
    table = table_with(grammars, AB)
    plain = SamplingParams(max_tokens=9)
    table.assign(SlotAssignment(3, (5,), 1, ((),), plain, 0))
    assert not table.is_constrained(3)


def test_ids_beyond_the_tokenizers_vocabulary_are_not_allowed() -> None:
    larger = Grammars(GrammarCompiler(DEMO_MODEL, 2_500, EOS))
    sampling = SamplingParams(max_tokens=9, grammar=LLMatcher.grammar_from_regex("(?s:.)*"))
    table = GrammarTable(larger, 4, 2_500)
    prepare(table, sampling)
    table.assign(SlotAssignment(3, (7,), 1, ((),), sampling, 0))
    assert max(allowed(table)) < VOCAB_SIZE


def test_a_model_without_an_end_or_a_tokenizer_refuses_grammars(tmp_path: Path) -> None:
    for broken in (
        Grammars(GrammarCompiler(DEMO_MODEL, VOCAB_SIZE, ())),
        Grammars(GrammarCompiler(tmp_path, 9, EOS)),
    ):
        with pytest.raises(BadGrammar, match="structured output needs"):
            broken.compile(AB).result()
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(BadGrammar):
        Grammars(GrammarCompiler(tmp_path, 9, EOS)).compile(AB).result()


def test_only_the_latest_grammars_are_cached(grammars: Grammars) -> None:
    first = grammars.compile(AB)
    assert grammars.compile(AB) is first
    for i in range(200):
        grammars.compile(LLMatcher.grammar_from_regex(f"x{i}"))
    assert grammars.compile(AB) is not first


class Compiling(ScriptedExecutor):
    """An executor whose grammars are ready when the test decides."""

    def __init__(self) -> None:
        super().__init__(scripted_info(num_blocks=64, max_model_len=512))
        self.future: Future[None] = Future()

    def prepare(self, request: Request) -> "Future[None] | None":
        return self.future if request.sampling.grammar else None


class Bench:
    """A loop that the test steps."""

    def __init__(self) -> None:
        scheduler = Scheduler(
            SchedulerConfig(max_num_seqs=4), groups=[KVGroup(64)], block_size=16, max_model_len=512
        )
        self.inbox, self.executor = ListInbox(), Compiling()
        self.sent: list[FromEngine] = []
        self.loop = EngineLoop(scheduler, self.executor, self.inbox, self.sent.append)

    def submit(self, name: str, grammar: str | None = None) -> None:
        request = make_request(name, 4, max_tokens=2)
        sampling = replace(request.sampling, grammar=grammar)
        self.inbox.commands.append(Submit(replace(request, sampling=sampling)))

    def finishes(self) -> dict[str, FinishReason]:
        reports = [message for message in self.sent if isinstance(message, StepReport)]
        outputs = [output for report in reports for output in report.outputs]
        return {o.request_id: o.finish.reason for o in outputs if o.finish}


def test_others_run_while_a_requests_grammar_compiles() -> None:
    bench = Bench()
    bench.submit("slow", AB)
    bench.submit("plain")
    for _ in range(3):
        bench.loop.step()
    assert bench.finishes() == {"plain": FinishReason.LENGTH}
    assert bench.inbox.patience[-1] is not None  # it polls
    bench.executor.future.set_result(None)
    for _ in range(3):
        bench.loop.step()
    assert bench.finishes().keys() == {"plain", "slow"}


def test_a_request_whose_grammar_does_not_compile_is_refused() -> None:
    bench = Bench()
    bench.submit("slow", AB)
    bench.loop.step()
    bench.executor.future.set_exception(BadGrammar("it is wrong"))
    bench.loop.step()
    assert bench.sent == [Refused(RequestId("slow"), "it is wrong")]


def test_a_request_can_be_aborted_while_its_grammar_compiles() -> None:
    bench = Bench()
    bench.submit("slow", AB)
    bench.loop.step()
    bench.inbox.commands.append(Abort(RequestId("slow")))
    bench.loop.step()
    assert bench.finishes() == {"slow": FinishReason.ABORT}
    bench.executor.future.set_result(None)
    bench.loop.step()
    assert bench.finishes() == {"slow": FinishReason.ABORT}


def test_a_tokenizer_that_is_loaded_is_not_read_for_the_first_grammar(tmp_path: Path) -> None:
    shutil.copy(DEMO_MODEL / "tokenizer.json", tmp_path)
    grammars = Grammars(GrammarCompiler(tmp_path, VOCAB_SIZE, EOS))
    grammars.load_tokenizer()
    (tmp_path / "tokenizer.json").unlink()
    assert not grammars.compile(LLMatcher.grammar_from_regex("a")).result().is_error()
