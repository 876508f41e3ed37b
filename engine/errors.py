"""The engine's errors. Each message is a sentence for the person who caused it."""

from penstock.scheduler.errors import PenstockError


class EngineFailed(PenstockError):
    """The engine process could not start, or ended; the message says why and what to change."""


class RequestRefused(PenstockError):
    """The engine did not accept the request; the message says why."""


class RequestEndedEngine(EngineFailed):
    """The engine process ended twice with this request, the second time with no other."""

    def __init__(self, why: str) -> None:
        super().__init__(
            f"the engine ended while it ran this request, twice, so it is not run again: {why}"
        )


class QueueFull(PenstockError):
    """More answers are waiting than --max-num-queued-reqs allows."""

    def __init__(
        self, num_answers: int, *, num_open: int, max_open: int, retry_after_s: int
    ) -> None:
        super().__init__(
            f"{num_open} answers are running or waiting already, of at most {max_open}, and this "
            f"request needs {num_answers} more; try again in {retry_after_s} s"
        )
        self.retry_after_s = retry_after_s


class InvalidModel(PenstockError):
    """The model cannot be served. The message names the file or field, and what to change. brief:
    the reason in a few words, for a list of models."""

    def __init__(self, message: str, brief: str | None = None) -> None:
        super().__init__(message)
        self.brief = brief or message


def unreadable(path: object, error: OSError) -> InvalidModel:
    return InvalidModel(f"{path} cannot be read: {error.strerror or error}")


class UnknownAdapter(PenstockError):
    """The executor has no such LoRA adapter."""

    def __init__(self, adapter: str) -> None:
        super().__init__(
            f"the model has no adapter {adapter!r}; send the request without an adapter"
        )


class AdapterRefused(PenstockError):
    """A LoRA adapter cannot be loaded; the message says why, and what to change."""


class BadGrammar(PenstockError):
    """A grammar, or this model's tokenizer, cannot be compiled; mostly in llguidance's words."""
