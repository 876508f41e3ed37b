"""Output that nobody reads any more, as under `penstock serve 2>&1 | head`."""

import os
import sys
from typing import TextIO

import pytest

from penstock.engine.config import EngineConfig
from penstock.server.announcement import print_line
from penstock.server.config import ServeConfig, ServerConfig
from penstock.server.service import EXIT_ENGINE_DIED, Service, State
from tests.support.paths import DEMO_MODEL
from tests.support.serving import MODEL


def unread_pipe() -> TextIO:
    reader, writer = os.pipe()
    os.close(reader)
    return os.fdopen(writer, "w")


async def test_an_error_that_cannot_be_printed_still_ends_the_server(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    config = ServeConfig(
        server=ServerConfig(served_model_names=(MODEL,)),
        engine=EngineConfig(model=str(DEMO_MODEL), scripted=True),
    )
    service = Service(config)
    with unread_pipe() as pipe:
        monkeypatch.setattr(sys, "stderr", pipe)
        await service._fail("the engine ended", EXIT_ENGINE_DIED)
    assert service.state is State.DEAD
    assert service.over.result() == EXIT_ENGINE_DIED


async def test_what_fails_while_it_ends_does_not_keep_it_from_ending() -> None:
    config = ServeConfig(
        server=ServerConfig(served_model_names=(MODEL,)),
        engine=EngineConfig(model=str(DEMO_MODEL), scripted=True),
    )
    service = Service(config)

    async def fail() -> None:
        raise RuntimeError("no")

    service.close = fail  # type: ignore[method-assign]
    with pytest.raises(RuntimeError):
        await service.drain("SIGTERM")
    assert service.over.done()


def test_what_is_printed_to_a_closed_pipe_is_dropped_from_then_on() -> None:
    with unread_pipe() as pipe:
        print_line("one", pipe)
        print_line("two", pipe)
