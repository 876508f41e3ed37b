"""Workloads from files: conversations with their texts, and traces of lengths and times.

A reader gives the rows that can be asked, in the file's order, and reads no further than it must:
traces have millions. What it cannot read is a `BadDataset` that names the file and the line.
"""

import csv
import math
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

import msgspec

from penstock.scheduler.errors import InvalidConfig

# What each hash id of a Mooncake trace stands for, by the trace's own description.
MOONCAKE_BLOCK_TOKENS = 512
# A longer prompt than any model takes is a mistake, and making it up could take all memory.
MAX_TOKENS = 10_000_000


class BadDataset(InvalidConfig):
    """The file is not what --dataset-name says; the message names the line where it can."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceRow:
    """What a trace tells of one request. at_s counts from an origin of the trace's own.

    hash_ids: equal ids stand for equal blocks of MOONCAKE_BLOCK_TOKENS tokens.
    """

    at_s: float
    num_prompt_tokens: int
    num_output_tokens: int
    hash_ids: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        for number in (self.num_prompt_tokens, self.num_output_tokens):
            if number > MAX_TOKENS:
                raise ValueError(f"{number} tokens are more than any model takes")
        if not math.isfinite(self.at_s):
            raise ValueError(f"the time is {self.at_s}")


@dataclass(frozen=True, slots=True, kw_only=True)
class TextRow:
    """What is asked in words. max_tokens: None where the file does not say."""

    prompt: str | list[int] = ""
    messages: list[dict[str, Any]] | None = None
    max_tokens: int | None = None


def read_azure(path: Path) -> Iterator[TraceRow]:
    """Azure's LLM inference traces of 2023 and 2024: TIMESTAMP, ContextTokens, GeneratedTokens."""
    return _read_csv(path, _azure_row, ("TIMESTAMP", "ContextTokens", "GeneratedTokens"))


def _azure_row(row: dict[str, str]) -> TraceRow:
    return TraceRow(
        at_s=_timestamp(row["timestamp"]),
        num_prompt_tokens=int(row["contexttokens"]),
        num_output_tokens=int(row["generatedtokens"]),
    )


def _timestamp(text: str) -> float:
    """Seconds from a date and time, which 2023's files give without a zone and 2024's with."""
    time = datetime.fromisoformat(text)
    # Two of one file are compared and no more: one zone for all those without keeps days even.
    return (time if time.tzinfo else datetime.fromisoformat(f"{text}+00:00")).timestamp()


def read_burstgpt(path: Path) -> Iterator[TraceRow]:
    """BurstGPT; a row without response tokens is a failure of its server and is left out."""
    return _read_csv(path, _burstgpt_row, ("Timestamp", "Request tokens", "Response tokens"))


def _burstgpt_row(row: dict[str, str]) -> TraceRow:
    return TraceRow(
        at_s=float(row["timestamp"]),
        num_prompt_tokens=int(row["request tokens"]),
        num_output_tokens=int(row["response tokens"]),
    )


def _read_csv(
    path: Path, parse: Callable[[dict[str, str]], TraceRow], columns: tuple[str, ...]
) -> Iterator[TraceRow]:
    """Columns go by their names, whatever their case and order; rows of no tokens are left out."""
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
                parsed = parse(dict(zip(header, row, strict=True)))
            except (ValueError, csv.Error) as error:
                raise BadDataset(f"{path}, line {lines.line_num}: {error}") from error
            if parsed.num_prompt_tokens > 0 and parsed.num_output_tokens > 0:
                yield parsed


class _MooncakeLine(msgspec.Struct):
    timestamp: float  # milliseconds
    input_length: int
    output_length: int
    hash_ids: list[int] = []


def read_mooncake(path: Path) -> Iterator[TraceRow]:
    """Mooncake's traces: one JSON object a line."""
    for number, line in _json_lines(path):
        row = _decode(path, number, line, _MooncakeLine)
        if row.input_length > 0 and row.output_length > 0:
            try:
                yield _mooncake_row(row)
            except ValueError as error:
                raise BadDataset(f"{path}, line {number}: {error}") from error


