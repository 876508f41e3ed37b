"""Workloads from files: conversations with their texts, and traces of lengths and times.

A reader yields the usable rows in the file's order and reads only as many as it must: traces have
millions. A row that it cannot parse is a `BadDataset` that names the file and the line.
"""

import csv
import math
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from penstock.loadtest.workload.config import Dataset
from penstock.scheduler.errors import InvalidConfig

T = TypeVar("T")

# Tokens per hash id of a Mooncake trace, from the trace's documentation.
MOONCAKE_BLOCK_TOKENS = 512
TRAFFIC_SPAN_S = 3600.0
# Longer than any model's context: a mistake in the file, and could use up all memory.
MAX_TOKENS = 10_000_000


class BadDataset(InvalidConfig):
    """The file is not in the format of --dataset-name; the message names the line if known."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceRow:
    """One request of a trace. at_s counts from the trace's own origin. hash_ids: equal ids are
    equal blocks of block_tokens tokens. tenant, priority: see TimedRequest."""

    at_s: float
    num_prompt_tokens: int
    num_output_tokens: int
    hash_ids: tuple[int, ...] = ()
    block_tokens: int = MOONCAKE_BLOCK_TOKENS
    tenant: str = ""
    priority: int = 0

    def __post_init__(self) -> None:
        for number in (self.num_prompt_tokens, self.num_output_tokens):
            if number > MAX_TOKENS:
                raise ValueError(f"{number} tokens are more than any model accepts")
        if not math.isfinite(self.at_s):
            raise ValueError(f"the time is {self.at_s}")


@dataclass(frozen=True, slots=True, kw_only=True)
class TextRow:
    """One request as text. max_tokens: None if the file has none."""

    prompt: str | list[int] = ""
    messages: list[dict[str, Any]] | None = None
    max_tokens: int | None = None


def read_azure(path: Path) -> Iterator[TraceRow]:
    """Azure's LLM inference traces of 2023 and 2024: TIMESTAMP, ContextTokens, GeneratedTokens."""
    columns = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")
    return _read_csv(path, columns, _timestamp, "a date and time")


def _timestamp(text: str) -> float:
    """Seconds from a date and time: 2023's files have no time zone, 2024's do."""
    time = datetime.fromisoformat(text)
    # Only differences within a file matter: UTC for all times without a zone has no DST jumps.
    return (time if time.tzinfo else datetime.fromisoformat(f"{text}+00:00")).timestamp()


def read_burstgpt(path: Path) -> Iterator[TraceRow]:
    """BurstGPT; a row without response tokens is a failed request and is left out."""
    columns = ("Timestamp", "Request tokens", "Response tokens")
    return _read_csv(path, columns, float, "a number of seconds")


def _read_csv(
    path: Path, columns: tuple[str, str, str], parse_time: Callable[[str], float], kind: str
) -> Iterator[TraceRow]:
    """Finds columns by name, ignoring case and order; leaves out rows without tokens. columns: of
    times, which are of this kind, of prompt tokens, and of output tokens."""
    with _open(path) as file:
        lines = csv.reader(file)
        try:
            header = [name.strip().lower() for name in next(lines, [])]
        except (ValueError, csv.Error) as error:
            raise BadDataset(f"{path}, line 1: {error}") from error
        missing = [name for name in columns if name.lower() not in header]
        if missing:
            raise BadDataset(f"{path}, line 1: there is no column {missing[0]!r}")
        while True:
            try:
                row = next(lines, None)
                if row is None:
                    return
                if not row:
                    continue
                if len(row) != len(header):
                    raise ValueError(f"it has {len(row)} values, and the header {len(header)}")
                values = dict(zip(header, row, strict=True))
                parsed = TraceRow(
                    at_s=_parsed(values, columns[0], parse_time, kind),
                    num_prompt_tokens=_parsed(values, columns[1], int, "a whole number"),
                    num_output_tokens=_parsed(values, columns[2], int, "a whole number"),
                )
            except (ValueError, csv.Error) as error:
                raise BadDataset(f"{path}, line {lines.line_num}: {error}") from error
            if parsed.num_prompt_tokens > 0 and parsed.num_output_tokens > 0:
                yield parsed


