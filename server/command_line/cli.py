"""The command line: `penstock serve`, and the first word of every other command."""

import os
import sys
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

from penstock.engine.client import importing, printable
from penstock.scheduler.errors import PenstockError
from penstock.server.flags.flag_parser import FlagParser, set_defaults
from penstock.server.flags.serve_config import config_file, serve_config
from penstock.server.flags.serve_flags import add_serve_flags
from penstock.server.flags.vllm_flags import as_ours
from penstock.server.observability.version import version

_EXIT_USAGE = 2  # as argparse exits
_EXIT_INTERRUPTED = 130  # as a shell reports SIGINT


class Command(NamedTuple):
    """A command besides `serve`. path: its module, with `main` and `make_parser`, is imported when
    it is needed: `--help` should not wait for a web framework."""

    path: str
    help: str

    @property
    def module(self) -> Any:
        return import_module(f"penstock.{self.path}")


COMMANDS = {
    "ray": Command("server.ray.cli", "serve a model on several replicas, with Ray Serve"),
    "health": Command(
        "server.command_line.health_check", "ask a server on this machine whether it is healthy"
    ),
    "bench": Command(
        "loadtest.bench.cli", "measure a server under load; see penstock bench --help"
    ),
    "calibrate": Command(
        "loadtest.calibrate.cli", "fit a model of step times to a server, for simulate"
    ),
    "simulate": Command(
        "loadtest.simulate.cli", "what a load would do to servers that need not exist"
    ),
    "plan": Command(
        "loadtest.plan.cli", "how many devices a load takes, with which flags, at what cost"
    ),
    "top": Command("loadtest.top.cli", "watch a server in the terminal; see penstock top --help"),
    "models": Command(
        "server.command_line.model_list",
        "list the models on this machine; see penstock models --help",
    ),
    "chat": Command("loadtest.chat.cli", "chat with a served model; see penstock chat --help"),
    "completion": Command(
        "server.command_line.completion", "print a script that completes commands in a shell"
    ),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Returns the exit code."""
    _open_standard_streams()
    try:
        return _run(list(sys.argv[1:] if argv is None else argv))
    except KeyboardInterrupt:  # before a command has its own answer to it
        return _EXIT_INTERRUPTED
    except PenstockError as error:
        print(f"penstock: error: {printable(str(error))}", file=sys.stderr)
        return _EXIT_USAGE


def _run(arguments: list[str]) -> int:
    """Each command but `serve` parses its own flags."""
    if arguments and (command := COMMANDS.get(arguments[0])):
        code: int = command.module.main(arguments[1:])
        return code
    arguments = as_ours(arguments)
    parser, serve_flags = parsers()
    set_defaults(serve_flags, os.environ, config_file(arguments))
    config = serve_config(parser.parse_args(arguments))
    with importing():
        from penstock.server.app import serve
    return serve(config)


def _open_standard_streams() -> None:
    """Opens those that whoever started this closed (`>&-`). Python has None for them, and the next
    file or connection would get their numbers, and with these every line of the log."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            # It gets the lowest number that is free: the stream's own.
            setattr(sys, name, Path(os.devnull).open(mode))  # noqa: SIM115


def parsers() -> tuple[FlagParser, FlagParser]:
    """Makes that of the whole command line, in which other commands are names alone, and that of
    `penstock serve`."""
    parser = FlagParser(
        prog="penstock", description="An OpenAI-compatible server for large language models."
    )
    parser.add_argument("--version", action="version", version=f"penstock {version()}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    serve = commands.add_parser("serve", help="serve a model over HTTP")
    add_serve_flags(serve)
    for name, command in COMMANDS.items():
        commands.add_parser(name, help=command.help)
    return parser, serve
