"""The ids that a request bans at a position: allowed_token_ids, min_tokens and bad_words.

What changes from step to step is computed on the device, so the host never waits.
"""

from bisect import bisect_right

import torch
from torch import Tensor

from penstock.engine.memory.host import to_device
from penstock.scheduler.types import SamplingParams

_ANY = -1  # pads a prefix, and matches every token


class TokenBans:
    """The bans of one request. Ids outside the vocabulary are ignored."""

    def __init__(self, sampling: SamplingParams, vocab_size: int, device: torch.device) -> None:
        def tensor(values: list[int]) -> Tensor:
            return to_device(values, torch.int64, device)

        allowed = [i for i in sampling.allowed_token_ids if i < vocab_size]
        stops = [i for i in sampling.stop_token_ids if i < vocab_size]
        words = [word for word in sampling.bad_words if all(i < vocab_size for i in word)]
        words.sort(key=len)
        self._outside = torch.ones(vocab_size, dtype=torch.bool, device=device)
        # `self._outside[...] = False` would wait for the device.
        self._outside.index_fill_(0, tensor(allowed), False)
        self._has_allowed = bool(allowed)
        self._stops, self._min_tokens = tensor(stops), sampling.min_tokens
        # A bad word is banned by its last token, after output that ends in the tokens before it.
        self._prefix_lengths = [len(word) - 1 for word in words]
        width = max(self._prefix_lengths, default=0)
        padded = [[_ANY] * (width + 1 - len(word)) + list(word[:-1]) for word in words]
        self._prefixes = tensor([i for row in padded for i in row]).view(len(words), width)
        self._last_ids = tensor([word[-1] for word in words])

    def apply(self, x: Tensor, tokens: Tensor, length: int, prompt_length: int) -> None:
        """In place: -inf for ids of x, (V,), that are banned after the first `length` tokens."""
        if self._has_allowed:
            x.masked_fill_(self._outside, -torch.inf)
        num_outputs = length - prompt_length
        if num_outputs < self._min_tokens:
            x.index_fill_(0, self._stops, -torch.inf)
        # The whole word must be in the output: longer words cannot match, prompts do not count.
        num_words = bisect_right(self._prefix_lengths, num_outputs)
        if num_words:
            width = self._prefix_lengths[num_words - 1]
            prefixes = self._prefixes[:num_words, self._prefixes.shape[1] - width :]
            matches = ((prefixes == tokens[length - width : length]) | (prefixes == _ANY)).all(1)
            x.index_add_(0, self._last_ids[:num_words], torch.where(matches, -torch.inf, 0.0))


def banned_by(sampling: SamplingParams) -> tuple[object, ...]:
    """The parameters that make its `TokenBans`."""
    return (
        sampling.allowed_token_ids,
        sampling.bad_words,
        sampling.stop_token_ids,
        sampling.min_tokens,
    )


def has_token_bans(sampling: SamplingParams) -> bool:
    has_min = sampling.min_tokens > 0 and bool(sampling.stop_token_ids)
    return has_min or bool(sampling.bad_words) or bool(sampling.allowed_token_ids)
