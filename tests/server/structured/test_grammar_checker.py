"""The processes that compile grammars before the engine does: what each may take, who waits for
them, and what happens when one ends."""

import asyncio
import contextlib
import os
import signal
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
from llguidance import LLMatcher

from penstock.engine.client import BadGrammar, LoadFormat
from penstock.engine.executors.scripted import scripted_info
from penstock.server.errors import GrammarQueueFull, reply_to
from penstock.server.structured import grammar_checker
from penstock.server.structured.grammar_checker import GrammarChecker
from tests.support.memory import family
from tests.support.paths import DEMO_MODEL

DIGITS = LLMatcher.grammar_from_regex("[0-9]{1,3}")
# Each goes on for longer than a grammar may take.
ENDLESS = LLMatcher.grammar_from_regex("a{4000000000}")
# 3,000 optional properties take half a second; twice as many, four times as long.
SLOW = LLMatcher.grammar_from_json_schema({"properties": {f"n{i}": {} for i in range(7000)}})
CHAINED = "start: r0\n" + "\n".join(f"r{i}: r{i + 1}" for i in range(9000)) + '\nr9000: "a"'


def checked(use: Callable[[GrammarChecker], Awaitable[Any]]) -> Any:
    """What `use` returns for a new checker, whose processes have all ended afterwards."""

    async def run() -> Any:
        info = scripted_info(vocab_size=2048)
        checker = GrammarChecker(DEMO_MODEL, info, LoadFormat.AUTO)
        try:
            return await asyncio.wait_for(use(checker), 60)
        finally:
            await checker.close()

    return asyncio.run(run())


def processes() -> list[int]:
    """Those of the checkers in this process, without what they fork: servers have others."""
    found = []
    for pid in family(os.getpid()):
        with contextlib.suppress(OSError):  # one that has ended since
            parent = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
            is_one = b"checker_process" in Path(f"/proc/{pid}/cmdline").read_bytes()
            if is_one and parent == os.getpid():
                found.append(pid)
    return found


def environment_of(pid: int) -> bytes:
    return Path(f"/proc/{pid}/environ").read_bytes()


def test_grammars_are_compiled_without_the_servers_environment(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("PENSTOCK_API_KEY", "secret")

    async def use(checker: GrammarChecker) -> None:
        await checker.check(DIGITS)
        variables = environment_of(*processes())
        assert b"PYTHONPATH=" in variables and b"secret" not in variables

    checked(use)


def test_a_verdict_is_cached_and_has_the_size() -> None:
    async def use(checker: GrammarChecker) -> None:
        num_bytes = await checker.check(DIGITS)
        assert 1000 < num_bytes < 4 << 20
        large = await checker.check(LLMatcher.grammar_from_regex("a{50000}"))
        assert 10 << 20 < large < 40 << 20
        for pid in processes():
            os.kill(pid, signal.SIGSTOP)  # nobody would answer
        assert await checker.check(DIGITS) == num_bytes

    checked(use)


@pytest.mark.parametrize("grammar", [ENDLESS, SLOW, CHAINED], ids=["memory", "time", "stack"])
def test_what_takes_too_much_is_refused_and_its_process_goes_on(grammar: str) -> None:
    async def use(checker: GrammarChecker) -> None:
        await checker.check(DIGITS)
        before = processes()
        for _ in range(2):  # from the cache the second time
            with pytest.raises(BadGrammar, match="simplify it"):
                await checker.check(grammar)
        await checker.check('start: "b"')
        assert processes() == before

    checked(use)


def test_a_grammar_of_half_a_character_is_refused() -> None:
    async def use(checker: GrammarChecker) -> None:
        with pytest.raises(BadGrammar):
            await checker.check('start: "\ud800"')

    checked(use)


def test_a_grammar_whose_process_is_killed_is_tried_again() -> None:
    async def use(checker: GrammarChecker) -> None:
        await checker.check(DIGITS)
        (pid,) = processes()
        os.kill(pid, signal.SIGSTOP)
        check = asyncio.create_task(checker.check('start: "c"'))
        await asyncio.sleep(0.2)
        assert not check.done()
        os.kill(pid, signal.SIGKILL)
        assert await check > 0
        assert pid not in processes()

    checked(use)


def test_a_grammar_that_waits_too_long_may_be_sent_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grammar_checker, "MAX_WAIT_S", 0.3)
    monkeypatch.setattr(grammar_checker, "MAX_WAITING", 2)

    async def use(checker: GrammarChecker) -> None:
        await asyncio.gather(checker.check(DIGITS), checker.check('start: "d"'))
        stopped = processes()
        assert len(stopped) == grammar_checker.NUM_PROCESSES
        for pid in stopped:
            os.kill(pid, signal.SIGSTOP)
        texts = [f'start: "e{i}"' for i in range(5)]
        checks = [asyncio.create_task(checker.check(text)) for text in texts]
        with pytest.raises(GrammarQueueFull) as refused:
            await checks[4]  # two are being compiled, two wait
        assert not any(check.done() for check in checks[:4])
        for check in checks[2:4]:
            with pytest.raises(GrammarQueueFull):
                await check
        reply = reply_to(refused.value)
        assert (reply.status, reply.code) == (429, "grammar_queue_full")
        assert ("Retry-After", "2") in reply.headers
        for pid in stopped:
            os.kill(pid, signal.SIGCONT)
        await asyncio.gather(*checks[:2])
        for text in texts:
            assert await checker.check(text) > 0

    checked(use)


def test_a_client_that_disconnects_does_not_end_the_check_of_another() -> None:
    async def use(checker: GrammarChecker) -> None:
        await checker.check(DIGITS)
        (pid,) = processes()
        os.kill(pid, signal.SIGSTOP)
        gone = asyncio.create_task(checker.check('start: "f"'))
        await asyncio.sleep(0.1)
        gone.cancel()
        await asyncio.gather(gone, return_exceptions=True)
        os.kill(pid, signal.SIGCONT)
        assert await checker.check('start: "g"') > 0
        assert pid in processes()

    checked(use)


def test_the_processes_end_with_the_checker() -> None:
    async def use(checker: GrammarChecker) -> list[int]:
        await checker.check(DIGITS)
        return processes()

    (pid,) = checked(use)
    assert pid not in processes()
