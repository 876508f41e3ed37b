"""`Pipeline`: what a rank knows of the stages of a model, which may be a single one."""

import time
from dataclasses import dataclass, field

import torch
from torch import Tensor

from penstock.engine.ranks.group import Doing
from penstock.engine.ranks.link import Link


@dataclass(slots=True)
class PipelineStage:
    """One of the stages that compute a model one after the other."""

    stage: int = 0
    num_stages: int = 1
    doing: Doing = field(default_factory=Doing)

    @property
    def is_first(self) -> bool:
        return self.stage == 0

    @property
    def is_last(self) -> bool:
        return self.stage == self.num_stages - 1


@dataclass(slots=True)
class Pipeline(PipelineStage):
    """before, after: to the rank with the same part of the layers in the neighbouring stages; None
    in the first and in the last.

    A step is computed within `in_step`; computed_s is then the time that it took in this stage and
    in those before, without waiting for them.
    """

    before: Link | None = None
    after: Link | None = None
    computed_s: float = field(default=0.0, init=False)
    _step: int = field(default=0, init=False)
    _began_s: float = field(default=0.0, init=False)
    _waited_s: float = field(default=0.0, init=False)

    def in_step(self, step: int) -> "Pipeline":
        """Returns the context that a step is computed within. Every step enters it, also of one
        stage, so it is no generator, which takes ten times as long."""
        self._step, self._waited_s, self.computed_s = step, 0.0, 0.0
        return self

    def __enter__(self) -> None:
        self.doing.begin_step(self._step)
        self._began_s = time.perf_counter()

    def __exit__(self, error: object, *_: object) -> None:
        if error is None:
            self.doing.end_step()
            self.computed_s += self._own_s()

    def receive(self, num_tokens: int, hidden_size: int, dtype: torch.dtype) -> Tensor:
        """The states after the stage before: (num_tokens, hidden_size), which stay until `taken`.
        Raises RankFailed."""
        assert self.before is not None
        with self.doing.during(f"waiting for stage {self.stage - 1}"):
            states = self.before.receive(self._step, (num_tokens, hidden_size), dtype)
        self._waited_s += self.before.waited_s
        self.computed_s = self.before.computed_s
        return states

    def taken(self) -> None:
        """The states that were received have been read."""
        assert self.before is not None
        self.before.taken()

    def room(self, num_tokens: int, hidden_size: int, dtype: torch.dtype) -> Tensor:
        """Where this stage's states are to be written. Raises RankFailed."""
        assert self.after is not None
        with self.doing.during(f"waiting for stage {self.stage + 1}"):
            states = self.after.room((num_tokens, hidden_size), dtype)
        self._waited_s += self.after.waited_s
        return states

    def send(self) -> None:
        """Sends the states in `room`."""
        assert self.after is not None
        self.after.send(self._step, self.computed_s + self._own_s())

    def _own_s(self) -> float:
        return time.perf_counter() - self._began_s - self._waited_s
