"""`penstock chat`: the command line, the keyboard, and the turns of the conversation."""

import argparse
import contextlib
import os
import sys
import time
from typing import Any

from penstock.loadtest.address import API_KEY_VARIABLE, DEFAULT_URL, base_url
from penstock.loadtest.chat.client import Answer, ChatClient, Refused, StillLoading
from penstock.loadtest.chat.conversation import COMMANDS, Conversation, Leave
from penstock.loadtest.chat.screen import Screen
from penstock.loadtest.exit_status import INTERRUPTED, exit_status
from penstock.loadtest.parser import add_flags
from penstock.scheduler.errors import InvalidConfig, PenstockError

_PROMPT, _CONTINUED = "> ", "… "
_RETRY_S = 0.5


def main(argv: list[str]) -> int:
    """Returns the exit status; errors are one line on stderr."""
    options = make_parser().parse_args(argv)
    return exit_status(lambda: _chat(options), "penstock chat")


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="penstock chat",
        description="Chat with a served model. Input from a pipe is one message, and its answer is "
        "all that is printed.",
    )
    add_flags(parser, _FLAGS)
    return parser


_FLAGS = {
    f"--url URL = {DEFAULT_URL}": "address of the server, Penstock or any that speaks OpenAI's API "
    "(default: %(default)s)",
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
    client = ChatClient(base_url(options.url), key)
    screen = Screen(sys.stdout, sys.stderr)
    message = options.quick
    if message is None and not sys.stdin.isatty():
        message = sys.stdin.read().strip()
    if message is not None and not message:
        raise InvalidConfig("there is no message; give one with --quick, or through the pipe")
    model = _model(client, screen, options.model)
    chat = _Chat(client, screen, Conversation(options.system), _body(options, model))
    if message is not None:
        return chat.answer_once(message)
    screen.note(f"{chat.model} at {client.url}; /help lists commands, Ctrl-D leaves")
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


class _Chat:
    """The turns: a line of the user, a command or a message, and what answers it."""

    def __init__(
        self,
        client: ChatClient,
        screen: Screen,
        conversation: Conversation,
        body: dict[str, Any],
    ) -> None:
        self._client = client
        self._screen = screen
        self._conversation = conversation
        self._body = body

    @property
    def model(self) -> str:
        return str(self._body["model"])

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
                self._turn(text)
            except Leave:
                return 0
            except PenstockError as error:
                print(f"error: {error}", file=sys.stderr)

    def answer_once(self, message: str) -> int:
        self._conversation.ask(message)
        answer = self._answer()
        self._screen.note(answer.summary())
        return INTERRUPTED if answer.is_stopped else 0

    def _turn(self, text: str) -> None:
        """Raises PenstockError, after which the conversation is as it was, or Leave."""
        if not text.strip():
            return
        if text.startswith("/"):
            self._screen.say(self._conversation.command(text))
            return
        self._conversation.ask(text)
        answer = Answer()
        try:
            answer = self._answer()
        finally:
            self._conversation.answer(answer.text)
        self._screen.note(answer.summary())

    def _answer(self) -> Answer:
        """Shows it as it comes; Ctrl-C ends it where it is."""
        answer = Answer()
        body = self._body | {"messages": self._conversation.messages}
        try:
            with contextlib.closing(self._client.answer(body)) as pieces:
                for piece in pieces:
                    answer.add(piece)
                    self._screen.show(piece)
        except KeyboardInterrupt:
            answer.is_stopped = True
        finally:
            self._screen.end_answer()
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
