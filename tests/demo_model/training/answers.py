"""A model's own answers, drawn as the server draws them, and how often a draft would have said so.

A draft of the next token is accepted where it is the token that the model draws anyway, by one
random number of the answer's seed and the token's place. So it is best drawn by the same number.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from penstock.engine.config import EngineConfig, SpeculativeConfig
from penstock.engine.sampling.sampler import Sampler
from penstock.scheduler.config import SchedulerConfig
from penstock.scheduler.types import SamplingParams
from tests.support.scheduling import make_request
from tests.support.stepping import SteppedEngine, ids_of

_AT_ONCE = 16
_KV_BYTES = 1 << 28
_CPU = torch.device("cpu")


@dataclass(frozen=True, slots=True)
class Answer:
    prompt_ids: list[int]
    token_ids: list[int]
    sampling: SamplingParams


@dataclass(frozen=True, slots=True)
class Agreement:
    """Of a draft with answers.

    share: of the tokens, so many are what the draft draws by the same number. likeliest: so many
    are what the draft takes for the likeliest. tokens_per_step: of the steps after the first, where
    each verifies the same number of drafts that were drawn by the same number.
    """

    share: float
    likeliest: float
    tokens_per_step: float
    num_tokens: int


def own_answers(model: Path, prompts: list[list[int]], sampling: SamplingParams) -> list[Answer]:
    """One answer to each prompt, each with a seed of its own."""
    scheduler = SchedulerConfig(max_num_seqs=_AT_ONCE, max_num_batched_tokens=512)
    config = EngineConfig(
        model=str(model),
        num_threads=torch.get_num_threads(),
        kv_cache_memory_bytes=_KV_BYTES,
        speculative=SpeculativeConfig(num_speculative_tokens=0),
        scheduler=scheduler,
    )
    engine = SteppedEngine(config)
    longest = engine.executor.info.max_model_len
    requests = [
        replace(
            make_request(str(seed), prompt),
            sampling=replace(
                sampling, seed=seed, max_tokens=min(sampling.max_tokens, longest - len(prompt))
            ),
        )
        for seed, prompt in enumerate(prompts)
    ]
    return [
        Answer(list(request.prompt_token_ids), ids_of(outputs), request.sampling)
        for request, outputs in zip(requests, engine.run(requests), strict=True)
    ]


def drawn_by(draft: Callable[[Tensor], Tensor], answer: Answer) -> tuple[Tensor, Tensor]:
    """What the draft draws, and takes for the likeliest, in the place of each token: (T,) each.
    draft: token ids (1, length) to logits (1, length, vocab)."""
    start, ids = len(answer.prompt_ids), torch.tensor(answer.prompt_ids + answer.token_ids)
    with torch.inference_mode():
        logits = draft(ids[None, :-1])[0, start - 1 :].float()
    sampler = Sampler(1, logits.shape[1], _CPU)
    sampler.assign(0, answer.sampling, answer.sampling.seed)
    places, count = list(range(start, len(ids))), len(answer.token_ids)
    drawn = sampler.sample_ids(logits, [0] * count, places, ids[None], [start] * count)
    return drawn, logits.argmax(-1)


def agreement(
    draft: Callable[[Tensor], Tensor], answers: Iterable[Answer], num_drafts: int
) -> Agreement:
    num_tokens = num_equal = num_likeliest = num_later = num_steps = 0
    for answer in answers:
        drawn, likeliest = drawn_by(draft, answer)
        said = torch.tensor(answer.token_ids)
        is_equal = (drawn == said).tolist()
        num_tokens += len(is_equal)
        num_equal += sum(is_equal)
        num_likeliest += int((likeliest == said).sum())
        num_later += len(is_equal) - 1
        num_steps += _num_steps(is_equal, num_drafts)
    return Agreement(
        share=num_equal / num_tokens,
        likeliest=num_likeliest / num_tokens,
        tokens_per_step=num_later / num_steps,
        num_tokens=num_tokens,
    )


def _num_steps(is_equal: list[bool], num_drafts: int) -> int:
    """Each gives one token more than it accepts. The first token comes of the prompt's step."""
    num_steps, place = 0, 1
    while place < len(is_equal):
        drafts = is_equal[place : place + num_drafts]
        place += 1 + (drafts.index(False) if False in drafts else len(drafts))
        num_steps += 1
    return num_steps
