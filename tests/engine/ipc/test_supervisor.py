"""The life of an engine process, without a stream: started, ready, stepping, ended."""

import asyncio
import contextlib
import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import zmq
import zmq.asyncio

from penstock.engine.config import EngineConfig
from penstock.engine.errors import EngineFailed
from penstock.engine.ipc.supervisor import End, EndCause, EngineProcess, EngineState
from penstock.engine.process.phases import LoadProgress
from penstock.engine.step.messages import FromLoop, Refused, StepReport, Submit
from tests.support.paths import DEMO_MODEL
from tests.support.scheduling import make_request

MODULE = "penstock.engine.ipc.process"


class Life:
    """An engine process, and what it reports."""

    def __init__(self, **changes: object) -> None:
        settings: dict[str, object] = {"model": str(DEMO_MODEL), "scripted": True}
        config = EngineConfig(**(settings | changes))  # type: ignore[arg-type]
        self.messages: asyncio.Queue[LoadProgress | FromLoop] = asyncio.Queue()
        self.ends: list[End] = []
        self.has_ended = asyncio.Event()
        self.process = EngineProcess(config, MODULE, self.messages.put_nowait, self._end)

    def _end(self, end: End) -> None:
        self.ends.append(end)
        self.has_ended.set()

    async def end(self) -> End:
        """The only one."""
        await asyncio.wait_for(self.has_ended.wait(), 60)
        (end,) = self.ends
        return end


async def test_it_reports_what_the_engine_sends_from_ready_to_closed() -> None:
    life = Life()
    process = life.process
    assert process.state.value == "starting" and process.pid is None
    await process.start()
    assert process.state.value == "ready"
    process.send(Submit(make_request("a", 5, max_tokens=1)))
    report = await asyncio.wait_for(life.messages.get(), 60)
    assert isinstance(report, StepReport) and report.outputs.request_ids == ["a"]
    process.send(Submit(make_request("b", 90_000)))
    refusal = await asyncio.wait_for(life.messages.get(), 60)
    assert isinstance(refusal, Refused) and refusal.request_id == "b"
    await process.close()
    assert process.state is EngineState.DEAD and process.pid is None
    assert await life.end() == End(EndCause.CLOSED, "the server is shutting down")


async def test_a_message_that_cannot_be_taken_ends_it_as_a_dead_process() -> None:
    life = Life()
    process = life.process

    def fail(_: object) -> None:
        raise ValueError("what is this?")

    process._on_message = fail
    await process.start()
    process.send(Submit(make_request("a", 5, max_tokens=1)))
    end = await life.end()
    assert "what is this?" in end.why and end.cause is EndCause.FAILED
    assert process.state is EngineState.DEAD
    await process.close()


async def test_a_killed_process_is_reported_once_with_its_code() -> None:
    life = Life()
    await life.process.start()
    assert life.process.pid is not None
    os.kill(life.process.pid, signal.SIGKILL)
    end = await life.end()
    assert "code -9" in end.why and end.cause is EndCause.KILLED
    assert life.process.state is EngineState.DEAD
    await life.process.close()
    assert life.ends == [end]


async def test_what_a_bus_error_means_is_told() -> None:
    """As where a file of the model is cut while it is read."""
    life = Life()
    await life.process.start()
    assert life.process.pid is not None
    os.kill(life.process.pid, signal.SIGBUS)
    end = await life.end()
    assert "code -7" in end.why and "became shorter" in end.why and "/dev/shm" in end.why
    assert end.cause is EndCause.FAILED
    await life.process.close()


async def test_a_process_that_cannot_end_delays_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    life = Life()
    await life.process.start()
    pid = life.process.pid
    assert pid is not None
    # As where a device does not answer: SIGKILL has no effect yet.
    monkeypatch.setattr(EngineProcess, "_kill_group", lambda _: None)
    monkeypatch.setattr("penstock.engine.ipc.supervisor._END_S", 0.2)
    assert not await asyncio.wait_for(life.process.close(), 60)
    os.kill(pid, signal.SIGKILL)
    await asyncio.wait_for(_until(lambda: life.process.pid is None), 60)


async def test_a_process_that_cannot_start_is_reported_with_its_own_reason() -> None:
    life = Life(model="/nowhere/at/all")
    with pytest.raises(EngineFailed, match="nowhere"):
        await life.process.start()
    await life.process.close()
    assert "nowhere" in (await life.end()).why


async def test_another_process_starts_where_one_has_ended() -> None:
    for _ in range(2):
        life = Life()
        await life.process.start()
        assert life.process.state is EngineState.READY
        await life.process.close()


async def test_a_stopped_process_falls_silent_and_is_heard_again_when_it_continues() -> None:
    life = Life()
    await life.process.start()
    assert life.process.pid is not None
    os.kill(life.process.pid, signal.SIGSTOP)
    await asyncio.wait_for(_until(lambda: life.process.silence_s > 2.5), 60)
    os.kill(life.process.pid, signal.SIGCONT)
    await asyncio.wait_for(_until(lambda: life.process.silence_s < 1), 60)
    await life.process.close()


async def _until(condition: Callable[[], bool]) -> None:
    while not condition():  # noqa: ASYNC110
        await asyncio.sleep(0.02)


async def test_no_other_process_can_connect_to_the_engines_socket() -> None:
    life = Life()
    await life.process.start()
    [name] = _abstract_sockets()
    intruder: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.DEALER)
    intruder.connect(f"ipc://{name}")
    intruder.send(b"not a message of the engine")
    await asyncio.sleep(0.5)
    assert life.process.state is EngineState.READY
    intruder.close(linger=0)
    await life.process.close()


def _abstract_sockets() -> set[str]:
    """Those on which a server of this process listens."""
    text = Path("/proc/net/unix").read_text(encoding="utf-8")
    ours = set(_open_files())
    rows = (line.split() for line in text.splitlines()[1:])
    named = ((row[6], row[7]) for row in rows if len(row) > 7)
    return {
        name
        for inode, name in named
        if name.startswith("@penstock-") and f"socket:[{inode}]" in ours
    }


def _open_files() -> Iterator[str]:
    for link in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # that of the listing itself
            yield str(link.readlink())


async def test_a_process_that_cannot_be_made_is_one_sentence_and_leaves_no_file_open(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    zmq.asyncio.Context.instance().socket(zmq.DEALER).close()  # what it opens once stays
    life = Life()
    monkeypatch.setattr("sys.executable", "/nowhere/python")
    before = set(_open_files())
    with pytest.raises(EngineFailed, match="cannot be started: No such file"):
        await life.process.start()
    await life.process.close()
    # The socket closes in its own thread.
    await asyncio.wait_for(_until(lambda: not set(_open_files()) - before), 60)
    assert (await life.end()).cause is EndCause.FAILED


async def test_a_compiler_that_the_process_started_ends_with_it(tmp_path: Path) -> None:
    (tmp_path / "with_child.py").write_text(
        "import subprocess, sys\n"
        "subprocess.Popen(['sleep', '1000'])\n"
        "from penstock.engine.ipc.process import main\n"
        "main()\n"
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(tmp_path))
        life = Life()
        life.process._module = "with_child"
        await life.process.start()
    engine = life.process.pid
    assert engine is not None
    (child,) = _children(engine)
    os.kill(engine, signal.SIGKILL)
    await life.end()
    await asyncio.wait_for(_until(lambda: _has_ended(child)), 60)
    await life.process.close()


def _children(pid: int) -> list[int]:
    text = Path(f"/proc/{pid}/task/{pid}/children").read_text(encoding="ascii")
    return [int(child) for child in text.split()]


def _has_ended(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except OSError:
        return True
