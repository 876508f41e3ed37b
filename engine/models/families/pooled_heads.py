"""`PooledHead`: dense layers on the pooled state of a text.

A classifier's are those of its class in transformers, which config.json names; those of an
embedding model are in sentence-transformers' modules.json; and of a model that answers yes or no,
two rows of its output layer score a text. Imports no tensors.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from penstock.engine.files.json_file import Fields, read_json
from penstock.engine.models.errors import InvalidModel
from penstock.engine.models.parts.experts.config import MAX_WIDTH
from penstock.scheduler.types import Pooling

CLASSIFIER = "ForSequenceClassification"
ACTIVATIONS = ("identity", "tanh", "gelu", "relu", "sigmoid", "silu")
_PROBLEMS = ("regression", "single_label_classification", "multi_label_classification")
# By family: the layers of its classifier, the last but one with tanh. Decoders' have one, "score".
_POOLER, _DENSE = ("model.pooler.dense", "classifier"), ("classifier.dense", "classifier.out_proj")
_CLASSIFIERS = {
    **dict.fromkeys(("bert", "gte", "nomic_bert"), _POOLER),
    **dict.fromkeys(("roberta", "xlm-roberta"), _DENSE),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Dense:
    """name: of its tensors, in this directory within the model's. shape: outputs, inputs. norm: of
    the tensors of a LayerNorm after its activation; empty without one. tokens: ids, or texts of one
    token: its only row is the matrix's row of the first, less that of the second if there is one,
    and shape is the matrix's."""

    name: str
    shape: tuple[int, int]
    has_bias: bool = True
    activation: str = "identity"
    norm: str = ""
    norm_has_bias: bool = True
    eps: float = 1e-5
    directory: str = ""
    tokens: tuple[int | str, ...] = ()

    def shape_of(self, tensor: str) -> tuple[int, ...]:
        return self.shape if tensor == f"{self.name}.weight" else self.shape[:1]

    @property
    def tensors(self) -> Iterator[str]:
        for name, has_bias in ((self.name, self.has_bias), (self.norm, self.norm_has_bias)):
            if name:
                yield from (f"{name}.{kind}" for kind in ("weight", "bias")[: 1 + has_bias])


@dataclass(frozen=True, slots=True, kw_only=True)
class PooledHead:
    """layers: in their order. For the others see `ModelInfo`."""

    layers: tuple[Dense, ...]
    labels: tuple[str, ...] = ()
    problem_type: str | None = None
    pooling: Pooling | None = None

    @property
    def size(self) -> int:
        last = self.layers[-1]
        return 1 if last.tokens else last.shape[0]

    @property
    def num_bytes(self) -> int:
        """Of its matrices, in float32."""
        sizes = (1 if each.tokens else each.shape[0] for each in self.layers)
        return sum(4 * rows * each.shape[1] for rows, each in zip(sizes, self.layers, strict=True))


def read_pooled_head(
    fields: Fields, model_dir: Path, family: str, output: Dense
) -> PooledHead | None:
    """output: the model's own output layer. Raises InvalidModel."""
    modules, hidden = _modules(model_dir), output.shape[1]
    if tokens := _tokens(fields, model_dir, modules):
        layers = (replace(output, tokens=tokens),)
        return PooledHead(layers=layers, labels=("LABEL_0",), pooling=Pooling.LAST)
    if (fields.names("architectures") or [""])[0].endswith(CLASSIFIER):
        return _classifier(fields, family, hidden)
    dense = []
    for kind, path in modules:
        if kind == "Dense":
            dense.append(_dense(Fields.read(model_dir / path / "config.json"), path, hidden))
            hidden = dense[-1].shape[0]
    return PooledHead(layers=tuple(dense)) if dense else None


def _modules(model_dir: Path) -> list[tuple[str, str]]:
    """The class of each of sentence-transformers' modules, and its directory within the model's."""
    path = model_dir / "modules.json"
    modules, found = read_json(path) or [], []
    if not isinstance(modules, list) or not all(isinstance(each, dict) for each in modules):
        raise InvalidModel(f"{path} must hold a JSON list of objects")
    for module in modules:
        kind, directory = module.get("type"), module.get("path", "")
        if not isinstance(directory, str) or Path(directory).is_absolute() or ".." in directory:
            raise InvalidModel(f"{path}: 'path' must be a directory within the model's")
        found.append((str(kind).rpartition(".")[2], directory))
    return found


