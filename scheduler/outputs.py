"""`RequestOutput`s, made of a sequence and what a step gave it."""

from penstock.scheduler.sequence import Sequence
from penstock.scheduler.types import (
    AcceptedDraft,
    Finish,
    PromptOutput,
    RequestOutput,
    TokenLogprobs,
)


def output_of(
    sequence: Sequence,
    token_ids: list[int],
    logprobs: list[TokenLogprobs] | None,
    finish: Finish | None,
) -> RequestOutput:
    return RequestOutput(
        sequence.request.id,
        sequence.index,
        token_ids,
        logprobs,
        finish,
        sequence.num_cached_tokens,
    )


def output_of_drafts(sequence: Sequence, accepted: list[AcceptedDraft]) -> RequestOutput:
    logprobs = [draft.logprobs for draft in accepted if draft.logprobs is not None]
    return output_of(sequence, [draft.token_id for draft in accepted], logprobs or None, None)


def with_prompts(
    outputs: list[RequestOutput],
    sequences: list[Sequence],
    prompts: tuple[PromptOutput | None, ...],
) -> list[RequestOutput]:
    """The outputs, with those of the prompts added where they were requested, once."""
    prompt_of = {}
    for sequence, prompt in zip(sequences, prompts, strict=True):
        sequence.prompt_request = None
        prompt_of[sequence.request.id] = prompt
    return [
        output._replace(prompt=prompt_of.get(output.request_id)) if output.index == 0 else output
        for output in outputs
    ]
