"""`python -m tests.formats.activations`: what rounding activations costs beside weights in codes.

Prints the table of docs/quantized.md: of each format, the mean KL divergence, per token, of the
compiled CPU step from torch in float32 with the values that the codes stand for, and how often the
likeliest token is the same. Last, a plain model of the same values in bfloat16. The models are
trained ones, and the texts those of `tests.formats.quality`.
"""

import sys
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from penstock.engine.models.formats.kept import AsStored
from penstock.engine.native.packing import FORMATS as NATIVE_FORMATS
from tests.formats.quality import STORY_ROWS, harness_of, held_out_text, logits_of, own_stories
from tests.support.paths import DEMO_MODEL, STORIES
from tests.support.quality import divergence
from tests.support.quantized_checkpoints import FORMATS, Pack, awq, gptq, save_quantized
from tests.support.tiny_models import save

_DTYPES = (torch.float32, torch.float16, torch.bfloat16)
# MLPs are filled up with zeros to a multiple of this, so that groups fit them.
_MULTIPLE = 64


def packs(group: int) -> dict[str, Pack]:
    """By the names of formats, with groups of so many columns where they have groups."""
    return {
        "gptq4": gptq(4, group),
        "gptq8": gptq(8, group),
        "gptq-act-order": gptq(4, group, order_seed=1),
        "gptq-asym": gptq(4, group, symmetric=False),
        "awq": awq(group),
        "ct-w8a8": FORMATS["ct-w8a8"].pack,
        "fp8-block": FORMATS["fp8-block"].pack,
    }


def filled_up(directory: Path) -> Any:
    """Transformers' model, whose MLPs have more columns, which change nothing."""
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    size = model.config.intermediate_size
    missing = -size % _MULTIPLE
    for layer in model.model.layers:
        for linear in (layer.mlp.gate_proj, layer.mlp.up_proj):
            linear.weight.data = torch.nn.functional.pad(linear.weight.data, (0, 0, 0, missing))
        down = layer.mlp.down_proj
        down.weight.data = torch.nn.functional.pad(down.weight.data, (0, missing))
    model.config.intermediate_size = size + missing
    return model


def figures(expected: Tensor, found: Tensor) -> str:
    of = divergence(expected, found)
    return f"{of.mean:.1e} ({of.same_top:.1%})"


def row(source: Path, name: str, group: int, text: Tensor, directory: Path) -> str:
    quantized = replace(FORMATS[name], pack=packs(group)[name])
    if "group_size" in quantized.settings:
        quantized = replace(quantized, settings=quantized.settings | {"group_size": group})
    model = save_quantized(filled_up(source), directory / name, quantized)
    plain = save(model, directory / f"{name}-plain")
    expected = logits_of(harness_of(plain), text)
    options: dict[str, Any] = {"native": True, "has_codes": True, "kept": AsStored(NATIVE_FORMATS)}
    by_dtype = [
        figures(expected, logits_of(harness_of(directory / name, dtype=dtype, **options), text))
        for dtype in _DTYPES
    ]
    rounded = logits_of(harness_of(plain, dtype=torch.bfloat16, native=True), text)
    return " | ".join([quantized.name, *by_dtype, figures(expected, rounded)])


def main() -> None:
    print("| model, text, groups | codes | `float32` | `float16` | `bfloat16` | plain `bfloat16` |")
    print("| --- | --- | ---: | ---: | ---: | ---: |")
    for title, model, group in (("stories260K", STORIES, 64), ("penstock-demo", DEMO_MODEL, 128)):
        if not model.exists():
            continue
        text = (
            own_stories(harness_of(model, STORY_ROWS[0])) if model == STORIES else held_out_text()
        )
        what = f"{title}, {text.numel():,} tokens, groups of {group}"
        with TemporaryDirectory() as directory:
            for name in packs(group):
                print(f"| {what} | {row(model, name, group, text, Path(directory))} |")
                sys.stdout.flush()


if __name__ == "__main__":
    with torch.inference_mode():
        main()
