"""`penstock chat`: its flags, the keyboard, the screen, and the turns of the conversation."""

import argparse
import contextlib
import os
import sys
import time
from dataclasses import dataclass
from typing import Any, TextIO

from penstock.loadtest.chat.client import Answer, ChatClient, Piece, Refused, StillLoading
from penstock.loadtest.chat.conversation import COMMANDS, Conversation, Leave
from penstock.loadtest.command_line import (
    API_KEY_VARIABLE,
    DEFAULT_URL,
    INTERRUPTED,
    add_flags,
    exit_status,
    printable,
    root_url,
)
from penstock.scheduler.errors import InvalidConfig, PenstockError

_DIM, _PLAIN = "\x1b[2m", "\x1b[0m"
_CLEAR_LINE = "\r\x1b[K"


class Screen:
    """Answers go to `out`, what is said of them to `notes`. What is no terminal gets the answers
    alone: no reasoning, no notes."""

    def __init__(self, out: TextIO, notes: TextIO) -> None:
        self._out = out
        self._notes = notes
        self.is_terminal = out.isatty()
        self._has_notes = notes.isatty()
        self._has_colours = os.environ.get("TERM") != "dumb" and "NO_COLOR" not in os.environ
        self._is_in_reasoning = False
        self._is_in_line = False
        self._has_told_to_wait = False

    def show(self, piece: Piece) -> None:
        if piece.reasoning and self.is_terminal:
            self._is_in_reasoning = True
            self._write(self._dim(printable(piece.reasoning)))
        if piece.text:
            if self._is_in_reasoning:
                self._is_in_reasoning = False
                self._write("\n\n")
            self._write(printable(piece.text))
            self._is_in_line = not piece.text.endswith("\n")

    def end_answer(self) -> None:
        if self._is_in_line or self._is_in_reasoning:
            self._write("\n")
        self._is_in_line = self._is_in_reasoning = False

    def say(self, text: str) -> None:
        """Shows the answer of a command."""
        self._write(self._dim(printable(text)) + "\n")

    def note(self, text: str) -> None:
        if self._has_notes:
            print(self._dim(printable(text)), file=self._notes, flush=True)

    def wait_note(self, text: str) -> None:
        """A note in place of the one before; empty for none. Where it cannot be replaced, the first
        is the only one."""
        if self._has_notes:
            line = self._dim(printable(text)) if text else ""
            print(_CLEAR_LINE + line, end="", file=self._notes, flush=True)
        elif text and not self._has_told_to_wait:
            print(printable(text), file=self._notes, flush=True)
            self._has_told_to_wait = True

    def _write(self, text: str) -> None:
        self._out.write(text)
        self._out.flush()

    def _dim(self, text: str) -> str:
        return f"{_DIM}{text}{_PLAIN}" if self._has_colours else text


_PROMPT, _CONTINUED = "> ", "… "
_RETRY_S = 0.5


def main(argv: list[str]) -> int:
    """Returns the exit status; errors are one line on stderr."""
    options = make_parser().parse_args(argv)
    return exit_status(lambda: _chat(options), "penstock chat: error")


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="penstock chat",
        description="Chat with a served model. Input from a pipe is one message, and its answer is "
        "all that is printed.",
    )
    add_flags(parser, _FLAGS)
    return parser


_FLAGS = {
    f"--base-url, --url URL = {DEFAULT_URL}": "address of the server, Penstock or any "
    "that speaks OpenAI's API (default: %(default)s)",
    "--model, --model-name NAME": "model to ask (default: the first that the server lists)",
    "--api-key KEY": f"if the server requires one (default: ${API_KEY_VARIABLE}, else "
    "$OPENAI_API_KEY)",
    "--system, --system-prompt TEXT": "system prompt (default: none)",
    "-q, --quick MESSAGE": "send this message, print the answer, and exit (default: ask for "
    "messages)",
    "--max-tokens N": "most tokens of an answer (default: the server's)",
    "--temperature T": "0 is greedy (default: the model's)",
    "--top-p P": "nucleus sampling (default: the model's)",
    "--seed N": "the same answers again (default: random)",
}


