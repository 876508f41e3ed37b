"""The fused sampling kernels, on logits of a model's vocabulary.

A draw has no reference but the ids that may be drawn: `error` is the share of rows whose id the
filters exclude, and of greedy rows that are not the largest logit.
"""

from collections.abc import Iterator
from functools import partial

import torch
from torch import Tensor

from penstock.engine.kernels.sample.sampler import DeviceSampler
from penstock.scheduler.types import SamplingParams
from tests.bench.engine.case import Bench, Case, MakeCase, size_of
from tests.bench.engine.models import model_config

_MODEL = "Llama-3.1-8B"
_ROWS, _CHECKED_ROWS, _TINY_ROWS = (1, 32, 256), (1, 17), (3,)
_MODES = {
    "greedy": SamplingParams(max_tokens=1, temperature=0.0),
    "temperature": SamplingParams(max_tokens=1, temperature=0.8),
    "top-k 50, top-p 0.9": SamplingParams(max_tokens=1, temperature=0.8, top_k=50, top_p=0.9),
    "penalties": SamplingParams(max_tokens=1, temperature=0.0, presence_penalty=0.5),
}
_PROMPT = [1, 2, 3]


def sampling(bench: Bench) -> Iterator[MakeCase]:
    for mode in _MODES:
        for rows in bench.pick(_ROWS, _CHECKED_ROWS, _TINY_ROWS):
            yield partial(_case, bench, mode, rows)


def _case(bench: Bench, mode: str, rows: int) -> Case:
    vocab_size = model_config(_MODEL, bench.tiny).vocab_size
    sampler = DeviceSampler(rows, vocab_size, bench.device)
    params = _MODES[mode]
    for slot in range(rows):
        sampler.assign(slot, params, slot, _PROMPT, len(_PROMPT))
    sampler.flush()
    chosen = sampler.mode(list(range(rows)))
    slots = torch.arange(rows, dtype=torch.int32, device=bench.device)
    positions = torch.full_like(slots, len(_PROMPT))
    ids, logprobs = torch.full_like(slots, -1), bench.poisoned(rows, dtype=torch.float32)
    num_bytes = rows * vocab_size * bench.dtype.itemsize
    inputs = [bench.random(rows, vocab_size) for _ in range(bench.sets(num_bytes))]

    def error() -> float:
        ids.fill_(-1)
        sampler.sample(inputs[0], slots, positions, ids, logprobs, chosen)
        is_id = (ids >= 0) & (ids < vocab_size)
        allowed = _allowed(inputs[0].double(), params, ids.clamp(0, vocab_size - 1))
        return float((~(is_id & allowed)).double().mean())

    return Case(
        kernel="sample",
        at={"model": _MODEL, "rows": rows, "mode": mode},
        calls=[
            partial(sampler.sample, logits, slots, positions, ids, logprobs, chosen)
            for logits in inputs
        ],
        error=error,
        num_bytes=num_bytes + size_of(ids),
    )


def _allowed(logits: Tensor, params: SamplingParams, ids: Tensor) -> Tensor:
    """(rows,) bool: whether the row's id is one that its filters keep. None of `_PROMPT` is
    in the output, so a presence penalty changes nothing yet."""
    own = logits.gather(1, ids.long()[:, None])
    rank = (logits > own).sum(1)
    if params.temperature == 0:
        return rank == 0
    if params.top_k == 0:
        return torch.ones_like(rank, dtype=torch.bool)
    best = (logits / params.temperature).topk(params.top_k, -1).values.softmax(-1)
    # Kept by top-p: those before which less than it has come, but for the rounding of sums.
    before = (best.cumsum(-1) - best).gather(1, rank.clamp(max=params.top_k - 1)[:, None])[:, 0]
    return (rank < params.top_k) & (before < params.top_p + 1e-4)
