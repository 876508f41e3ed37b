"""`penstock completion SHELL`: a script that completes the commands, flags and choices in a shell.

The scripts are made of the parsers themselves, by shtab, and run nothing of Penstock on a Tab.
"""

import argparse
from pathlib import Path

import shtab

from penstock.server.command_line.cli import COMMANDS, parsers
from penstock.server.flags.flag_parser import FlagParser

SHELLS = ("bash", "zsh", "fish")
_DESCRIPTION = """\
Print a script that completes commands, flags and their choices in a shell.

  bash   eval "$(penstock completion bash)"           in ~/.bashrc
  zsh    eval "$(penstock completion zsh)"            in ~/.zshrc, after compinit
  fish   penstock completion fish | source            in ~/.config/fish/config.fish
"""
_DIRECTORIES = ("model_dir", "result_dir", "plot_dir", "model_flag")


def main(argv: list[str]) -> int:
    shell = make_parser().parse_args(argv).shell
    print(shtab.complete(whole(parsers()[0]), shell))
    return 0


def make_parser() -> FlagParser:
    parser = FlagParser(
        prog="penstock completion",
        description=_DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("shell", choices=SHELLS, help="the shell that you use")
    return parser


def whole(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """The same parser, with the flags of the commands that parse their own."""
    # Private, but argparse has no other way to walk through a parser.
    commands = next(a for a in parser._actions if isinstance(a, argparse._SubParsersAction))
    for name, command in COMMANDS.items():
        commands.choices[name] = command.module.make_parser()
    for each in commands.choices.values():
        for action in each._actions:
            _complete_paths(action)
    # Or a hub id, which nothing here can list.
    for name in ("serve", "health"):
        _positional(commands.choices[name], "model").complete = shtab.DIRECTORY  # type: ignore[attr-defined]
    # zsh completes no flag at the first Tab where it could be a word that nothing completes.
    _positional(commands.choices["top"], "url").complete = {"zsh": "_urls"}  # type: ignore[attr-defined]
    return parser


def _positional(parser: argparse.ArgumentParser, dest: str) -> argparse.Action:
    return next(a for a in parser._actions if a.dest == dest and not a.option_strings)


def _complete_paths(action: argparse.Action) -> None:
    if action.dest in _DIRECTORIES:
        action.complete = shtab.DIRECTORY  # type: ignore[attr-defined]
    elif action.type is Path:
        action.complete = shtab.FILE  # type: ignore[attr-defined]
