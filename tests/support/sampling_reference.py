"""Slow, simple filters and penalties: the reference that both samplers are tested against."""

import math

from torch import Tensor

from penstock.scheduler.types import SamplingParams


def survivors(logits: Tensor, sampling: SamplingParams) -> set[int]:
    """Sorts, walks down, and includes ties with the last id that is kept."""
    x = logits.double() / sampling.temperature
    kept = set(range(len(x)))
    if sampling.min_p > 0:
        kept = {i for i in kept if x[i] >= x.max() + math.log(sampling.min_p)}
    if 0 < sampling.top_k < len(x):
        last = sorted(x.tolist(), reverse=True)[sampling.top_k - 1]
        kept = {i for i in kept if x[i] >= last}
    weights = {i: math.exp(float(x[i] - x.max())) for i in kept}
    mass, total = 0.0, sum(weights.values())
    for weight in sorted(weights.values(), reverse=True):
        mass += weight
        if mass >= sampling.top_p * total:
            return {i for i in kept if weights[i] >= weight}
    return kept


def penalised(
    logits: list[float], tokens: list[int], prompt: int, sampling: SamplingParams
) -> list[float]:
    """As OpenAI and the CTRL paper define them, one token at a time."""
    result = list(logits)
    for token in set(tokens):
        factor = sampling.repetition_penalty
        result[token] = result[token] / factor if result[token] > 0 else result[token] * factor
        count = tokens[prompt:].count(token)
        result[token] -= count * sampling.frequency_penalty
        result[token] -= sampling.presence_penalty if count else 0.0
    return result


def adjusted(
    logits: list[float], tokens: list[int], prompt: int, sampling: SamplingParams
) -> list[float]:
    """Bias, then penalties, then what may not come next; each as the API documents it."""
    size = len(logits)
    biased = list(logits)
    for token, bias in sampling.logit_bias:
        if token < size:
            biased[token] += bias
    result = penalised(biased, tokens, prompt, sampling)
    banned = {word[0] for word in sampling.bad_words if len(word) == 1}
    if sampling.allowed_token_ids:
        banned |= set(range(size)) - set(sampling.allowed_token_ids)
    if len(tokens) - prompt < sampling.min_tokens:
        banned |= set(sampling.stop_token_ids)
    return [-math.inf if token in banned else x for token, x in enumerate(result)]
