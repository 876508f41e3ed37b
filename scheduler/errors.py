"""Errors that callers may cause. Each message is a sentence for the person who caused it."""

import math


class PenstockError(Exception):
    """The base of every error that a client or an operator can cause and correct."""


class PromptTooLong(PenstockError):
    """The prompt leaves no room for one output token; or, with max_tokens 0, it does not fit."""

    def __init__(self, num_tokens: int, limit: int, *, has_answer: bool = True) -> None:
        answer = ", of which at least one must be left for the answer" if has_answer else ""
        super().__init__(
            f"the prompt has {num_tokens} tokens, and this model's maximum context length is "
            f"{limit} tokens{answer}; shorten the prompt"
        )


class ContextTooLong(PenstockError):
    """The prompt fits, but not together with max_tokens."""

    def __init__(self, num_tokens: int, max_tokens: int, limit: int) -> None:
        super().__init__(
            f"the prompt has {num_tokens} tokens and max_tokens is {max_tokens}, "
            f"{num_tokens + max_tokens} together, but this model's maximum context length is "
            f"{limit} tokens; shorten the prompt or lower max_tokens"
        )


class DuplicateRequest(PenstockError):
    """A request id that is already in use."""

    def __init__(self, request_id: str) -> None:
        super().__init__(
            f"a request with the id {request_id!r} is already running; ids must differ"
        )


class TargetOutOfReach(PenstockError):
    """The first token would come later than the request, or the server, allows."""

    def __init__(self, predicted_s: float, target_s: float) -> None:
        self.predicted_s, self.target_s = predicted_s, target_s
        self.retry_after_s = predicted_s - target_s
        super().__init__(
            f"the first token is expected after {predicted_s:.2f} s, and the target is "
            f"{target_s:g} s; try again in {math.ceil(self.retry_after_s)} s"
        )


class NoEncoder(PenstockError):
    """A prompt with images, for a model without an encoder or on a path that does not run one."""

    def __init__(self) -> None:
        super().__init__("this server computes no images for its model; send text alone")


class ImageTooLarge(PenstockError):
    """An image whose tokens must be computed in one step, and are too many for it."""

    def __init__(self, num_tokens: int, most: int) -> None:
        super().__init__(
            f"an image has {num_tokens} tokens, which are computed in one step, and a step has "
            f"room for {most}; raise --max-num-batched-tokens or send a smaller image"
        )


class InvalidConfig(PenstockError):
    """A setting, or a pair of settings, that cannot work. The message names the flag to change."""
