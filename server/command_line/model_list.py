"""`penstock models`: the models on this machine, and which of them this Penstock can serve."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from penstock.engine.client import ListedModel, cached_models, models_in, printable, shown_size
from penstock.scheduler.errors import PenstockError
from penstock.server.config import PoolerConfig
from penstock.server.flags.flag_parser import FlagParser
from penstock.server.output.pooling import Pooler
from penstock.server.prompt.tokenizer import GenerationDefaults

_SLOWLY = "yes, slowly: by the class of transformers"
_HEADER = ("MODEL", "SIZE", "FAMILY", "CAN BE SERVED")


def main(argv: list[str]) -> int:
    """Returns the exit code. Raises PenstockError for what is no directory."""
    options = make_parser().parse_args(argv)
    models = cached_models()
    for directory in options.directories:
        models += models_in(directory)
    problems = [model.problem or _problem_of_settings(model.path) for model in models]
    if options.json:
        print(json.dumps(list(map(_as_json, models, problems)), indent=2))
    else:
        print(_table(models, problems))
    return 0


def _problem_of_settings(directory: Path) -> str | None:
    """Checks what the server process reads, and the engine does not."""
    try:
        GenerationDefaults.load(directory)
        Pooler.load(directory, PoolerConfig())
    except PenstockError as error:
        return str(error).replace(f"{directory}/", "")
    return None


def _as_json(model: ListedModel, problem: str | None) -> dict[str, Any]:
    return {
        "model": model.name,
        "path": str(model.path),
        "size_bytes": model.num_bytes,
        "family": model.family,
        "can_be_served": problem is None,
        "model_impl": None if problem else model.model_impl,
        "problem": problem,
    }


def _table(models: Sequence[ListedModel], problems: Sequence[str | None]) -> str:
    if not models:
        return (
            "there are no models in the cache of Hugging Face's hub; `penstock serve OWNER/NAME` "
            "downloads one, and `penstock models DIRECTORY` looks elsewhere"
        )
    rows = [_HEADER]
    for model, problem in zip(models, problems, strict=True):
        yes = "yes" if model.model_impl != "transformers" else _SLOWLY
        answer = f"no: {problem}" if problem else yes
        name, family = printable(model.name), printable(model.family or "-")
        rows.append((name, shown_size(model.num_bytes), family, printable(answer)))
    widths = [max(len(row[column]) for row in rows) for column in range(len(_HEADER) - 1)]
    return "\n".join(
        "  ".join([*map(str.ljust, row, widths), row[-1]])  # the last as long as it is
        for row in rows
    )


def make_parser() -> FlagParser:
    parser = FlagParser(
        prog="penstock models",
        description="List the models on this machine, and whether Penstock can serve them: those "
        "in the cache of Hugging Face's hub, and those in directories.",
    )
    flag = parser.add_argument
    flag(
        "directories",
        nargs="*",
        type=Path,
        metavar="DIRECTORY",
        help="a model's directory, or one that has some below it (default: the hub's cache alone)",
    )
    flag("--json", action="store_true", help="print JSON: size in bytes, and paths")
    return parser
