"""The parts that the commands share: a parser of flags, exit statuses, the address of a server."""

import argparse
import difflib
import os
import sys
import unicodedata
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NoReturn
from urllib.parse import urlsplit

from penstock.scheduler.errors import InvalidConfig, PenstockError

DEFAULT_URL = "http://127.0.0.1:8000"
API_KEY_VARIABLE = "PENSTOCK_API_KEY"
_KEPT_CONTROLS = "\n\t"


def root_url(given: str) -> str:
    """A typed address as the server's root URL: with a scheme, without /metrics or /v1. Raises
    InvalidConfig."""
    url = given if "://" in given else f"http://{given}"
    try:
        parts = urlsplit(url)
        is_address = parts.scheme in ("http", "https") and parts.hostname and parts.port != 0
    except ValueError:
        is_address = False
    if not is_address:
        raise InvalidConfig(
            f"{given} is not a server's address; write it like http://127.0.0.1:8000"
        )
    url = url.split("?")[0].split("#")[0].rstrip("/")
    for ending in ("/metrics", "/v1"):
        url = url.removesuffix(ending)
    return url


FAILED, USAGE_ERROR = 1, 2
INTERRUPTED = 130  # of a program that Ctrl-C ended, in a shell


def exit_status(run: Callable[[], int], begin: str, *, interrupted: int = INTERRUPTED) -> int:
    """Returns the status that `run` returns, or that of its error, which is a line that begins so.
    interrupted: the status of Ctrl-C."""
    try:
        return run()
    except KeyboardInterrupt:
        return interrupted
    except BrokenPipeError:
        discard_output()
        return 0
    except PenstockError as error:
        print(f"{begin}: {printable(str(error))}", file=sys.stderr)
        return USAGE_ERROR if isinstance(error, InvalidConfig) else FAILED


def require(is_valid: bool, flag: str, value: float, bounds: str) -> None:
    """Raises InvalidConfig unless the flag's value is valid. bounds: what it must be, in words."""
    if not is_valid:
        shown = f"{value:g}" if isinstance(value, float) else value
        raise InvalidConfig(f"{flag} is {shown}; it must be {bounds}")


def printer(command: str) -> Callable[[str], None]:
    """Returns what prints a line on stderr, after the command: stdout has the result alone."""
    return lambda text: print(f"{command}: {printable(text)}", file=sys.stderr, flush=True)


def printable(text: str) -> str:
    """Without control characters: a server or a model could command the terminal with them."""
    return "".join(c for c in text if c in _KEPT_CONTROLS or unicodedata.category(c) != "Cc")


def discard_output() -> None:
    """For a reader of stdout that has closed it, as `| head -3` does: Python flushes at its end."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


class HelpFormatter(argparse.RawDescriptionHelpFormatter, argparse.ArgumentDefaultsHelpFormatter):
    """Shows the default of each flag that has one; examples keep their lines."""

    def __init__(self, prog: str) -> None:
        super().__init__(prog, max_help_position=30)

    def _get_help_string(self, action: argparse.Action) -> str | None:
        if action.default in (None, False) or action.help is argparse.SUPPRESS:
            return action.help
        return super()._get_help_string(action)


class BenchParser(argparse.ArgumentParser):
    """Raises InvalidConfig for a wrong command line, with the flag that was probably meant. --help
    shows the flags in `common` alone, if there are any, and --help-all shows every flag."""

    def __init__(self, common: frozenset[str] = frozenset(), **settings: Any) -> None:
        super().__init__(formatter_class=HelpFormatter, **settings)
        self._common = common
        if common:
            self.add_argument("--help-all", action="help", help="describe every flag")

    def _hide_uncommon(self) -> None:
        for action in self._actions:
            if not {*action.option_strings} & {*self._common, "--help", "--help-all"}:
                action.help = argparse.SUPPRESS
        self.epilog = f"{self.prog} --help-all describes every flag."

    def error(self, message: str) -> NoReturn:
        raise InvalidConfig(f"{message.removeprefix('argument ')}; see {self.prog} --help")

    def parse_args(self, args: list[str]) -> argparse.Namespace:  # type: ignore[override]
        args = with_dashes(args)
        if self._common and "--help-all" not in args:
            self._hide_uncommon()
        options, unknown = self.parse_known_args(args)
        if unknown:
            self.error(self._explained(unknown[0].partition("=")[0]))
        return options

    def _explained(self, unknown: str) -> str:
        if not unknown.startswith("-"):
            return f"unexpected argument {unknown!r}"
        near = difflib.get_close_matches(unknown, self._option_string_actions, n=1, cutoff=0.75)
        return f"unknown flag {unknown}" + (f"; did you mean {near[0]}?" if near else "")


def with_dashes(args: list[str]) -> list[str]:
    """--num_prompts is --num-prompts, as in vLLM."""

    def dashed(argument: str) -> str:
        flag, equals, value = argument.partition("=")
        return flag.replace("_", "-") + equals + value if flag.startswith("--") else argument

    return [dashed(argument) for argument in args]


# The type of a flag's value, by the word that stands for it in the help; other words are texts.
_TYPES: dict[str, type[int] | type[float] | type[Path]] = {
    **dict.fromkeys(("N", "TOKENS", "BYTES"), int),
    **dict.fromkeys(("R", "S", "B", "T", "X", "P", "MS", "GB", "PRICE", "SHARE"), float),
    **dict.fromkeys(("FILE", "PATH", "DIR", "MODEL_DIR"), Path),
}


def add_flags(
    group: argparse._ActionsContainer,
    flags: Mapping[str, str],
    **settings: Mapping[str, Any],
) -> None:
    """Adds flags that are written as a table, from each flag to its help.

    A flag is written as people read it: `--seed N`, `--num-prompts N = 1000` with its default,
    `-q, --quick MESSAGE` with two names, `--header NAME=VALUE ...` with several values,
    `--[no-]spread` with an opposite, `--json` as a switch, and `url` for a positional argument.
    settings: further arguments of `add_argument`, by the flag's name with underscores.
    """
    for written, text in flags.items():
        head, _, default = written.partition(" = ")
        *names, last = head.split(", ")
        name, *value = last.split()
        names.append(name.replace("[no-]", ""))
        long = next((each for each in names if each.startswith("--")), names[0])
        more: dict[str, Any] = {
            "help": text,
            **settings.get(long.lstrip("-").replace("-", "_"), {}),
        }
        if value:
            more = {"metavar": value[0], "type": _TYPES.get(value[0]), **more}
        elif "[no-]" in name:
            more["action"] = argparse.BooleanOptionalAction
        elif name.startswith("-") and "choices" not in more:
            more["action"] = "store_true"
        if len(value) > 1:
            more["nargs"] = "+"
        if default:
            more["default"] = (more.get("type") or str)(default)
        group.add_argument(*names, **more)
