"""Errors that callers may cause. Each message is a sentence for the person who caused it."""


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


class InvalidConfig(PenstockError):
    """A setting, or a pair of settings, that cannot work. The message names the flag to change."""
