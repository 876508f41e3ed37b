"""`python -m tests.formats.quality`: what rounding the weights of trained models costs, beside
llama.cpp's files of the same models.

Prints the table of docs/serving.md: of each method, the mean and the 99th percentile of the KL
divergence from the logits of the unrounded weights, and how often the likeliest token is the same.
All are computed by torch in float32, so that the weights alone count. The text of the demo model is
what its training text would go on with, that of stories260K what it writes itself.
"""

import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from tokenizers import Tokenizer
from torch import Tensor

from penstock.engine.config import Quantization
from penstock.engine.files.gguf.file import open_gguf
from penstock.engine.memory.host import Arena
from penstock.engine.models.at_load.plan import Plan, Scheme
from penstock.engine.models.at_load.quantize import Rounder
from penstock.engine.models.at_load.weights import QuantizedWeights
from penstock.engine.models.config import ModelConfig
from penstock.engine.models.formats.kept import AsStored
from penstock.engine.models.weights import Checkpoint
from penstock.engine.process.phases import Phases
from tests.demo_model.training.corpus import documents
from tests.demo_model.training.train import HELD_OUT_SEED_OFFSET, packed_rows
from tests.formats.llama_cpp import IS_INSTALLED, NOT_INSTALLED, write_gguf
from tests.support.paths import DEMO_MODEL, STORIES
from tests.support.quality import divergence
from tests.support.tiny_models import Harness

_BLOCK_SIZE = 16
_KINDS = ("Q8_0", "Q4_K_M")  # of llama.cpp
_DEMO_ROWS = (16, 2048)  # sequences, and tokens of each
STORY_ROWS = (32, 256)


def held_out_text() -> Tensor:
    """Of the demo model's corpus: (sequences, tokens)."""
    tokenizer = Tokenizer.from_file(str(DEMO_MODEL / "tokenizer.json"))
    count, length = _DEMO_ROWS
    rows = packed_rows(tokenizer, documents(HELD_OUT_SEED_OFFSET), count, length - 1)
    return rows.token_ids


def own_stories(harness: Harness) -> Tensor:
    """Drawn from the model itself: (sequences, tokens). It has a slot for each."""
    count, length = STORY_ROWS
    generator = torch.Generator().manual_seed(0)
    ids = torch.ones(count, length, dtype=torch.int64)  # the first is that of a beginning
    for place in range(length - 1):
        harness.token_table[:, place] = ids[:, place]
        logits = torch.cat(harness.run([(row, place, 1) for row in range(count)]))
        ids[:, place + 1] = torch.multinomial(logits.softmax(-1), 1, generator=generator)[:, 0]
    return ids


def logits_of(harness: Harness, text: Tensor) -> Tensor:
    """After each token of each sequence."""
    found = []
    for row in text:
        harness.token_table[0, : len(row)] = row
        found += harness.run([(0, 0, len(row))])
    return torch.cat(found)


def harness_of(model: Path, num_sequences: int = 1, **options: object) -> Harness:
    """Which computes by torch, in float32 and without codes, unless options say otherwise."""
    length = max(_DEMO_ROWS[1], STORY_ROWS[1]) if num_sequences == 1 else STORY_ROWS[1]
    length = min(length, ModelConfig.from_dir(model).max_model_len)
    defaults = {"max_len": length, "block_size": _BLOCK_SIZE, "kept": AsStored()}
    return Harness(model, num_sequences, **(defaults | options))


def rounded(model: Path) -> Iterator[tuple[str, float, Harness]]:
    """By each method of --quantization: its name, bits of a weight, and the model."""
    config = ModelConfig.from_dir(model)
    checkpoint = Checkpoint(model, partial(torch.empty, dtype=torch.float32))
    for method in Quantization:
        plan = Plan.of(Scheme(method, config), torch.float32)
        rounder = Rounder(checkpoint, plan, Arena().empty, Phases(), num_threads=1)
        weights = QuantizedWeights(checkpoint, plan.scheme.parts, rounder)
        yield f"`{method}`", plan.bits_per_weight, harness_of(model, weights=weights)


def of_llama_cpp(model: Path, folder: Path) -> Iterator[tuple[str, float, Harness]]:
    """The same of its files; without the embedding, unless that is the output layer too."""
    for kind in _KINDS:
        file = write_gguf(model, kind, folder)
        tensors = open_gguf(file).tensors
        if "output.weight" in tensors:
            tensors = {name: each for name, each in tensors.items() if "token_embd" not in name}
        matrices = [each for each in tensors.values() if len(each.shape) == 2]
        num_weights = sum(each.shape[0] * each.shape[1] for each in matrices)
        bits = 8 * sum(each.num_bytes for each in matrices) / num_weights
        yield f"llama.cpp's {kind}", bits, harness_of(file)


def main() -> None:
    lines = [
        "| model, text | weights | bits | mean KL divergence | 99th percentile | same top |",
        "| --- | --- | ---: | ---: | ---: | ---: |",
    ]
    for name, model in (("penstock-demo, held out", DEMO_MODEL), ("stories260K, its own", STORIES)):
        if not model.exists():
            continue
        is_demo = model == DEMO_MODEL
        text = held_out_text() if is_demo else own_stories(harness_of(model, STORY_ROWS[0]))
        expected = logits_of(harness_of(model), text)
        with TemporaryDirectory() as folder:
            methods = [rounded(model)]
            methods += [of_llama_cpp(model, Path(folder))] if IS_INSTALLED else []
            for weights, bits, harness in (each for made in methods for each in made):
                found = divergence(expected, logits_of(harness, text))
                figures = f"{found.mean:.1e} | {found.percentile_99:.1e} | {found.same_top:.2%}"
                what = f"{name}, {text.numel():,} tokens | {weights} | {bits:.2f}"
                lines.append(f"| {what} | {figures} |")
                print(lines[-1], file=sys.stderr, flush=True)
    print("\n".join(lines))
    if not IS_INSTALLED:
        print(f"\n{NOT_INSTALLED}", file=sys.stderr)


if __name__ == "__main__":
    with torch.inference_mode():
        main()
