"""`penstock health`: asks a server on this machine for /health, as the images do."""

import argparse
import http.client
import os
import ssl
import sys
from pathlib import Path

from penstock.engine.client import printable
from penstock.server.flags.flag_parser import FlagParser, set_defaults
from penstock.server.flags.serve_config import config_file
from penstock.server.flags.serve_flags import add_serve_flags

# Docker gives a check five seconds.
_TIMEOUT_S = 4.0
# Ours says less; whoever else listens there may say anything.
_MAX_BYTES = 1 << 16
_THAT_MATTER = ("help", "host", "port", "ssl_certfile", "config")
_HEALTHY, _UNHEALTHY = 0, 1  # Docker's exit codes


def main(argv: list[str]) -> int:
    """The server's address comes from the same flags, variables and file as the server has."""
    parser = make_parser()
    arguments = argv or flags_of_container()
    set_defaults(parser, os.environ, config_file(arguments))
    options = parser.parse_args(arguments)
    return check(options.host, options.port, has_tls=bool(options.ssl_certfile))


def check(host: str, port: int, *, has_tls: bool) -> int:
    """Asks, prints what the server says, and returns the exit code. host: what it listens on."""
    # Not urllib, which would use a proxy that Docker is configured with.
    address = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
    connection = (
        http.client.HTTPSConnection(address, port, timeout=_TIMEOUT_S, context=_unverified())
        if has_tls
        else http.client.HTTPConnection(address, port, timeout=_TIMEOUT_S)
    )
    try:
        connection.request("GET", "/health")
        response = connection.getresponse()
        text = response.read(_MAX_BYTES).decode(errors="replace")
    except (OSError, http.client.HTTPException) as error:
        why = printable(str(error))
        print(f"no server answers on {address}:{port}: {why}", file=sys.stderr)
        return _UNHEALTHY
    finally:
        connection.close()
    print(printable(text))
    return _HEALTHY if response.status == 200 else _UNHEALTHY


def make_parser() -> FlagParser:
    parser = FlagParser(
        prog="penstock health",
        usage="penstock health [--host ADDRESS] [--port N] [--ssl-certfile FILE] [--config FILE]",
        description="Asks a server on this machine for /health; the exit code is 0 if it is "
        "healthy. It takes all flags of penstock serve, by default those of the container; these "
        "matter:",
    )
    add_serve_flags(parser)
    for action in parser._actions:
        if action.dest not in _THAT_MATTER:
            action.help = argparse.SUPPRESS
    return parser


def flags_of_container(commands: Path = Path("/proc/1/cmdline")) -> list[str]:
    """Returns what the server was started with, where it, or the init process before it, is process
    1."""
    try:
        arguments = commands.read_bytes().decode(errors="surrogateescape").split("\0")[:-1]
    except OSError:
        return []
    names = [Path(argument).name for argument in arguments]
    is_ours = "penstock" in names and arguments[names.index("penstock") + 1 :][:1] == ["serve"]
    return arguments[names.index("penstock") + 2 :] if is_ours else []


def _unverified() -> ssl.SSLContext:
    """The certificate has the name that clients use, and this is the same machine."""
    context = ssl.create_default_context()
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    return context
