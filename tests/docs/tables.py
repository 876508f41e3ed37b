"""The tables of docs/ that are made from the code, so that they cannot be wrong.

    python -m tests.docs.tables flags          prints the table of docs/flags.md
    python -m tests.docs.tables --write        writes each table into its page, between its marks

A test fails if a page has another text than this.
"""

import argparse
import re
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import torch
from prometheus_client.core import Metric

from penstock.engine.models.config import ModelConfig
from penstock.engine.models.formats.scheme import Scheme
from penstock.scheduler.errors import PenstockError
from penstock.scheduler.stats import DraftStats, GroupBlocks, PlaceStats, TierStats
from tests.support.paths import ROOT

DOCS = ROOT / "docs"
_DEFAULT = re.compile(r"^(?P<what>.*?)\s*\((?P<default>default: .*)\)$", re.DOTALL)


class BadMarks(PenstockError):
    """A page does not say where its table goes."""


def flags() -> str:
    """All flags of `penstock serve`, a table for each group of its help."""
    from penstock.server.flags.serve_flags import add_serve_flags

    parser = argparse.ArgumentParser()
    add_serve_flags(parser)
    tables = []
    # Private, but argparse has no other way to tell which flag is in which group.
    for group in parser._action_groups:
        actions = [action for action in group._group_actions if action.dest != "help"]
        if actions and any(action.option_strings for action in actions):
            rows = [_flag_row(action) for action in actions]
            tables.append(f"**{group.title}**\n\n" + _table(("flag", "default", "what"), rows))
    return "\n".join(tables)


def _flag_row(action: argparse.Action) -> tuple[str, str, str]:
    what, default = split_default(action)
    return f"`{_usage(action)}`", default, what


def _usage(action: argparse.Action) -> str:
    """As it is typed."""
    names = " ".join(action.option_strings)
    if isinstance(action, argparse.BooleanOptionalAction):
        return names.replace(" --no-", ", --no-")
    if action.nargs == 0:
        return names
    values = "|".join(map(str, action.choices)) if action.choices else str(action.metavar or "N")
    return f"{names} {values}" + (" ..." if action.nargs == "+" else "")


def split_default(action: argparse.Action) -> tuple[str, str]:
    """A flag's help without its last words, and the default that these tell.

    Raises ValueError for a help that does not tell it.
    """
    help_text = (action.help or "") % {"default": action.default, "prog": "penstock serve"}
    found = _DEFAULT.match(help_text)
    if not found:
        raise ValueError(
            f"the help of {action.option_strings[-1]} must end with '(default: ...)': {help_text!r}"
        )
    return found["what"], found["default"].removeprefix("default: ")


def _table(header: tuple[str, ...], rows: Sequence[tuple[str, ...]]) -> str:
    lines = (header, ("---",) * len(header), *rows)
    return "".join(f"| {' | '.join(map(_cell, line))} |\n" for line in lines)


def _cell(words: str) -> str:
    return " ".join(words.split()).replace("|", "\\|")


def metrics() -> str:
    """All series of /metrics that are ours, as they are once a model is loaded."""
    rows = [_metric_row(family) for family in families()]
    return _table(("metric", "kind", "labels", "what"), rows)


def families() -> list[Metric]:
    """Those of a server that knows its device's peaks, whose policy is fair, with LoRA, with a
    directory for blocks, and with stages."""
    from penstock.server.observability.families import adapter_metrics, gpu_way_metrics
    from penstock.server.observability.metrics import Metrics
    from tests.support.known_hardware import on_known_hardware

    recorded = Metrics()
    recorded.on_response("/v1/completions", "POST", 200)
    recorded.on_ready(replace(on_known_hardware(), pipeline_parallel_size=2))
    # Under the fair policy there is one more, of a model with windows another, of one with
    # recurrent states others, with a tier others, and with drafts others.
    windowed, recurrent = GroupBlocks(1024), GroupBlocks(is_recurrent=True)
    recorded._stats = recorded.stats._replace(
        fairness_index=1.0,
        groups=(GroupBlocks(), windowed, recurrent),
        tier=TierStats(PlaceStats(), PlaceStats()),
        drafts=(DraftStats("ngram", accepted=(0,), reached=(0,)),),
    )
    adapters = adapter_metrics(1, {"a"}, set(), {"a": 1})
    return [*recorded.families(), *adapters, *gpu_way_metrics("pdl", ())]


def _metric_row(family: Metric) -> tuple[str, ...]:
    ending = {"counter": "_total", "info": "_info"}.get(family.type, "")
    labels = dict.fromkeys(label for sample in family.samples for label in sample.labels)
    shown = ", ".join(f"`{label}`" for label in labels if label != "le")
    return f"`{family.name}{ending}`", family.type, shown, family.documentation


