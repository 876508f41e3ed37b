"""`python -m tests.bench.in_turns`: the command line of a comparison, and where its result goes."""

import argparse
import contextlib
import json
import shlex
import signal
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
from tokenizers import Tokenizer

from penstock.loadtest.bench.config import check_writable
from penstock.loadtest.bench.results import say, show_text, write_file
from penstock.loadtest.command_line import INTERRUPTED, BenchParser
from penstock.loadtest.workload.config import PromptFormat
from penstock.loadtest.workload.token_counter import TOKENIZER_FILE, tokenizer_counter
from penstock.scheduler.errors import InvalidConfig, PenstockError
from tests.bench.in_turns.cases import Case, parse_cases
from tests.bench.in_turns.conversations import Encoder
from tests.bench.in_turns.machine import is_supported, num_cores
from tests.bench.in_turns.rounds import PeersConfig, measure
from tests.bench.in_turns.server import ServerSpec, parse_server
from tests.bench.in_turns.table import PENSTOCK, Table
from tests.support.paths import DEMO_MODEL

_DESCRIPTION = """\
Measure Penstock and other servers in turns, under the same load, and show the
ratios. One server runs at a time: each turn starts it, waits until it is ready,
warms it up, measures every case, and stops it by its process id. The order is
A B, B A, A B and so on.

In a command, {port}, {model} and {threads} are replaced; there is no shell.

  python -m tests.bench.in_turns --model MODEL_DIR --cases 128x64@1,128x64@8 \\
    --server 'llama=llama-server -m model.gguf --port {port} -t {threads}' \\
    --server 'vllm=vllm serve {model} --port {port}'"""


def main(argv: list[str]) -> int:
    """Returns the exit status: 0 if each server was measured in each round."""
    try:
        with _stopped_by_signals():
            return _peers(make_parser().parse_args(argv))
    except PenstockError as error:
        say(str(error))
        return 2 if isinstance(error, InvalidConfig) else 1
    except SystemExit as ended:  # the help
        return int(ended.code or 0)


@contextlib.contextmanager
def _stopped_by_signals() -> Iterator[None]:
    """SIGTERM does what Ctrl-C does, so that the server that runs is stopped too.

    Also in the background of a shell, where a program starts with SIGINT ignored.
    """
    before = {
        signal.SIGINT: signal.signal(signal.SIGINT, signal.default_int_handler),
        signal.SIGTERM: signal.signal(
            signal.SIGTERM, lambda *_: signal.raise_signal(signal.SIGINT)
        ),
    }
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _peers(options: argparse.Namespace) -> int:
    config = peers_config(options)
    if options.result_filename is not None:
        check_writable("--result-filename", options.result_filename)
    outcome = measure(config, say)
    table = Table(config, outcome)
    document = msgspec.json.encode(table.document())
    show_text(document.decode() if options.json else table.text())
    if options.result_filename is not None:
        write_file(options.result_filename, document)
        say(f"saved as {options.result_filename}")
    if outcome.is_interrupted:
        return INTERRUPTED
    return 1 if outcome.failures else 0


def peers_config(options: argparse.Namespace) -> PeersConfig:
    """Raises InvalidConfig."""
    if not is_supported():
        raise InvalidConfig("the comparison reads /proc, which this system lacks; use Linux")
    for flag, value in (
        ("--rounds", options.rounds),
        ("--threads", options.threads),
        ("--ready-timeout", options.ready_timeout),
        ("--request-timeout", options.request_timeout),
    ):
        if not value > 0:
            raise InvalidConfig(f"{flag} is {value:g}; it must be more than 0")
    cases = parse_cases(options.cases)
    return PeersConfig(
        servers=_servers(options),
        cases=cases,
        num_rounds=options.rounds,
        model=options.model or "",
        threads=options.threads,
        is_busy=options.busy,
        seed=options.seed,
        prompt_format=PromptFormat(options.prompt_format),
        count=None if options.tokenizer is None else tokenizer_counter(options.tokenizer),
        encode=_encoder(options, cases),
        ready_timeout_s=options.ready_timeout,
        request_timeout_s=options.request_timeout,
    )


def _encoder(options: argparse.Namespace, cases: list[Case]) -> Encoder | None:
    """Of the tokenizer, if a case needs it. Raises InvalidConfig."""
    needs = [case.name for case in cases if case.num_turns > 1]
    if not needs or PromptFormat(options.prompt_format) is PromptFormat.TEXT:
        return None
    given = options.tokenizer or (Path(options.model) if options.model else DEMO_MODEL)
    file = given / TOKENIZER_FILE if given.is_dir() else given
    try:
        tokenizer = Tokenizer.from_file(str(file))
    except Exception as error:  # tokenizers raises no narrower class
        raise InvalidConfig(
            f"--cases {needs[0]} needs the model's tokenizer, and {file} cannot be read ({error}); "
            "give --tokenizer a directory that has one, or --prompt-format text"
        ) from error

    def encode(text: str) -> list[int]:
        return list(tokenizer.encode(text, add_special_tokens=False).ids)

    return encode


