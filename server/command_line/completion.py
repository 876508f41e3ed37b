"""`penstock completion SHELL`: a script that completes the commands, flags and choices in a shell.

The scripts are made of the parsers themselves, by shtab, and run nothing of Penstock on a Tab.
"""

import argparse
from pathlib import Path

import shtab

from penstock.loadtest.bench.flags import make_parser as make_bench_parser
from penstock.loadtest.calibrate.cli import make_parser as make_calibrate_parser
from penstock.loadtest.chat.cli import make_parser as make_chat_parser
from penstock.loadtest.plan.cli import make_parser as make_plan_parser
from penstock.loadtest.simulate.cli import make_parser as make_simulate_parser
from penstock.loadtest.top.cli import make_parser as make_top_parser
from penstock.server.command_line.health_check import make_parser as make_health_parser
from penstock.server.command_line.model_list import make_parser as make_models_parser
from penstock.server.flags.flag_parser import FlagParser
from penstock.server.ray.flags import make_parser as make_ray_parser

SHELLS = ("bash", "zsh", "fish")
_DESCRIPTION = """\
Print a script that completes commands, flags and their choices in a shell.

  bash   eval "$(penstock completion bash)"           in ~/.bashrc
  zsh    eval "$(penstock completion zsh)"            in ~/.zshrc, after compinit
  fish   penstock completion fish | source            in ~/.config/fish/config.fish
"""
_DIRECTORIES = ("model_dir", "result_dir", "plot_dir", "model_flag")


def main(argv: list[str], parser: argparse.ArgumentParser) -> int:
    """parser: of the whole command line, in which the other commands may be names alone."""
    shell = make_parser().parse_args(argv).shell
    print(shtab.complete(whole(parser), shell))
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
    commands.choices["bench"] = bench = make_bench_parser()
    bench.show_all()  # a flag without help is not completed
    commands.choices["calibrate"] = make_calibrate_parser()
    commands.choices["chat"] = make_chat_parser()
    commands.choices["completion"] = make_parser()
    commands.choices["health"] = make_health_parser()
    commands.choices["models"] = make_models_parser()
    commands.choices["plan"] = make_plan_parser()
    commands.choices["ray"] = make_ray_parser()
    commands.choices["simulate"] = make_simulate_parser()
    commands.choices["top"] = make_top_parser()
    for command in commands.choices.values():
        for action in command._actions:
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