def _chat(options: argparse.Namespace) -> int:
    key = options.api_key or os.environ.get(API_KEY_VARIABLE) or os.environ.get("OPENAI_API_KEY")
    client = ChatClient(root_url(options.base_url), key)
    screen = Screen(sys.stdout, sys.stderr)
    message = options.quick
    if message is None and not sys.stdin.isatty():
        message = sys.stdin.read().strip()
    if message is not None and not message:
        raise InvalidConfig("there is no message; give one with --quick, or through the pipe")
    model = _model(client, screen, options.model)
    chat = _Chat(client, screen, Conversation(options.system), _body(options, model))
    if message is not None:
        return INTERRUPTED if chat.ask(message).is_stopped else 0
    screen.note(f"{model} at {client.url}; /help lists commands, Ctrl-D leaves")
    return chat.run()


def _body(options: argparse.Namespace, model: str) -> dict[str, Any]:
    """The fields of every request, besides the messages."""
    names = ("max_tokens", "temperature", "top_p", "seed")
    given = {name: getattr(options, name) for name in names}
    return {"model": model} | {name: value for name, value in given.items() if value is not None}


def _model(client: ChatClient, screen: Screen, wanted: str | None) -> str:
    """Waits for a server that loads. Raises PenstockError where there is none."""
    try:
        while True:
            try:
                first = client.first_model()
                return wanted or first
            except Refused:  # another server may list no models
                if wanted is None:
                    raise
                return wanted
            except StillLoading as error:
                screen.wait_note(f"waiting: {error}")
                time.sleep(_RETRY_S)
    finally:
        screen.wait_note("")


@dataclass(frozen=True, slots=True)
class _Chat:
    """The turns: a line of the user, a command or a message, and what answers it."""

    _client: ChatClient
    _screen: Screen
    _conversation: Conversation
    _body: dict[str, Any]

    def run(self) -> int:
        """Until the user leaves."""
        readline = _readline()
        while True:
            try:
                text = _read_message()
            except EOFError:
                print()
                return 0
            except KeyboardInterrupt:
                print()
                if readline and readline.get_line_buffer():
                    continue  # it has discarded the line
                return 0
            try:
                if text.startswith("/"):
                    self._screen.say(self._conversation.command(text))
                elif text.strip():
                    self.ask(text)
            except Leave:
                return 0
            except PenstockError as error:
                print(f"error: {printable(str(error))}", file=sys.stderr)

    def ask(self, text: str) -> Answer:
        """Shows the answer as it comes; Ctrl-C ends it where it is. Raises PenstockError, after
        which the conversation is as it was."""
        self._conversation.ask(text)
        answer = Answer()
        body = self._body | {"messages": self._conversation.messages}
        try:
            with contextlib.closing(self._client.answer(body)) as pieces:
                for piece in pieces:
                    answer.add(piece)
                    self._screen.show(piece)
        except KeyboardInterrupt:
            answer.is_stopped = True
        except PenstockError:
            answer.text = ""  # without its end it is not kept
            raise
        finally:
            self._screen.end_answer()
            self._conversation.answer(answer.text)
        self._screen.note(answer.summary())
        return answer


def _read_message() -> str:
    """One line, and those that continue it."""
    lines = [input(_PROMPT)]
    while lines[-1].endswith("\\") and not lines[-1].startswith("/"):
        lines[-1] = lines[-1][:-1]
        lines.append(input(_CONTINUED))
    return "\n".join(lines)


def _readline() -> Any:
    """The module that edits lines, with Tab for commands; None where Python is built without it."""
    try:
        import readline
    except ImportError:
        return None

    def complete(text: str, state: int) -> str | None:
        found = [f"{name} " for name in COMMANDS if text and name.startswith(text)]
        return found[state] if state < len(found) else None

    readline.set_completer(complete)
    readline.set_completer_delims(" ")
    readline.parse_and_bind("tab: complete")
    return readline
