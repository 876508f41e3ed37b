"""A parser whose flags also have `PENSTOCK_*` variables and keys in a `--config` file.

It says in one line what is wrong, and knows no flag by name.
"""

import argparse
import contextlib
import difflib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NoReturn

import yaml

from penstock.scheduler.errors import InvalidConfig
from penstock.server.flags.vllm_flags import REFUSED, says_nothing
from penstock.server.numbers import integer, number

ENVIRONMENT_PREFIX = "PENSTOCK_"
# A key in a variable is one key, with whatever characters; other lists are words.
_API_KEY = "api_key"
_EXIT_USAGE = 2  # as argparse exits
_TYPES = {integer: "a whole number", number: "a number"}


class FlagParser(argparse.ArgumentParser):
    """Reports what is wrong in one line, with the flag that was probably meant."""

    def error(self, message: str) -> NoReturn:
        self.exit(_EXIT_USAGE, f"penstock: error: {message}; see {self.prog} --help\n")

    def parse_args(  # type: ignore[override]
        self, args: list[str] | None = None, namespace: argparse.Namespace | None = None
    ) -> argparse.Namespace:
        options, unknown = self.parse_known_args(args, namespace)
        if unknown:
            parser = self._commands().get(getattr(options, "command", ""), self)
            parser.error(parser._explained(unknown[0].partition("=")[0]))
        return options

    def _commands(self) -> "dict[str, FlagParser]":
        found = (each for each in self._actions if isinstance(each, argparse._SubParsersAction))
        return {name: parser for action in found for name, parser in action.choices.items()}

    def _explained(self, unknown: str) -> str:
        if unknown in REFUSED:
            return f"{unknown} is a flag of vLLM; {REFUSED[unknown]}"
        if not unknown.startswith("-"):
            return f"unexpected argument {unknown!r}"
        near = difflib.get_close_matches(unknown, self._option_string_actions, n=1)
        return f"unknown flag {unknown}" + (f"; did you mean {near[0]}?" if near else "")


def set_defaults(
    parser: argparse.ArgumentParser, environment: Mapping[str, str], config: Path | None
) -> None:
    """Defaults of flags: a `PENSTOCK_*` variable, else the config file, else the parser's own.
    config: YAML or JSON, flag -> value, as `max-model-len: 4096`. Raises InvalidConfig."""
    actions = _by_name(parser)
    for name, value in (_read_config(config, actions) if config else {}).items():
        where = f"{config}: {name.replace('_', '-')}"
        parser.set_defaults(**{actions[name].dest: _converted(actions[name], value, where)})
    for name, action in actions.items():
        variable = ENVIRONMENT_PREFIX + name.upper()
        if text := environment.get(variable):  # an empty one is how a compose file leaves it out
            values = text.split() if action.nargs and name != _API_KEY else text
            parser.set_defaults(**{action.dest: _converted(action, values, variable)})


def _by_name(parser: argparse.ArgumentParser) -> dict[str, argparse.Action]:
    """Each flag by all of its names, as `max_model_len`, but not by the name that negates it."""
    return {
        flag.removeprefix("--").replace("-", "_"): action
        for action in parser._actions
        for flag in action.option_strings
        if flag.startswith("--") and not isinstance(action, argparse._HelpAction)
        if not (isinstance(action, argparse.BooleanOptionalAction) and flag.startswith("--no-"))
    }


def _read_config(path: Path, actions: Mapping[str, argparse.Action]) -> dict[str, Any]:
    """By name, as `max_model_len`; without those that are null, which says nothing."""
    values = _parse(path)
    if not isinstance(values, dict):
        raise InvalidConfig(f"--config {path} must hold flags and values, as 'port: 8000'")
    by_name = {str(name).removeprefix("--").replace("-", "_"): v for name, v in values.items()}
    for name in by_name:
        if says_nothing(name, by_name[name]):
            by_name[name] = None
        elif name not in actions or name == "config":
            flags = [each.replace("_", "-") for each in actions]
            near = difflib.get_close_matches(name.replace("_", "-"), flags, n=1)
            hint = f"; did you mean {near[0]}?" if near else ""
            raise InvalidConfig(f"--config {path} has an unknown flag, {name!r}{hint}")
    return {name: value for name, value in by_name.items() if value is not None}


def _parse(path: Path) -> Any:
    try:
        text = path.read_text(encoding="utf-8")
        with contextlib.suppress(ValueError):  # PyYAML refuses JSON that is indented with tabs
            return json.loads(text)
        return yaml.safe_load(text)
    except yaml.MarkedYAMLError as error:
        line = f", line {error.problem_mark.line + 1}" if error.problem_mark else ""
        raise InvalidConfig(
            f"--config {path}{line} is not valid YAML: {error.problem or error.context}"
        ) from error
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        reason = str(error).partition("\n")[0]
        raise InvalidConfig(f"--config {path} cannot be read: {reason}") from error


def _converted(action: argparse.Action, value: Any, name: str) -> Any:
    """As the command line converts it. name: where the value comes from, for the error."""
    if action.nargs == 0 or isinstance(action, argparse.BooleanOptionalAction):
        return _as_bool(value, name)
    if action.nargs is None and isinstance(value, list | dict):
        value = json.dumps(value)  # a flag that takes JSON
    values = value if isinstance(value, list) else [value]
    convert: Any = action.type or str
    try:
        converted = [convert(str(each)) for each in values]
    except (argparse.ArgumentTypeError, InvalidConfig) as error:
        raise InvalidConfig(f"{name} cannot be {value!r}: {error}") from error
    except ValueError as error:
        must = _TYPES.get(convert, convert.__name__)
        raise InvalidConfig(
            f"{name} cannot be {value!r}; it must be {must}{_hint(value)}"
        ) from error
    for each in converted:
        if action.choices is not None and each not in action.choices:
            named = ", ".join(map(str, action.choices))
            raise InvalidConfig(f"{name} cannot be {value!r}; choose from {named}")
    return converted if action.nargs else converted[0]


def _hint(value: Any) -> str:
    if not str(value).startswith("tcp://"):
        return ""
    return (
        ". Kubernetes sets this variable in each pod beside a Service named penstock, unless the "
        "pod has enableServiceLinks: false"
    )


def _as_bool(value: Any, name: str) -> bool:
    text = str(value).lower()
    if text in ("1", "true", "yes"):
        return True
    if text in ("0", "false", "no"):
        return False
    raise InvalidConfig(f"{name} must be true or false, not {value!r}")
