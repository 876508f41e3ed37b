"""A flag as a row of a table, from which its argument, its `PENSTOCK_*` variable, its key in a
`--config` file and the field that it sets follow. The field says its type and its default."""

import argparse
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import MISSING, Field, dataclass, fields, replace
from enum import StrEnum
from types import NoneType
from typing import Any, TypeVar, get_args

from penstock.server.numbers import integer, number

_Config = TypeVar("_Config")


class Extend(argparse.Action):
    """As argparse's "extend", but the first values replace the default, as with other flags."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: Any,
        option_string: str | None = None,
    ) -> None:
        before = getattr(namespace, self.dest)
        given = [] if before is self.default else before
        setattr(namespace, self.dest, [*given, *values])


_NUMBERS = {int: integer, float: number}


@dataclass(frozen=True, slots=True)
class Flag:
    """One flag of a command.

    usage: the flag as it is typed: all of its names, and a word for its value, with "..." where it
    takes several. help: where it does not end with "(default: ...)", the default's value is added.
    field: the field of a config that it sets, if the flag's first long name is not its name.
    parse: makes a value of a text, and convert what the field holds of a value and the flag's name;
    without them the field's type does. default: of a flag that no field or a converted one has.
    action: argparse's, for flags that take several values.
    """

    usage: str
    help: str
    field: str = ""
    parse: Callable[[str], Any] | None = None
    convert: Callable[[Any, str], Any] | None = None
    choices: Sequence[str] = ()
    default: Any = None
    action: str | type[argparse.Action] = Extend

    @property
    def names(self) -> list[str]:
        return [word for word in self.usage.split() if word.startswith("-")]

    @property
    def dest(self) -> str:
        """The name of argparse for it."""
        return next(n for n in self.names if n.startswith("--"))[2:].replace("-", "_")

    @property
    def field_name(self) -> str:
        return self.field or self.dest

    def add_to(self, group: "argparse._ArgumentGroup", known: "Mapping[str, Field[Any]]") -> None:
        """known: the fields of all configs, by name."""
        field, default = known.get(self.field_name), self.default
        kind: Any = self.parse
        if field and not self.convert:
            kind, default = kind or _type(field), _default(field) if default is None else default
        words = self.usage.split()[len(self.names) :]
        options: dict[str, Any] = {"default": default}
        if kind is bool:
            options["default"] = is_on = bool(default)
            options["action"] = argparse.BooleanOptionalAction if is_on else "store_true"
            shown = "on" if is_on else "off"
        else:
            shown = "%(default)s"
            choices = [str(each) for each in self.choices or (kind if _is_choice(kind) else ())]
            metavar = "|".join(choices) if _is_choice(kind) and default is not None else None
            options |= {"choices": choices or None, "metavar": words[0] if words else metavar}
            options["type"] = None if choices or kind is str else _NUMBERS.get(kind, kind)
            if words[1:]:
                options |= {"nargs": "+", "action": self.action}
        help_text = self.help if "(default: " in self.help else f"{self.help} (default: {shown})"
        group.add_argument(*self.names, help=help_text, **options)

    def value(self, options: argparse.Namespace, field: "Field[Any]") -> Any:
        """Returns what the field holds when the command line has said `options`."""
        value, kind = getattr(options, self.dest), _type(field)
        if value is None:
            return None
        if self.convert:
            return self.convert(value, self.names[-1])
        if isinstance(value, list):
            return tuple(value)
        return kind(value) if _is_choice(kind) else value


def flag_table(
    helps: Mapping[str, str], settings: Mapping[str, Mapping[str, Any]]
) -> tuple[Flag, ...]:
    """helps: by usage. settings: further fields of some of them, by the name of argparse."""
    flags = (Flag(usage, text) for usage, text in helps.items())
    return tuple(replace(flag, **settings.get(flag.dest, {})) for flag in flags)


def add_flags(
    group: "argparse._ArgumentGroup", flags: Iterable[Flag], configs: Iterable[type]
) -> None:
    """configs: the dataclasses whose fields the flags set."""
    known = {field.name: field for config in configs for field in fields(config)}
    for flag in flags:
        flag.add_to(group, known)


def config_of(
    config: type[_Config], flags: Iterable[Flag], options: argparse.Namespace, **others: Any
) -> _Config:
    """Makes a config of the flags that set its fields; `others` are set by more than one flag.
    Raises InvalidConfig."""
    known = {field.name: field for field in fields(config) if field.name not in others}  # type: ignore[arg-type]
    by_field = {flag.field_name: flag for flag in flags}
    return config(
        **others,
        **{name: by_field[name].value(options, known[name]) for name in known if name in by_field},
    )


def _type(field: "Field[Any]") -> Any:
    """Returns the type of a value, where the field may have None, or several."""
    kinds = [kind for kind in get_args(field.type) if kind not in (NoneType, ...)]
    return kinds[0] if kinds else field.type


def _default(field: "Field[Any]") -> Any:
    return None if field.default is MISSING else field.default


def _is_choice(kind: Any) -> bool:
    return isinstance(kind, type) and issubclass(kind, StrEnum)
