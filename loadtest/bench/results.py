"""Writes the settings and numbers of a run as text or JSON, and the files that flags name."""

import argparse
import contextlib
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from datetime import datetime
from pathlib import Path
from typing import Any

import msgspec

from penstock.loadtest.bench.config import BenchConfig, parse_pairs
from penstock.loadtest.bench.http_target import TargetConfig
from penstock.loadtest.command_line import discard_output, printable, printer
from penstock.loadtest.report.figures import Figure, Measurement, figures
from penstock.loadtest.report.html import html_report
from penstock.loadtest.report.plots import save_plots
from penstock.loadtest.report.report import Summary
from penstock.loadtest.workload.config import WorkloadConfig
from penstock.scheduler.errors import PenstockError


class FileNotWritten(PenstockError):
    """A file that was asked for could not be written; the results were printed before."""


def settings_of(config: BenchConfig, target: TargetConfig) -> Summary:
    """The settings under vLLM's keys, so that a run can be repeated from its result file."""
    workload, args = config.workload, config.args
    backend = args.backend or ("openai-chat" if workload.is_chat else "openai")
    ratio, output_ratio = workload.range_ratio, workload.output_range_ratio
    is_one_ratio = output_ratio in (None, ratio)
    return {
        "date": datetime.now().strftime("%Y%m%d-%H%M%S"),
        "backend": backend,
        "endpoint_type": backend,
        "label": args.label,
        "model_id": args.model or target.model,
        "tokenizer_id": None if args.tokenizer is None else str(args.tokenizer),
        "num_prompts": workload.num_prompts,
        "request_rate": _number(workload.request_rate),
        "burstiness": workload.burstiness,
        "max_concurrency": args.max_concurrency,
        "seed": workload.seed,
        "dataset_name": workload.dataset,
        **_sources(workload),
        "random_prefix_len": workload.random_prefix_len,
        "random_input_len": workload.input_len,
        "random_output_len": workload.output_len,
        "random_range_ratio": ratio if is_one_ratio else {"input": ratio, "output": output_ratio},
        "ignore_eos": target.ignore_eos,
        "temperature": target.temperature,
        "goodput": config.report.goodput_ms,
        **parse_pairs("--metadata", args.metadata),
    }


def _sources(workload: WorkloadConfig) -> dict[str, Any]:
    """Returns the settings of a ramp and of a file, if the workload has them."""
    settings: dict[str, Any] = {}
    if (ramp := workload.ramp) is not None:
        settings = {f"ramp_up_{name}": value for name, value in asdict(ramp).items()}
    if workload.dataset.is_file:
        settings["dataset_path"] = str(workload.dataset_path)
        settings["trace_speedup"] = _number(workload.trace_speedup)
    return settings


def _number(value: float) -> float | str:
    """JSON has no infinity."""
    return "inf" if math.isinf(value) else value


def _name(args: argparse.Namespace, document: Summary) -> str:
    if args.sweep:
        load = "sweep"
    elif args.ramp_up_strategy is not None:
        ends = f"{args.ramp_up_start_rps:g}qps-{args.ramp_up_end_rps:g}qps"
        load = f"ramp-up-{args.ramp_up_strategy}-{ends}"
    else:
        load = f"{document['request_rate']}qps"
    if args.max_concurrency is not None:
        load += f"-concurrency{args.max_concurrency}"
    model = str(document["model_id"]).rpartition("/")[2]
    return f"{args.label or document['backend']}-{load}-{model}-{document['date']}.json"


def show(args: argparse.Namespace, summary: Summary, text: str) -> None:
    """On stdout: the text, or with --json the summary as one line."""
    show_text(msgspec.json.encode(summary).decode() if args.json else text)


def show_text(text: str) -> None:
    try:
        print(printable(text), flush=True)
    except BrokenPipeError:
        discard_output()


say = printer("penstock bench")


def write(
    args: argparse.Namespace,
    document: Summary,
    shown: Measurement,
    rates: Sequence[Measurement],
    text: str,
    notes: list[str],
    *,
    more: Sequence[Figure] = (),
    say: Callable[[str], None] = say,
) -> None:
    """Writes the files that the flags name, and nothing else. Raises FileNotWritten.

    rates: a sweep's, in the order of measurement. notes: why the result may be misleading. more:
    figures besides those of every run.
    """
    if args.save_result or args.append_result:
        path = Path(args.result_dir or ".", args.result_filename or _name(args, document))
        write_file(path, msgspec.json.encode(document), is_appended=args.append_result)
        say(f"saved as {path}")
    drawn = [*figures(shown, rates), *more] if args.report or args.plot_dir else []
    if args.report:
        write_file(args.report, html_report(shown.summary, drawn, text, notes).encode())
        say(f"report written to {args.report}")
    if args.plot_dir:
        with _writing(args.plot_dir):
            for path in save_plots(drawn, args.plot_dir):
                say(f"plot written to {path}")


def write_file(path: Path, data: bytes, *, is_appended: bool = False) -> None:
    """Writes a file in a folder that is made if needed. is_appended: as one more line of it. Raises
    FileNotWritten."""
    with _writing(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        if is_appended and path.exists() and path.stat().st_size:
            data = b"\n" + data
        with path.open("ab" if is_appended else "wb") as file:
            file.write(data)


@contextlib.contextmanager
def _writing(path: Path) -> Iterator[None]:
    """Raises FileNotWritten instead of OSError."""
    try:
        yield
    except OSError as error:
        raise FileNotWritten(
            f"{path} cannot be written: {error.strerror}; the results above are complete"
        ) from error
