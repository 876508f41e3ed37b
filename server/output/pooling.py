"""How a model's states become embeddings: by the model's directory, or by `--pooler-config`.

A directory in the layout of sentence-transformers defines it in `modules.json` and in the pooling
module's `config.json`. For others it is the last token's state, or an encoder's first, normalized,
as in vLLM.
"""

import math
from array import array
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Self

from penstock.engine.client import ModelInfo, read_model_json, read_model_object
from penstock.scheduler.errors import InvalidConfig
from penstock.scheduler.types import Pooling
from penstock.server.config import PoolerConfig
from penstock.server.errors import InvalidRequest, UnsupportedParameter

# Names of sentence-transformers: the newer ones (one name) and the older (a flag for each mode).
_MODES = {
    "lasttoken": Pooling.LAST,
    "mean": Pooling.MEAN,
    "cls": Pooling.FIRST,
    "pooling_mode_lasttoken": Pooling.LAST,
    "pooling_mode_mean_tokens": Pooling.MEAN,
    "pooling_mode_cls_token": Pooling.FIRST,
}
_SERVED_MODULES = ("Transformer", "Pooling", "Dense", "Normalize")


@dataclass(frozen=True, slots=True, kw_only=True)
class Pooler:
    """From the states of a prompt to its embedding.

    pooling: None as long as nothing says it: it is then that of vLLM, see `of`.
    hidden_size: numbers of a pooled state. matryoshka: the dimensions to which an embedding may be
    truncated; None for none, empty for any. problem: why this model cannot make embeddings.
    """

    pooling: Pooling | None = None
    normalizes: bool = True
    hidden_size: int = 0
    matryoshka: tuple[int, ...] | None = None
    problem: str | None = None

    @classmethod
    def load(cls, directory: Path, config: PoolerConfig) -> Self:
        """All but the hidden size. config: overrides the directory. Raises PenstockError for a file
        that is not as it should be."""
        model = read_model_object(directory / "config.json")
        pooling, normalizes, problem = _read_modules(directory)
        return cls(
            pooling=config.pooling or pooling,
            normalizes=normalizes if config.normalize is None else config.normalize,
            matryoshka=_matryoshka(directory, model),
            problem=None if config.pooling else problem,
        )

    def of(self, info: ModelInfo) -> Self:
        """Returns it for a loaded model."""
        default = info.pooling or (Pooling.FIRST if info.computes_whole else Pooling.LAST)
        pooling, problem = self.pooling or default, self.problem
        if info.labels:
            problem = "this model is a classifier and makes no embeddings; use /classify"
            problem += ", /score or /rerank" if len(info.labels) == 1 else ""
        return replace(self, hidden_size=info.pooled_size, pooling=pooling, problem=problem)

    def check(self, dimensions: int | None, param: str = "dimensions") -> None:
        """Raises InvalidRequest if the model has no embeddings of these dimensions, which the
        field `param` wants."""
        if self.problem:
            raise InvalidRequest(self.problem, code="pooling_not_served")
        if dimensions is None:
            return
        if self.matryoshka is None:
            hint = (
                f"this model's embeddings have {self.hidden_size} numbers and cannot be truncated"
            )
            raise UnsupportedParameter(param, f"{hint}; leave it out")
        allowed = self.matryoshka or range(1, self.hidden_size + 1)
        if dimensions not in allowed:
            lengths = " or ".join(map(str, self.matryoshka)) or f"from 1 to {self.hidden_size}"
            message = f"{param} is {dimensions}; this model's embeddings may have {lengths}"
            raise InvalidRequest(message, param=param)

    def embedding(self, state: bytes, dimensions: int | None = None) -> "array[float]":
        """state: pooled, float32. It is truncated, and then normalized if the model says so."""
        values = array("f", state)[:dimensions]
        return normalized(values) if self.normalizes else values


def normalized(values: "array[float]") -> "array[float]":
    """The same direction, of length 1."""
    length = math.hypot(*values)
    return array("f", [value / length for value in values]) if length else values


def _read_modules(directory: Path) -> tuple[Pooling | None, bool, str | None]:
    """Pooling, whether it is normalized, and why it is not supported, if so."""
    modules = read_model_json(directory / "modules.json") or []
    if not isinstance(modules, list) or not all(isinstance(module, dict) for module in modules):
        raise InvalidConfig(f"{directory / 'modules.json'} must hold a JSON list of objects")
    kinds = {str(module.get("type", "")).rpartition(".")[2]: module for module in modules}
    config_path = pooling_config_path(directory, modules)
    config = read_model_object(config_path) if config_path else {}
    if not config:
        return None, True, None
    if unknown := [kind for kind in kinds if kind not in _SERVED_MODULES]:
        problem = f"this model's modules.json has {unknown[0]}, which this server does not support"
        return None, True, f"{problem}; use another model for embeddings"
    modes = _modes(config)
    normalizes = "Normalize" in kinds or not kinds
    if len(modes) == 1 and modes[0] in _MODES:
        return _MODES[modes[0]], normalizes, None
    problem = (
        f"this model pools by {' and '.join(modes) or 'nothing'}; this server supports the first "
        "token's state, the last's and the mean, which its operator can choose with --pooler-config"
    )
    return None, normalizes, problem


def pooling_config_path(directory: Path, modules: list[dict[str, Any]]) -> Path | None:
    """Returns the pooling module's. Raises InvalidConfig for one outside of the directory."""
    name: Any = "1_Pooling"
    for module in modules:
        if str(module.get("type", "")).rpartition(".")[2] == "Pooling":
            name = module.get("path", "")
    if not isinstance(name, str) or Path(name).is_absolute() or ".." in Path(name).parts:
        raise InvalidConfig(
            f"{directory / 'modules.json'}: 'path' must be a directory within the model's, "
            f"not {name!r:.80}"
        )
    return directory / name / "config.json" if name else None


def _modes(config: dict[str, Any]) -> list[str]:
    if name := config.get("pooling_mode"):
        return [str(name)]
    return [key for key, on in config.items() if key.startswith("pooling_mode_") and on is True]


def _matryoshka(directory: Path, model: dict[str, Any]) -> tuple[int, ...] | None:
    """From the keys of config.json that vLLM reads."""
    if lengths := model.get("matryoshka_dimensions"):
        if not isinstance(lengths, list) or not all(type(n) is int and n > 0 for n in lengths):
            raise InvalidConfig(
                f"{directory / 'config.json'}: 'matryoshka_dimensions' must be a list of positive "
                f"integers, not {lengths!r:.80}"
            )
        return tuple(sorted(lengths))
    return () if model.get("is_matryoshka") else None
