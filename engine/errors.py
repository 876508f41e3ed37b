"""The engine's errors. Each message is a sentence for the person who caused it."""

from penstock.scheduler.errors import PenstockError


class EngineFailed(PenstockError):
    """The engine process could not start, or ended; the message says why and what to change."""


class RequestRefused(PenstockError):
    """The engine did not accept the request; the message says why."""


class QueueFull(PenstockError):
    """More answers are waiting than --max-num-queued-reqs allows."""

    def __init__(self, num_queued: int, retry_after_s: int) -> None:
        super().__init__(
            f"{num_queued} requests are waiting already; try again in {retry_after_s} s"
        )
        self.retry_after_s = retry_after_s


class UnknownAdapter(PenstockError):
    """The executor has no such LoRA adapter."""

    def __init__(self, adapter: str) -> None:
        super().__init__(
            f"the model has no adapter {adapter!r}; send the request without an adapter"
        )


class BadGrammar(PenstockError):
    """A grammar, or this model's tokenizer, cannot be compiled; mostly in llguidance's words."""