def _tokens(
    fields: Fields, model_dir: Path, modules: list[tuple[str, str]]
) -> tuple[int | str, ...]:
    """See `Dense`: by sentence-transformers' module, by vLLM's keys, or by the model's name, since
    Qwen3-Reranker's config.json is that of a model that generates. Empty for any other model."""
    for kind, path in modules:
        if kind in ("LogitScore", "CausalScoreHead"):  # the newer name and the older one
            config = Fields.read(model_dir / path / "config.json")
            names = ("true_token_id", "false_token_id")
            return tuple(
                config.count(each, least=0) for each in names if config.get(each) is not None
            )
    tokens = fields.names("classifier_from_token")
    is_pair = fields.flag("is_original_qwen3_reranker")
    is_pair |= tokens is not None and fields.text("method") == "from_2_way_softmax"
    if tokens is None and fields.names("architectures") == ["Qwen3ForCausalLM"]:
        named = model_dir.absolute()
        name = named.parents[1].name if named.parent.name == "snapshots" else named.name
        if "reranker" in name.lower():
            tokens, is_pair = ["no", "yes"], True
    if tokens is not None and len(tokens) != 1 + is_pair:
        wanted = (
            "one token, or with is_original_qwen3_reranker two: of a low score and of a high one"
        )
        raise fields.wrong("classifier_from_token", wanted, tokens)
    return tuple(reversed(tokens or ()))


def _classifier(fields: Fields, family: str, hidden: int) -> PooledHead:
    problem_type, pooling = fields.text("problem_type"), Pooling.FIRST
    if problem_type not in (*_PROBLEMS, None):
        raise fields.wrong("problem_type", " or ".join(_PROBLEMS), problem_type)
    layers: tuple[Dense, ...]
    labels = _labels(fields)
    square, shape = (hidden, hidden), (len(labels), hidden)
    if family in _CLASSIFIERS:
        first, last = _CLASSIFIERS[family]
        layers = (
            Dense(name=first, shape=square, activation="tanh"),
            Dense(name=last, shape=shape),
        )
    elif family == "modernbert":
        if fields.text("classifier_pooling") not in ("cls", "mean", None):
            given = fields.get("classifier_pooling")
            raise fields.wrong("classifier_pooling", "cls or mean", given)
        pooling = Pooling(fields.get("classifier_pooling") or "cls")
        layers = (_modern(fields, square), Dense(name="classifier", shape=shape))
    else:
        layers, pooling = (Dense(name="score", shape=shape, has_bias=False),), Pooling.LAST
    return PooledHead(layers=layers, labels=labels, problem_type=problem_type, pooling=pooling)


def _modern(fields: Fields, shape: tuple[int, int]) -> Dense:
    return Dense(
        name="head.dense",
        shape=shape,
        has_bias=fields.flag("classifier_bias"),
        activation=_activation(fields, "classifier_activation", "gelu"),
        norm="head.norm",
        norm_has_bias=fields.flag("norm_bias"),
        eps=fields.number("norm_eps", 1e-5),
    )


def _labels(fields: Fields) -> tuple[str, ...]:
    """transformers leaves out what it would make up: LABEL_0 and LABEL_1."""
    names = fields.mapping("id2label")
    if not names:
        num = fields.count("num_labels", default=2, most=MAX_WIDTH)
        return tuple(f"LABEL_{index}" for index in range(num))
    if set(names) != set(map(str, range(len(names)))):
        raise fields.wrong("id2label", f"an object with 0 to {len(names) - 1}", names)
    return tuple(str(names[str(index)]) for index in range(len(names)))


def _dense(config: Fields, directory: str, num_inputs: int) -> Dense:
    """config: of one of sentence-transformers' Dense modules."""
    if (given := config.count("in_features")) != num_inputs:
        raise config.wrong("in_features", f"{num_inputs}, as many as it is given", given)
    if (name := config.text("module_input_name")) not in ("sentence_embedding", None):
        raise config.wrong("module_input_name", "sentence_embedding", name)
    return Dense(
        name="linear",
        shape=(config.count("out_features", most=MAX_WIDTH), num_inputs),
        has_bias=config.flag("bias", default=True),
        activation=_activation(config, "activation_function", "tanh"),
        directory=directory,
    )


def _activation(fields: Fields, key: str, default: str) -> str:
    """As transformers names it, or torch's class of it."""
    given = fields.text(key) or default
    name = given.rpartition(".")[2].lower()
    if name not in ACTIVATIONS:
        raise fields.wrong(key, " or ".join(ACTIVATIONS), given)
    return name
