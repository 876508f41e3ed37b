"""Greedy answers of a tiny model in a real executor, which chunks prompts, preempts, and reuses
prefixes."""

from pathlib import Path
from typing import Any

import torch

from penstock.engine.config import ModelImpl
from penstock.engine.loading.executor import build_executor
from penstock.engine.process.phases import Phases
from penstock.scheduler.config import SchedulerConfig
from penstock.scheduler.types import Request, RequestId, SamplingParams
from tests.support.stepping import SteppedEngine, ids_of
from tests.support.tiny_models import engine_config

NUM_TOKENS = 12
# Two tokens whose logits are as close as this may change places.
TIE = 1e-4
# Blocks of 8: fewer than the sequences need, so that some are preempted.
NUM_BLOCKS = 20
PROMPTS = (30, 47, 61)


def prompts() -> list[tuple[int, ...]]:
    """The first again at the end, and one that begins as the longest does."""
    generator = torch.Generator().manual_seed(5)
    made = [tuple(torch.randint(3, 96, (n,), generator=generator).tolist()) for n in PROMPTS]
    return [*made, made[0], (*made[2][:40], 7, 8, 9)]


def greedy_answers(path: Path, impl: ModelImpl, **changes: Any) -> list[list[int]]:
    """To `prompts`, all together, and then to the first again."""
    scheduler = SchedulerConfig(max_num_seqs=8, max_num_batched_tokens=24)
    config = engine_config(path, model_impl=impl, block_size=8, scheduler=scheduler, **changes)
    engine = SteppedEngine(config, build_executor(config, Phases()), NUM_BLOCKS)
    assert engine.executor.info.model_impl == (
        "penstock" if impl is ModelImpl.PENSTOCK else "transformers"
    )
    sampling = SamplingParams(max_tokens=NUM_TOKENS, temperature=0.0)
    requests = [
        Request(id=RequestId(str(i)), prompt_token_ids=ids, sampling=sampling, arrival_s=0.0)
        for i, ids in enumerate(prompts())
    ]
    outputs = [*engine.run(requests), *engine.run(requests[:1])]
    stats = engine.scheduler.stats()
    assert stats.preemptions_total > 0 and stats.prefix_hit_tokens_total > 0
    return [ids_of(each) for each in outputs]


def assert_greedy(model: Any, prompt: tuple[int, ...], answer: list[int]) -> None:
    """model: transformers' own."""
    assert len(answer) == NUM_TOKENS
    with torch.inference_mode():
        logits = model(torch.tensor([[*prompt, *answer]]), use_cache=False).logits[0]
    logits = logits[len(prompt) - 1 : -1]
    chosen = logits.gather(1, torch.tensor(answer)[:, None])[:, 0]
    assert (logits.amax(1) - chosen).max() < TIE
