"""`python -m tests.support.quality MODEL_DIR`: what a KV cache in 8 bits costs, by its logits.

Prints the mean and the 99th percentile of the KL divergence from the logits with a cache in
float32, and how often the likeliest token is the same, over each token of a text: README.md of
this repository, or the model's own golden stories. Computed in float32 by torch.
"""

import json
import sys
from pathlib import Path
from typing import NamedTuple

import torch
from tokenizers import Tokenizer
from torch import Tensor

from penstock.engine.memory.pool.kv_codes import LIMITS
from tests.support.paths import ROOT
from tests.support.tiny_models import Harness

_NUM_TOKENS = 384


class Divergence(NamedTuple):
    """Of one list of distributions from another. same_top: a share."""

    mean: float
    percentile_99: float
    same_top: float


def text_ids(model_dir: Path, num_tokens: int = _NUM_TOKENS) -> list[int]:
    """The first tokens of a text that the model was trained on, or of README.md."""
    golden = model_dir / "golden.json"
    if golden.exists():
        stories = json.loads(golden.read_text(encoding="utf-8"))
        ids = [each for story in stories for each in (*story["prompt_ids"], *story["new_ids"])]
    else:
        text = (ROOT / "README.md").read_text(encoding="utf-8")
        ids = Tokenizer.from_file(str(model_dir / "tokenizer.json")).encode(text).ids
    return ids[:num_tokens]


def logits_of(model_dir: Path, kv_dtype: torch.dtype, ids: list[int]) -> Tensor:
    """After each token of one sequence, which is computed in chunks: (T, vocab_size)."""
    chunk = 64
    harness = Harness(
        model_dir,
        num_sequences=1,
        max_len=-(-len(ids) // 16) * 16,
        block_size=16,
        kv_dtype=kv_dtype,
    )
    harness.token_table[0, : len(ids)] = torch.tensor(ids)
    starts = range(0, len(ids), chunk)
    return torch.cat(
        [harness.run([(0, start, min(chunk, len(ids) - start))])[0] for start in starts]
    )


def divergence(expected: Tensor, found: Tensor) -> Divergence:
    """Of the distributions by their logits, (T, vocab_size)."""
    log_p, log_q = expected.double().log_softmax(-1), found.double().log_softmax(-1)
    kl = (log_p.exp() * (log_p - log_q)).sum(-1)
    same = (expected.argmax(-1) == found.argmax(-1)).double()
    return Divergence(float(kl.mean()), float(kl.quantile(0.99)), float(same.mean()))


def main(model_dir: Path) -> None:
    ids = text_ids(model_dir)
    plain = logits_of(model_dir, torch.float32, ids)
    for dtype in LIMITS:
        found = divergence(plain, logits_of(model_dir, dtype, ids))
        print(
            f"{str(dtype).removeprefix('torch.'):<14} {len(ids)} tokens: mean KL {found.mean:.1e}, "
            f"99 % {found.percentile_99:.1e}, same likeliest token {found.same_top:.1%}"
        )


if __name__ == "__main__":
    main(Path(sys.argv[1]))
