"""The command line: `penstock serve` and `penstock bench`."""

import argparse
import sys
from collections.abc import Sequence
from enum import StrEnum
from importlib.resources import files
from pathlib import Path

from engine.config import Device, Dtype, EngineConfig, LoadFormat
from scheduler.config import Batching, Policy, SchedulerConfig
from scheduler.errors import PenstockError
from server.config import MIB, ServeConfig, ServerConfig
from server.version import version

# The demo was taught to call itself the second in its examples.
_DEMO_NAMES = ("penstock-demo", "demo")
_EXIT_MISTAKEN = 2  # argparse's own
_LOG_LEVELS = ("debug", "info", "warning", "error")


def main(argv: Sequence[str] | None = None) -> int:
    """Returns the exit code; a mistake of the person who typed is one sentence on stderr."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    if arguments[:1] == ["bench"]:  # it has a command line of its own
        from loadtest.cli import main as bench

        return bench(arguments[1:])
    options = _parser().parse_args(arguments)
    try:
        config = _config(options)
        from server.app import serve  # not at the top: `--help` should not wait for a web framework

        return serve(config)
    except PenstockError as error:
        print(f"penstock: error: {error}", file=sys.stderr)
        return _EXIT_MISTAKEN


def _config(options: argparse.Namespace) -> ServeConfig:
    """Raises InvalidConfig."""
    own_names = (options.model,) if options.model else _DEMO_NAMES
    return ServeConfig(
        server=ServerConfig(
            host=options.host,
            port=options.port,
            served_model_names=tuple(options.served_model_name or own_names),
            api_key=options.api_key,
            max_body_bytes=options.max_body_bytes,
            shutdown_timeout_s=options.shutdown_timeout,
            sse_ping_interval_s=options.sse_ping_interval,
            chat_template=options.chat_template,
            log_level=options.log_level,
        ),
        engine=EngineConfig(
            model=options.model or str(files("engine") / "demo_model"),
            device=Device(options.device),
            dtype=Dtype(options.dtype),
            load_format=LoadFormat(options.load_format),
            max_model_len=options.max_model_len,
            block_size=options.block_size,
            kv_cache_memory_bytes=options.kv_cache_memory_bytes,
            num_threads=options.num_threads,
            max_num_queued_reqs=options.max_num_queued_reqs,
            scripted=options.scripted,
            scheduler=SchedulerConfig(
                max_num_seqs=options.max_num_seqs,
                max_num_batched_tokens=options.max_num_batched_tokens,
                enable_prefix_caching=options.enable_prefix_caching,
                policy=Policy(options.scheduling_policy),
                batching=Batching(options.batching),
            ),
        ),
    )


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="penstock", description="An OpenAI-compatible server for large language models."
    )
    parser.add_argument("--version", action="version", version=f"penstock {version()}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    serve = commands.add_parser("serve", help="serve a model over HTTP")
    serve.add_argument(
        "model",
        nargs="?",
        metavar="MODEL",
        help="a Hugging Face model: a directory or a hub id (default: the bundled demo model)",
    )
    _add_server_flags(serve.add_argument_group("server"))
    _add_engine_flags(serve.add_argument_group("engine"))
    _add_scheduler_flags(serve.add_argument_group("scheduler"))
    commands.add_parser("bench", help="measure a server under load; see penstock bench --help")
    return parser


def _add_server_flags(group: "argparse._ArgumentGroup") -> None:
    flag = group.add_argument
    flag("--host", default="127.0.0.1", help="address to listen on (default: %(default)s)")
    flag("--port", type=int, default=8000, help="port to listen on (default: %(default)s)")
    flag(
        "--served-model-name",
        nargs="+",
        metavar="NAME",
        help="what clients may call the model; the first is what answers say "
        f"(default: MODEL as given, {_DEMO_NAMES[0]} for the demo)",
    )
    flag("--api-key", metavar="KEY", help="ask for this key on /v1 (default: none, all may come)")
    flag(
        "--max-body-bytes",
        type=int,
        metavar="N",
        default=32 * MIB,
        help="the largest request body (default: %(default)s, 32 MiB)",
    )
    flag(
        "--shutdown-timeout",
        type=float,
        metavar="SECONDS",
        default=30.0,
        help="what runs at SIGTERM may take so long to finish (default: %(default)s)",
    )
    flag(
        "--sse-ping-interval",
        type=float,
        metavar="SECONDS",
        default=15.0,
        help="a stream that is silent so long gets a comment, for proxies (default: %(default)s)",
    )
    flag(
        "--chat-template",
        type=Path,
        metavar="FILE",
        help="a Jinja chat template (default: the model's own)",
    )
    flag("--log-level", choices=_LOG_LEVELS, default="info", help="(default: %(default)s)")


def _add_engine_flags(group: "argparse._ArgumentGroup") -> None:
    flag = group.add_argument
    _add_choice(group, "--device", Device, Device.AUTO, "where the model runs")
    _add_choice(group, "--dtype", Dtype, Dtype.AUTO, "what weights and KV cache are held in")
    _add_choice(
        group, "--load-format", LoadFormat, LoadFormat.AUTO, "read the weights, or make them up"
    )
    flag("--max-model-len", type=int, metavar="N", help="longest context (default: the model's)")
    flag(
        "--block-size",
        type=int,
        metavar="N",
        help="tokens of a KV block (default: 16 on CPU, 64 on CUDA)",
    )
    flag(
        "--kv-cache-memory-bytes",
        type=int,
        metavar="N",
        help="memory of the KV cache (default: a quarter of what is free on CPU)",
    )
    flag("--num-threads", type=int, metavar="N", help="CPU threads (default: all cores but one)")
    flag(
        "--max-num-queued-reqs",
        type=int,
        metavar="N",
        default=1024,
        help="answers that may wait; more get status 429 (default: %(default)s)",
    )
    flag(
        "--scripted",
        action="store_true",
        help="made-up tokens in place of the model's, to test the server (default: off)",
    )


def _add_scheduler_flags(group: "argparse._ArgumentGroup") -> None:
    flag = group.add_argument
    flag(
        "--max-num-seqs",
        type=int,
        metavar="N",
        default=256,
        help="sequences that run together (default: %(default)s)",
    )
    flag(
        "--max-num-batched-tokens",
        type=int,
        metavar="N",
        default=2048,
        help="tokens of one step (default: %(default)s)",
    )
    flag(
        "--enable-prefix-caching",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="share the KV blocks of equal prompt beginnings (default: on)",
    )
    _add_choice(group, "--scheduling-policy", Policy, Policy.FCFS, "who is next")
    _add_choice(group, "--batching", Batching, Batching.CONTINUOUS, "when the waiting may join")


def _add_choice(
    group: "argparse._ArgumentGroup",
    flag: str,
    kind: type[StrEnum],
    default: str,
    help_text: str,
) -> None:
    names = [choice.value for choice in kind]
    help_text += f" (default: {default})"
    group.add_argument(
        flag, choices=names, default=default, metavar="|".join(names), help=help_text
    )
