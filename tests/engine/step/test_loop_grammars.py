"""Steps never compile a grammar nor wait for one: what is not ready waits outside the batch."""

import threading
from dataclasses import replace

import pytest
from llguidance import LLMatcher

from penstock.engine.executors.scripted import ScriptedExecutor, scripted_info
from penstock.engine.sampling.grammar import GrammarCompiler, Grammars
from penstock.engine.sampling.grammar_table import GrammarTable
from penstock.engine.step.loop import EngineLoop
from penstock.engine.step.messages import Abort, FromEngine, StepReport, Submit
from penstock.scheduler.config import SchedulerConfig
from penstock.scheduler.groups import KVGroup
from penstock.scheduler.scheduler import Scheduler
from penstock.scheduler.types import FinishReason, RequestId
from tests.support.inbox import ListInbox
from tests.support.paths import DEMO_MODEL
from tests.support.scheduling import make_request
from tests.support.serving import wait_until

VOCAB_SIZE, EOS = 2048, (2, 0)
LETTERS = LLMatcher.grammar_from_regex("[a-z]*")


class Compiler(GrammarCompiler):
    """Compiles in its own threads alone, each grammar when the test opens the gate."""

    def __init__(self) -> None:
        super().__init__(DEMO_MODEL, VOCAB_SIZE, EOS)
        self.gate = threading.Event()
        self.gate.set()
        self.compiled: list[str] = []
        self._test = threading.current_thread()

    def compile(self, grammar: str) -> LLMatcher:
        assert threading.current_thread() is not self._test
        assert self.gate.wait(30)
        self.compiled.append(grammar)
        return super().compile(grammar)


class Bench:
    """The loop, steps of which the test runs in its own thread."""

    def __init__(self, num_blocks: int = 64, *, runs_ahead: bool = False) -> None:
        info = replace(
            scripted_info(num_blocks=num_blocks, max_model_len=64), vocab_size=VOCAB_SIZE
        )
        self.scheduler = Scheduler(
            SchedulerConfig(max_num_seqs=4, enable_prefix_caching=False),
            groups=[KVGroup(num_blocks)],
            block_size=info.block_size,
            max_model_len=64,
        )
        self.compiler = Compiler()
        self.table = GrammarTable(Grammars(self.compiler), 4, VOCAB_SIZE)
        executor = ScriptedExecutor(info, grammars=self.table, runs_ahead=runs_ahead)
        self.inbox = ListInbox()
        self.sent: list[FromEngine] = []
        self.loop = EngineLoop(self.scheduler, executor, self.inbox, self.sent.append)

    def submit(
        self, name: str, grammar: str | None = None, *, max_tokens: int = 3, n: int = 1
    ) -> None:
        request = make_request(name, 4, max_tokens=max_tokens, n=n)
        sampling = replace(request.sampling, grammar=grammar)
        self.inbox.commands.append(Submit(replace(request, sampling=sampling)))

    def finishes(self) -> dict[tuple[str, int], FinishReason]:
        reports = [message for message in self.sent if isinstance(message, StepReport)]
        outputs = [output for report in reports for output in report.outputs]
        return {(o.request_id, o.index): o.finish.reason for o in outputs if o.finish}

    def run(self) -> None:
        """Until everything has ended."""

        def has_ended() -> bool:
            self.loop.step()
            return not self.scheduler.has_work

        wait_until(has_ended)
        self.loop.step()


def test_hundreds_of_distinct_grammars_are_each_compiled_once_and_never_in_a_step() -> None:
    bench = Bench()
    for i in range(300):
        bench.submit(str(i), LLMatcher.grammar_from_regex(f"[a-z]*{i}"))
    bench.run()
    assert len(bench.compiler.compiled) == len(set(bench.compiler.compiled)) == 300
    assert set(bench.finishes().values()) == {FinishReason.LENGTH}
    assert len(bench.finishes()) == 300
    assert bench.table._open.num_open == 0


@pytest.mark.parametrize("runs_ahead", [False, True])
def test_no_slot_holds_the_grammar_of_a_request_that_has_ended(runs_ahead: bool) -> None:
    bench = Bench(runs_ahead=runs_ahead)
    for name in "ab":
        bench.submit(name, LETTERS, n=2)
    bench.loop.step()
    bench.inbox.commands.append(Abort(RequestId("b")))
    bench.run()
    assert {bench.finishes()["a", index] for index in range(2)} == {FinishReason.LENGTH}
    assert not bench.table.constrains_any(range(4))


def test_a_preempted_request_continues_though_its_grammar_was_evicted_from_the_cache() -> None:
    bench = Bench(num_blocks=5)
    for name in "abcd":
        bench.submit(name, LETTERS, max_tokens=40)
    for _ in range(3):
        bench.loop.step()
    for i in range(200):  # more than the cache holds
        bench.submit(str(i), LLMatcher.grammar_from_regex(f"[a-z]*{i}"), max_tokens=1)
    bench.run()
    assert bench.scheduler.stats().preemptions_total > 0
    assert bench.compiler.compiled.count(LETTERS) == 1
    assert {bench.finishes()[name, 0] for name in "abcd"} == {FinishReason.LENGTH}


def test_an_answer_aborted_in_preparation_ends_alone_and_its_siblings_wait_while_others_run() -> (
    None
):
    bench = Bench()
    bench.compiler.gate.clear()
    bench.submit("slow", LETTERS, n=3)
    bench.submit("plain")
    bench.loop.step()
    bench.inbox.commands.append(Abort(RequestId("slow"), 0))
    bench.inbox.commands.append(Abort(RequestId("slow"), 2))
    for _ in range(5):
        bench.loop.step()  # would hang if it waited for the grammar
    assert bench.finishes() == {
        ("slow", 0): FinishReason.ABORT,
        ("slow", 2): FinishReason.ABORT,
        ("plain", 0): FinishReason.LENGTH,
    }
    assert bench.scheduler.num_waiting == 1
    bench.compiler.gate.set()
    bench.run()
    assert bench.finishes()["slow", 1] is FinishReason.LENGTH
    assert bench.table._open.num_open == 0


@pytest.mark.parametrize("runs_ahead", [False, True])
def test_a_request_aborted_in_preparation_never_runs_and_leaves_nothing(runs_ahead: bool) -> None:
    bench = Bench(runs_ahead=runs_ahead)
    bench.compiler.gate.clear()
    bench.submit("slow", LETTERS, n=2)
    bench.loop.step()
    bench.inbox.commands.append(Abort(RequestId("slow")))
    bench.loop.step()
    assert set(bench.finishes()) == {("slow", 0), ("slow", 1)}
    assert bench.table._open.num_open == 0
    bench.compiler.gate.set()
    bench.run()
    assert set(bench.finishes().values()) == {FinishReason.ABORT}
    assert bench.scheduler.num_waiting == bench.scheduler.num_running == 0


def test_a_second_request_of_the_same_id_is_refused_and_the_first_keeps_its_grammar() -> None:
    bench = Bench()
    bench.submit("a", LETTERS)
    bench.submit("a", LETTERS)
    bench.run()
    assert bench.finishes() == {("a", 0): FinishReason.LENGTH}
    assert bench.compiler.compiled == [LETTERS]
