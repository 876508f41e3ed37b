"""`Conversation`: what was said, and the commands that change it. It knows neither server nor
terminal."""

import json
from pathlib import Path

from penstock.loadtest.chat.client import Message
from penstock.scheduler.errors import PenstockError

HELP = """\
/clear         begin a new conversation
/system        show the system prompt
/system TEXT   set it, for what follows; /system - removes it
/save FILE     write the conversation to a new file, as the JSON of a request's `messages`
/quit          leave, as Ctrl-D does
A line that ends with \\ is continued on the next one. Ctrl-C stops an answer."""


class BadCommand(PenstockError):
    """A command that does not exist, or cannot be carried out."""


class Leave(Exception):  # not an error
    """The user wants to leave."""


class Conversation:
    """Messages in turn, below a system prompt or none."""

    def __init__(self, system: str | None) -> None:
        self.system = system
        self._turns: list[Message] = []

    @property
    def messages(self) -> list[Message]:
        system = [{"role": "system", "content": self.system}] if self.system else []
        return system + self._turns

    def ask(self, text: str) -> None:
        self._turns.append({"role": "user", "content": text})

    def answer(self, text: str) -> None:
        """Ends the turn. An answer without text is as if it had not been asked for."""
        if text:
            self._turns.append({"role": "assistant", "content": text})
        else:
            self._turns.pop()

    def command(self, line: str) -> str:
        """Carries out a line that begins with /; returns what to say. Raises BadCommand, Leave."""
        name, _, rest = line.partition(" ")
        match name:
            case "/help":
                return HELP
            case "/clear":
                self._turns.clear()
                return "a new conversation begins"
            case "/system":
                return self._set_system(rest.strip())
            case "/save":
                return self._save(rest.strip())
            case "/quit" | "/exit" | "/bye":
                raise Leave
        raise BadCommand(f"there is no command {name}; /help lists them")

    def _set_system(self, text: str) -> str:
        if text:
            self.system = None if text == "-" else text
        return f"system prompt: {self.system}" if self.system else "there is no system prompt"

    def _save(self, name: str) -> str:
        if not name:
            raise BadCommand("name a file, as /save chat.json")
        path = Path(name).expanduser()
        text = json.dumps(self.messages, ensure_ascii=False, indent=2)
        try:
            with path.open("x", encoding="utf-8") as file:
                file.write(text + "\n")
        except FileExistsError:
            raise BadCommand(f"{path} exists already; name another file") from None
        except OSError as error:
            raise BadCommand(f"{path} cannot be written: {error.strerror}") from error
        return f"saved {len(self.messages)} messages to {path}"


COMMANDS = ("/help", "/clear", "/system", "/save", "/quit")