def _parsed(row: dict[str, str], column: str, parse: Callable[[str], T], kind: str) -> T:
    text = row[column.lower()]
    try:
        return parse(text)
    except ValueError as error:
        raise ValueError(f"{column} is {text!r}, and not {kind}") from error


class _MooncakeLine(msgspec.Struct):
    timestamp: float  # milliseconds
    input_length: int
    output_length: int
    hash_ids: list[int] = []


def read_mooncake(path: Path) -> Iterator[TraceRow]:
    """Mooncake's traces: one JSON object a line."""
    for where, line in _json_lines(path):
        row = _decode(where, line, _MooncakeLine)
        if row.input_length > 0 and row.output_length > 0:
            yield _row_of_blocks(where, row, MOONCAKE_BLOCK_TOKENS)


def _row_of_blocks(where: str, line: _MooncakeLine, block_tokens: int, **more: Any) -> TraceRow:
    num_blocks = -(-line.input_length // block_tokens)
    try:
        return TraceRow(
            at_s=line.timestamp / 1000,
            num_prompt_tokens=line.input_length,
            num_output_tokens=line.output_length,
            hash_ids=tuple(line.hash_ids[:num_blocks]),
            block_tokens=block_tokens,
            **more,
        )
    except ValueError as error:
        raise BadDataset(f"{where}: {error}") from error


class _Recording(msgspec.Struct):
    input_lens: list[int]
    output_lens: list[int]
    start_times: list[float]


def read_recording(path: Path) -> Iterator[TraceRow]:
    """A result of `penstock bench --save-detailed`, or of vLLM's: lengths and times of a run. A
    request without output tokens failed, and is left out."""
    data = _read(path)
    try:
        recording = msgspec.json.decode(data, type=_Recording)
        rows = zip(recording.start_times, recording.input_lens, recording.output_lens, strict=True)
        for at_s, num_prompt, num_output in rows:
            if num_prompt > 0 and num_output > 0:
                yield TraceRow(
                    at_s=at_s, num_prompt_tokens=num_prompt, num_output_tokens=num_output
                )
    except (ValueError, msgspec.MsgspecError) as error:
        raise BadDataset(
            f"{path} is not a result of penstock bench --save-result --save-detailed: "
            f"{_sentence(error)}"
        ) from error


class _TrafficHeader(msgspec.Struct):
    penstock_traffic: int
    block_tokens: int


class _TrafficLine(_MooncakeLine):
    tenant: int = 0
    priority: int = 0


def read_traffic(path: Path) -> Iterator[TraceRow]:
    """A file of `penstock serve --record-traffic`, and the one before it: the last hour of both."""
    before = path.with_name(f"{path.name}.1")
    rows = [row for each in (before, path) if each.is_file() for row in _traffic_rows(each)]
    if not rows:
        yield from _traffic_rows(path)  # which says why
    last_s = max((row.at_s for row in rows), default=0.0)
    yield from (row for row in rows if row.at_s >= last_s - TRAFFIC_SPAN_S)


def _traffic_rows(path: Path) -> Iterator[TraceRow]:
    """The last line may be cut: its server may have been killed."""
    lines = list(_json_lines(path))
    try:
        header = msgspec.json.decode(lines[0][1] if lines else "", type=_TrafficHeader)
    except msgspec.MsgspecError as error:
        raise BadDataset(
            f"{path} is not a file of penstock serve --record-traffic: {_sentence(error)}"
        ) from error
    for where, line in lines[1:]:
        if where == lines[-1][0] and not line.endswith("\n"):
            return
        row = _decode(where, line, _TrafficLine)
        more = {"tenant": str(row.tenant), "priority": row.priority}
        yield _row_of_blocks(where, row, header.block_tokens, **more)


READERS: dict[Dataset, Callable[[Path], Iterator[TraceRow]]] = {
    Dataset.AZURE: read_azure,
    Dataset.BURSTGPT: read_burstgpt,
    Dataset.MOONCAKE: read_mooncake,
    Dataset.RECORDING: read_recording,
    Dataset.TRAFFIC: read_traffic,
}


class _CustomLine(msgspec.Struct, forbid_unknown_fields=True):
    prompt: str | list[int] | None = None
    messages: list[dict[str, Any]] | None = None
    max_tokens: int | None = None
    output_tokens: int | None = None  # vLLM's name of it


def read_custom(path: Path, *, is_chat: bool) -> Iterator[TextRow]:
    """One `{"prompt": ...}` or `{"messages": [...]}` per line, with an optional `max_tokens`.
    is_chat: the endpoint is for chat, and accepts messages or text; otherwise text or token ids."""
    for where, line in _json_lines(path):
        row = _decode(where, line, _CustomLine)
        if (row.prompt is None) == (row.messages is None):
            raise BadDataset(f'{where}: give either "prompt" or "messages"')
        if not (row.prompt or row.messages):
            raise BadDataset(f"{where}: the prompt is empty")
        if row.messages and not is_chat:
            raise BadDataset(f"{where}: messages require --backend openai-chat")
        if is_chat and isinstance(row.prompt, list):
            raise BadDataset(f"{where}: token ids require --backend openai")
        max_tokens = row.output_tokens if row.max_tokens is None else row.max_tokens
        if max_tokens is not None and max_tokens < 1:
            raise BadDataset(f"{where}: max_tokens is {max_tokens}; it must be at least 1")
        yield TextRow(prompt=row.prompt or "", messages=row.messages or None, max_tokens=max_tokens)


class _Turn(msgspec.Struct):
    value: str


class _Conversation(msgspec.Struct):
    conversations: list[_Turn] = []


def read_sharegpt(path: Path) -> list[tuple[str, str]]:
    """The first two turns, prompt and response, of each conversation that has two."""
    data = _read(path)
    try:
        conversations = msgspec.json.decode(data, type=list[_Conversation])
    except msgspec.MsgspecError as error:
        place = _line_of(data, str(error))
        raise BadDataset(f"{path}{place} is not ShareGPT JSON: {_sentence(error)}") from error
    except UnicodeDecodeError as error:
        raise BadDataset(f"{path} is not UTF-8: {error}") from error
    return [
        (conversation.conversations[0].value, conversation.conversations[1].value)
        for conversation in conversations
        if len(conversation.conversations) >= 2
    ]


def _line_of(data: bytes, error: str) -> str:
    """The line of msgspec's "(byte 12)"; empty if the error names no byte."""
    match = re.search(r"\(byte (\d+)\)", error)
    if match is None:
        return ""
    num_before = data.count(b"\n", 0, int(match[1]))
    return f", line {num_before + 1}"


def _json_lines(path: Path) -> Iterator[tuple[str, str]]:
    """Yields each line that is not blank, after its place in words."""
    with _open(path) as file:
        try:
            for number, line in enumerate(file, start=1):
                if line.strip():
                    yield f"{path}, line {number}", line
        except UnicodeDecodeError as error:
            raise BadDataset(f"{path} is not UTF-8: {error}") from error


def _decode(where: str, line: str, kind: type[Any]) -> Any:
    try:
        return msgspec.json.decode(line, type=kind)
    except msgspec.MsgspecError as error:
        raise BadDataset(f"{where}: {_sentence(error)}") from error


def _sentence(error: Exception) -> str:
    text = str(error)
    return text if text.startswith("JSON") else text[:1].lower() + text[1:]


def _open(path: Path) -> Any:
    try:
        return path.open(encoding="utf-8-sig", newline="")
    except OSError as error:
        raise BadDataset(
            f"--dataset-path {path} cannot be read: {error.strerror or error}"
        ) from error


def _read(path: Path) -> bytes:
    with _open(path) as file:
        return bytes(file.buffer.read())