def _mooncake_row(line: _MooncakeLine) -> TraceRow:
    num_blocks = -(-line.input_length // MOONCAKE_BLOCK_TOKENS)
    return TraceRow(
        at_s=line.timestamp / 1000,
        num_prompt_tokens=line.input_length,
        num_output_tokens=line.output_length,
        hash_ids=tuple(line.hash_ids[:num_blocks]),
    )


class _CustomLine(msgspec.Struct, forbid_unknown_fields=True):
    prompt: str | list[int] | None = None
    messages: list[dict[str, Any]] | None = None
    max_tokens: int | None = None


def read_custom(path: Path, *, is_chat: bool) -> Iterator[TextRow]:
    """`{"prompt": ...}` or `{"messages": [...]}` a line, with `max_tokens` where one is wanted.

    is_chat: of the endpoint, which takes messages or texts; the other one texts or token ids.
    """
    for number, line in _json_lines(path):
        row = _decode(path, number, line, _CustomLine)
        if (row.prompt is None) == (row.messages is None):
            raise BadDataset(f'{path}, line {number}: give "prompt" or "messages", one of the two')
        if not (row.prompt or row.messages):
            raise BadDataset(f"{path}, line {number}: the prompt is empty")
        if row.messages and not is_chat:
            raise BadDataset(f"{path}, line {number}: messages need --backend openai-chat")
        if is_chat and isinstance(row.prompt, list):
            raise BadDataset(f"{path}, line {number}: token ids need --backend openai")
        if row.max_tokens is not None and row.max_tokens < 1:
            raise BadDataset(
                f"{path}, line {number}: max_tokens is {row.max_tokens}; it must be at least 1"
            )
        yield TextRow(
            prompt=row.prompt or "", messages=row.messages or None, max_tokens=row.max_tokens
        )


class _Turn(msgspec.Struct):
    value: str


class _Conversation(msgspec.Struct):
    conversations: list[_Turn] = []


def read_sharegpt(path: Path) -> list[tuple[str, str]]:
    """The first two turns of each conversation that has them: what is asked, and its answer."""
    data = _read(path)
    try:
        conversations = msgspec.json.decode(data, type=list[_Conversation])
    except msgspec.MsgspecError as error:
        place = _line_of(data, str(error))
        raise BadDataset(f"{path}{place} is no ShareGPT JSON: {_sentence(error)}") from error
    except UnicodeDecodeError as error:
        raise BadDataset(f"{path} is no UTF-8 text: {error}") from error
    return [
        (conversation.conversations[0].value, conversation.conversations[1].value)
        for conversation in conversations
        if len(conversation.conversations) >= 2
    ]


def _line_of(data: bytes, error: str) -> str:
    """Where msgspec's "(byte 12)" is, as a line; nothing where it names no byte."""
    match = re.search(r"\(byte (\d+)\)", error)
    if match is None:
        return ""
    num_before = data.count(b"\n", 0, int(match[1]))
    return f", line {num_before + 1}"


def _json_lines(path: Path) -> Iterator[tuple[int, str]]:
    with _open(path) as file:
        for number, line in enumerate(_lines(path, file), start=1):
            if line.strip():
                yield number, line


def _lines(path: Path, file: Any) -> Iterator[str]:
    try:
        yield from file
    except UnicodeDecodeError as error:
        raise BadDataset(f"{path} is no UTF-8 text: {error}") from error


def _decode(path: Path, number: int, line: str, kind: type[Any]) -> Any:
    try:
        return msgspec.json.decode(line, type=kind)
    except msgspec.MsgspecError as error:
        raise BadDataset(f"{path}, line {number}: {_sentence(error)}") from error


def _sentence(error: Exception) -> str:
    text = str(error)
    return text[:1].lower() + text[1:]


def _open(path: Path) -> Any:
    try:
        return path.open(encoding="utf-8-sig", newline="")
    except OSError as error:
        raise BadDataset(
            f"--dataset-path {path} cannot be read: {error.strerror or error}"
        ) from error


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise BadDataset(
            f"--dataset-path {path} cannot be read: {error.strerror or error}"
        ) from error
