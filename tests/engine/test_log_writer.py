"""Lines to a pipe: written in order, dropped where nobody reads them, and never waited for."""

import os
from collections.abc import Iterator

import pytest

from penstock.engine.process.logs import LineWriter


@pytest.fixture
def pipe() -> Iterator[tuple[int, int]]:
    reader, writer = os.pipe()
    yield reader, writer
    os.close(reader)
    os.close(writer)


def test_lines_arrive_whole_and_in_order(pipe: tuple[int, int]) -> None:
    reader, writer = pipe
    lines = LineWriter(writer)
    for i in range(100):
        lines.write(f"line {i}\n")
    lines.flush(10)
    assert os.read(reader, 1 << 16).decode().splitlines() == [f"line {i}" for i in range(100)]


def test_what_does_not_fit_is_dropped_and_counted(pipe: tuple[int, int]) -> None:
    reader, writer = pipe
    lines = LineWriter(writer, max_waiting=10)
    lines.describe_dropped = "dropped {}\n".format
    for _ in range(1000):  # a kilobyte each, so the pipe is soon full
        lines.write("x" * 1023 + "\n")
    lines.flush(0.1)  # returns although nobody reads
    received = b""
    while b"dropped" not in received:
        received += os.read(reader, 1 << 16)
    num_written = received.count(b"x\n")
    assert received.endswith(f"dropped {1000 - num_written}\n".encode()) and num_written < 100


def test_a_pipe_without_a_reader_ends_nothing() -> None:
    reader, writer = os.pipe()
    os.close(reader)
    lines = LineWriter(writer)
    lines.write("one\n")
    lines.write("two\n")
    lines.flush(10)
    assert not lines._waiting.unfinished_tasks
    os.close(writer)
