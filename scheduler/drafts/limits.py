"""`DraftLimits`: which decodes of a step may have drafts, and how many, on a device whose kernels
verify them."""

from typing import NamedTuple

from penstock.scheduler.types import SamplingParams


class DraftLimits(NamedTuple):
    """num_tokens: of a step with drafts, with its decodes. per_row: drafts of a row."""

    num_tokens: int
    per_row: int

    def takes(self, sampling: SamplingParams) -> bool:
        """Whether each id is drawn from its logits alone, so that those after several drafts can be
        drawn at once: a grammar, penalties and the like are applied to one position of a row."""
        penalties = (
            sampling.repetition_penalty,
            sampling.presence_penalty,
            sampling.frequency_penalty,
        )
        biases = (
            sampling.grammar,
            sampling.logit_bias,
            sampling.bad_words,
            sampling.allowed_token_ids,
            sampling.min_tokens,
            sampling.dry,
            sampling.xtc,
        )
        return penalties == (1.0, 0.0, 0.0) and not any(biases)
