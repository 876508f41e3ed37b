"""The command line: `penstock serve`, and the first word of every other command."""

import os
import sys
from collections.abc import Sequence
from pathlib import Path

from penstock.scheduler.errors import PenstockError
from penstock.server.command_line.health_check import check, flags_of_container
from penstock.server.command_line.health_check import make_parser as make_health_parser
from penstock.server.flags.flag_parser import FlagParser, set_defaults
from penstock.server.flags.serve_config import config_file, serve_config
from penstock.server.flags.serve_flags import add_serve_flags
from penstock.server.observability.version import version

_EXIT_USAGE = 2  # as argparse exits
_EXIT_INTERRUPTED = 130  # as a shell reports SIGINT


def main(argv: Sequence[str] | None = None) -> int:
    """Returns the exit code."""
    _open_standard_streams()
    try:
        return _run(list(sys.argv[1:] if argv is None else argv))
    except KeyboardInterrupt:  # before a command has its own answer to it
        return _EXIT_INTERRUPTED
    except PenstockError as error:
        print(f"penstock: error: {error}", file=sys.stderr)
        return _EXIT_USAGE


def _run(arguments: list[str]) -> int:
    """Each command but `serve` parses its own flags. Imports that one of them needs are not at the
    top: `--help` should not wait for a web framework."""
    match arguments[:1]:
        case ["bench"]:
            from penstock.loadtest.bench.cli import main as bench

            return bench(arguments[1:])
        case ["calibrate"]:
            from penstock.loadtest.calibrate.cli import main as calibrate

            return calibrate(arguments[1:])
        case ["simulate"]:
            from penstock.loadtest.simulate.cli import main as simulate

            return simulate(arguments[1:])
        case ["plan"]:
            from penstock.loadtest.plan.cli import main as plan

            return plan(arguments[1:])
        case ["top"]:
            from penstock.loadtest.top.cli import main as top

            return top(arguments[1:])
        case ["chat"]:
            from penstock.loadtest.chat.cli import main as chat

            return chat(arguments[1:])
        case ["completion"]:
            from penstock.server.command_line.completion import main as completion

            return completion(arguments[1:], _parsers()[0])
        case ["models"]:
            from penstock.server.command_line.model_list import main as models

            return models(arguments[1:])
        case ["ray"]:
            from penstock.server.ray.cli import main as ray

            return ray(arguments[1:])
        case ["health"]:
            return _health(arguments[1:])
    parser, serve_flags = _parsers()
    set_defaults(serve_flags, os.environ, config_file(arguments))
    config = serve_config(parser.parse_args(arguments))
    from penstock.server.app import serve

    return serve(config)


def _open_standard_streams() -> None:
    """Opens those that whoever started this closed (`>&-`). Python has None for them, and the next
    file or connection would get their numbers, and with these every line of the log."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            # It gets the lowest number that is free: the stream's own.
            setattr(sys, name, Path(os.devnull).open(mode))  # noqa: SIM115


def _health(arguments: list[str]) -> int:
    """The server's address comes from the same flags, variables and file as the server has."""
    parser = make_health_parser()
    arguments = arguments or flags_of_container()
    set_defaults(parser, os.environ, config_file(arguments))
    options = parser.parse_args(arguments)
    return check(options.host, options.port, has_tls=bool(options.ssl_certfile))


def _parsers() -> tuple[FlagParser, FlagParser]:
    """The whole command line's, and that of `penstock serve`."""
    parser = FlagParser(
        prog="penstock", description="An OpenAI-compatible server for large language models."
    )
    parser.add_argument("--version", action="version", version=f"penstock {version()}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    serve = commands.add_parser("serve", help="serve a model over HTTP")
    add_serve_flags(serve)
    commands.add_parser("ray", help="serve a model on several replicas, with Ray Serve")
    commands.add_parser("health", help="ask a server on this machine whether it is healthy")
    commands.add_parser("bench", help="measure a server under load; see penstock bench --help")
    commands.add_parser("calibrate", help="fit a model of step times to a server, for simulate")
    commands.add_parser("simulate", help="what a load would do to servers that need not exist")
    commands.add_parser(
        "plan", help="how many devices a load takes, with which flags, at what cost"
    )
    commands.add_parser("top", help="watch a server in the terminal; see penstock top --help")
    commands.add_parser(
        "models", help="list the models on this machine; see penstock models --help"
    )
    commands.add_parser("chat", help="chat with a served model; see penstock chat --help")
    commands.add_parser("completion", help="print a script that completes commands in a shell")
    return parser, serve