def _servers(options: argparse.Namespace) -> list[ServerSpec]:
    """Penstock first."""
    given = [parse_server(text) for text in options.server]
    names = [spec.name for spec in given]
    for name in names:
        if names.count(name) > 1:
            raise InvalidConfig(f"two servers are named {name}; give each --server its own name")
    if PENSTOCK not in names:
        given.insert(0, _penstock(options.model))
    given.sort(key=lambda spec: spec.name != PENSTOCK)
    if len(given) < 2:
        raise InvalidConfig("there is nothing to compare with; give --server NAME=COMMAND")
    for spec in given:
        if "{model}" in spec.command and not options.model:
            raise InvalidConfig(f"the command of {spec.name} has {{model}}; give --model")
    bodies = _extra_bodies(options.extra_body, [spec.name for spec in given])
    return [replace(spec, extra_body=bodies.get(spec.name, {})) for spec in given]


def _penstock(model: str | None) -> ServerSpec:
    """Of this installation; the demo model without --model."""
    command = f"{shlex.quote(sys.executable)} -m penstock serve{' {model}' if model else ''}"
    return ServerSpec(name=PENSTOCK, command=f"{command} --port {{port}} --num-threads {{threads}}")


def _extra_bodies(texts: list[str], names: list[str]) -> dict[str, dict[str, Any]]:
    bodies = {}
    for text in texts:
        name, is_pair, body = text.partition("=")
        try:
            parsed = json.loads(body)
        except ValueError:
            parsed = None
        if not (is_pair and isinstance(parsed, dict)):
            raise InvalidConfig(
                f"--extra-body {text!r} is not valid; write NAME=JSON, as in "
                "'llama={\"cache_prompt\": false}'"
            )
        if name not in names:
            raise InvalidConfig(
                f"--extra-body {name}: there is no server of this name; choose from "
                f"{', '.join(names)}"
            )
        bodies[name] = parsed
    return bodies


def make_parser() -> BenchParser:
    parser = BenchParser(prog="python -m tests.bench.in_turns", description=_DESCRIPTION)
    add = parser.add_argument
    add(
        "--server",
        action="append",
        default=[],
        metavar="NAME=COMMAND",
        help="a server to compare with, or `penstock` itself with other flags than its own; may "
        "be given several times",
    )
    add("--model", metavar="MODEL", help="of {model} in the commands; Penstock's is the demo model")
    add(
        "--cases",
        metavar="LIST",
        default="128x64@1,128x64@8",
        help="tokens of a prompt, x, of an output, @, requests at a time; :shared=N for prompts "
        "that begin with the same N tokens, :turns=N for conversations, whose turns send all that "
        "was said before, :n=N for N requests or conversations; commas between cases",
    )
    add("--rounds", type=int, metavar="N", default=4, help="turns of each server")
    add(
        "--threads",
        type=int,
        metavar="N",
        default=num_cores() if is_supported() else 1,
        help="of {threads} in the commands, and OMP_NUM_THREADS of each server",
    )
    add("--busy", action="store_true", help="run a busy process on each core meanwhile")
    add(
        "--extra-body",
        action="append",
        default=[],
        metavar="NAME=JSON",
        help="additional fields for one server; null leaves out one of ours, such as ignore_eos",
    )
    add(
        "--prompt-format",
        choices=[each.value for each in PromptFormat],
        default=PromptFormat.IDS.value,
        help="ids have exact lengths; text is for servers that accept no ids",
    )
    add(
        "--tokenizer",
        type=Path,
        metavar="PATH",
        help="a model's directory, a tokenizer.json or a hub id, to count the tokens of servers "
        "that send no count (by default their events are counted), and to make ids of what a "
        "server said in a conversation (by default the model's)",
    )
    add("--seed", type=int, metavar="N", default=0, help="of the prompts")
    add("--ready-timeout", type=float, metavar="S", default=600.0, help="for the start of a server")
    add("--request-timeout", type=float, metavar="S", default=600.0, help="of a whole response")
    add("--json", action="store_true", help="print the result as one line of JSON, not as text")
    add("--result-filename", type=Path, metavar="FILE", help="write the result as JSON too")
    return parser