def sizing() -> str:
    """How many sequences fit, of two models on two devices."""
    from penstock.engine.models.config import ModelConfig
    from penstock.engine.sizing.sizing import CONTEXTS, DEVICES, GB, Machine, Sizing, table

    models = ROOT / "configs" / "models"
    names = [name for name in ("Llama-3.1-8B", "Qwen3-8B") for _ in DEVICES]
    machines = [Machine(name=device, memory_bytes=gb * GB) for device, gb in DEVICES]
    sizings = [
        Sizing(ModelConfig.from_dir(models / name), machine)
        for name in dict.fromkeys(names)
        for machine in machines
    ]
    return table(sizings, names, CONTEXTS)


def quantized() -> str:
    """The quantized formats that the tests load, and as what each device holds them."""
    from torch import device

    from penstock.engine.files.gguf.header import TENSOR_TYPES
    from penstock.engine.models.formats.gguf import blocks
    from penstock.engine.models.formats.kept import AsStored, CodePolicy, OnGpu
    from penstock.engine.native.packing import FORMATS as NATIVE_FORMATS
    from tests.support.quantized_checkpoints import FORMATS, scheme_of

    paths: list[CodePolicy] = [AsStored(NATIVE_FORMATS), OnGpu(device("meta"))]

    def held(scheme: Scheme, kept: CodePolicy) -> str:
        in_codes = kept.num_bytes(scheme, 4096, 4096) is not None
        return "in codes" if in_codes else "plain, in `--dtype`"

    rows = [
        (each.name, each.weight_format, *(held(scheme_of(each), kept) for kept in paths))
        for each in FORMATS.values()
    ]
    for kind in sorted(TENSOR_TYPES.values(), key=lambda kind: (kind.name[0] != "Q", kind.name)):
        if (stored := blocks.scheme(kind)) is not None:
            bits = kind.block_bytes * 8 / kind.block_size
            in_memory = stored.num_bytes(1, 4096) * 8 / 4096
            name = f"GGUF {kind.name}: {bits:.2f} bits a weight, here {in_memory:.2f}"
            rows.append((name, stored.weight_format, *(held(stored, kept) for kept in paths)))
    return _table(("checkpoint", "codes", "on a CPU", "on a GPU"), rows)


# What is published under each model_type.
_MODELS = {
    "llama": "Llama 2, 3, 3.1, 3.2, 3.3, and others of its architecture",
    "mistral": "Mistral 7B, Nemo, Small 3; Mistral Small 3.1 and 3.2 (text)",
    "qwen2": "Qwen2, Qwen2.5",
    "qwen3": "Qwen3",
    "qwen2_moe": "Qwen1.5-MoE-A2.7B, Qwen2-57B-A14B (mixtures of experts)",
    "qwen3_moe": "Qwen3-30B-A3B, Qwen3-235B-A22B, Qwen3-Coder (mixtures of experts)",
    "qwen3_5_text": "Qwen3.5, 3.6, 3.8, dense (text)",
    "qwen3_5_moe_text": "Qwen3.5, 3.6, 3.8, mixtures of experts (text)",
    "qwen3_vl_text": "Qwen3-VL, dense (text)",
    "qwen3_vl_moe_text": "Qwen3-VL-30B-A3B, 235B-A22B (text; mixtures of experts)",
    "gpt_oss": "gpt-oss-20b, gpt-oss-120b (mixtures of experts)",
    "phi3": "Phi-3, Phi-4, Phi-4-mini",
    "smollm3": "SmolLM3",
    "ministral3": "Ministral 3 (text)",
    "granite": "Granite 3, dense",
    "olmo2": "OLMo 2",
    "olmo3": "OLMo 3",
    "glm4_moe": "GLM-4.5, 4.5-Air, 4.6, 4.7 (mixtures of experts)",
    "seed_oss": "Seed-OSS",
    "cwm": "Code World Model",
    "exaone4": "EXAONE 4",
    "deepseek_v2": "DeepSeek V2, V2.5, V2-Lite (mixtures of experts)",
    "deepseek_v3": "DeepSeek V3, V3.1, R1; Kimi K2 (mixtures of experts)",
    "glm4_moe_lite": "GLM-4.7-Flash (mixture of experts)",
    "mistral4": "Mistral Small 4 (text; mixture of experts)",
    "youtu": "Youtu-LLM-2B",
    "gemma3_text": "Gemma 3 (text)",
    "gemma4_text": "Gemma 4 31B, 26B-A4B, E2B and E4B (text)",
    "gemma4_unified_text": "Gemma 4 12B (text)",
}


_ENCODERS = {
    "bert": "BERT: all-MiniLM, bge, e5, gte-base, snowflake-arctic-embed, ms-marco-MiniLM",
    "roberta": "RoBERTa: all-distilroberta, unixcoder",
    "xlm-roberta": "XLM-RoBERTa: bge-m3 (dense), multilingual-e5, snowflake-arctic-embed-l-v2, "
    "bge-reranker-v2-m3",
    "modernbert": "ModernBERT: gte-modernbert, nomic modernbert-embed, gte-reranker-modernbert",
    "nomic_bert": "Nomic: nomic-embed-text-v1.5",
    "gte": "GTE: gte-multilingual-base, gte-base-en-v1.5, gte-multilingual-reranker",
}


