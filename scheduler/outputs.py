"""`StepOutputs`: the `RequestOutput`s of a step."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Self

from penstock.scheduler.cache.sequence import Sequence
from penstock.scheduler.types import (
    Finish,
    PromptOutput,
    RequestId,
    RequestOutput,
    TokenLogprobs,
)


@dataclass(slots=True)
class StepOutputs:
    """The `RequestOutput`s of a step, in row order. Iterate over it to get them.

    Nearly all of them are one token and nothing else. Those are kept as columns, because an object
    for each takes as long as all else that is done with a step's token. others: by position in the
    columns, the outputs that are anything else; what the columns have in their place is void.
    """

    request_ids: list[RequestId] = field(default_factory=list)
    indices: list[int] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    num_cached_tokens: list[int] = field(default_factory=list)
    others: dict[int, RequestOutput] = field(default_factory=dict)

    @classmethod
    def of(cls, outputs: Iterable[RequestOutput]) -> Self:
        made = cls()
        for output in outputs:
            made.add(output)
        return made

    def add(self, output: RequestOutput) -> None:
        """One that is more, or less, than a token."""
        self.others[len(self.request_ids)] = output
        self.request_ids.append(output.request_id)
        self.indices.append(output.index)
        self.token_ids.append(0)
        self.num_cached_tokens.append(output.num_cached_tokens)

    def __len__(self) -> int:
        return len(self.request_ids)

    def __iter__(self) -> Iterator[RequestOutput]:
        new = tuple.__new__  # a NamedTuple's own constructor is a function of Python's
        columns = (self.request_ids, self.indices, self.token_ids, self.num_cached_tokens)
        outputs = [
            new(RequestOutput, (request_id, index, [token_id], None, None, num_cached, None))
            for request_id, index, token_id, num_cached in zip(*columns, strict=True)
        ]
        for at, output in self.others.items():
            outputs[at] = output
        return iter(outputs)

    @property
    def num_tokens(self) -> int:
        others = self.others.values()
        return len(self) - len(others) + sum(len(output.token_ids) for output in others)

    def add_prompts(
        self, sequences: list[Sequence], prompts: tuple[PromptOutput | None, ...]
    ) -> None:
        """Adds those of the prompts to the outputs, where they were requested, once."""
        prompt_of = {}
        for sequence, prompt in zip(sequences, prompts, strict=True):
            sequence.prompt_request = None
            prompt_of[sequence.request.id] = prompt
        for at, output in enumerate(self):
            if output.index == 0 and output.request_id in prompt_of:
                self.others[at] = output._replace(prompt=prompt_of[output.request_id])


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