def tested_families() -> str:
    """Those that the tests compare with transformers, with what their tiny models have."""
    from gguf import MODEL_ARCH_NAMES

    from penstock.engine.models.families.families import FAMILIES, WRAPPERS
    from tests.support.family_formats import IN_CODES, PLAIN_EXPERTS
    from tests.support.gguf_files import ARCHITECTURES
    from tests.support.tiny_models import made_config, tiny_configs

    tested = tiny_configs()
    in_codes: dict[str, bool] = {}  # with their experts?
    for each in IN_CODES:
        kind = made_config(each).get_text_config().model_type
        in_codes[kind] = in_codes.get(kind, True) and each not in PLAIN_EXPERTS
    rows = []
    for name, family in FAMILIES.items():
        features = frozenset().union(*(config.features for config in tested[name]))
        wrappers = [each.architecture for each in WRAPPERS.values() if name in each.texts]
        classes = "<br>".join(f"`{each}`" for each in (family.architecture, *wrappers))
        named = ", ".join(f"`{feature}`" for feature in sorted(features))
        computed = (
            "yes" if all(computes(each) for each in tested[name]) else "no"
            for computes in (_is_compiled, _has_kernels)
        )
        in_gguf = f"`{MODEL_ARCH_NAMES[ARCHITECTURES[name]]}`" if name in ARCHITECTURES else ""
        codes = {True: "yes", False: "but experts", None: "no"}[in_codes.get(name)]
        rows.append((_MODELS[name], classes, named, *computed, codes, in_gguf))
    paths = ("compiled CPU step", "GPU kernels", "codes", "GGUF")
    titles = ("models", "architecture", "flags", *paths)
    return _table(titles, rows)


def encoders() -> str:
    """Those of text that the tests compare with transformers."""
    from tests.support.encoder_models import ENCODERS, save_encoder

    rows = []
    for name in ENCODERS:
        with tempfile.TemporaryDirectory() as directory:
            save_encoder(name, Path(directory))
            config = ModelConfig.from_dir(Path(directory))
        named = ", ".join(f"`{feature}`" for feature in sorted(config.features))
        is_compiled = "yes" if _is_compiled(config) else "no"
        rows.append((_ENCODERS[name], f"`{name}`", named, is_compiled))
    return _table(("models", "model_type", "flags", "compiled CPU step"), rows)


def _is_compiled(config: ModelConfig) -> bool:
    """Whether the compiled CPU step computes it."""
    from penstock.engine.models.errors import UnsupportedFeature
    from penstock.engine.native.features import check_features

    try:
        check_features(config, torch.float32)
    except UnsupportedFeature:
        return False
    return True


def _has_kernels(config: ModelConfig) -> bool:
    """Whether the GPU's kernels compute it."""
    from penstock.engine.models.decoder.fused import check_parts
    from penstock.engine.models.errors import UnsupportedFeature

    try:
        check_parts(config)
    except UnsupportedFeature:
        return False
    return True


def fallback() -> str:
    """The classes of transformers that the tests call over the paged KV cache."""
    from penstock.engine.models.families.families import FAMILIES
    from tests.support.other_decoders import OTHER_DECODERS, architecture_of

    rows = [
        (models, f"`{architecture_of(name)}`")
        for name, (models, *_) in OTHER_DECODERS.items()
        if name not in FAMILIES  # which have a row of their own by now
    ]
    return _table(("models", "class"), rows)


# Each is written into docs/NAME.md.
TABLES: dict[str, Callable[[], str]] = {
    "encoders": encoders,
    "fallback": fallback,
    "families": tested_families,
    "flags": flags,
    "metrics": metrics,
    "quantized": quantized,
    "sizing": sizing,
}


def page_of(name: str) -> Path:
    """The page that has this table."""
    return DOCS / f"{name}.md"


def with_table(name: str, text: str) -> str:
    """The page's text, with what is between the table's marks made anew.

    Raises BadMarks unless both marks are there exactly once, the beginning first.
    """
    begin, end = marks(name)
    if text.count(begin) != 1 or text.count(end) != 1 or text.index(end) < text.index(begin):
        raise BadMarks(f"write the lines {begin} and {end} once each, in this order")
    before, _, rest = text.partition(begin)
    return f"{before}{begin}\n\n{TABLES[name]()}\n{end}{rest.partition(end)[2]}"


def marks(name: str) -> tuple[str, str]:
    """Comments of markdown, which a reader of the page does not see."""
    return f"<!-- {name}: made by `make docs` -->", f"<!-- {name}: end -->"


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tests.docs.tables", description="The tables of docs/ made from the code."
    )
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("table", nargs="?", choices=TABLES, help="print this one")
    what.add_argument("--write", action="store_true", help="write each of them into its page")
    options = parser.parse_args(argv)
    if not options.write:
        print(TABLES[options.table](), end="")
        return 0
    for name in TABLES:
        page = page_of(name)
        try:
            page.write_text(with_table(name, page.read_text(encoding="utf-8")), encoding="utf-8")
        except (OSError, BadMarks) as error:
            print(f"docs/{page.name}: {error}", file=sys.stderr)
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
