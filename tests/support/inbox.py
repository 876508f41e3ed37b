"""Commands for an `EngineLoop` without a process around it."""

from collections.abc import Iterable

from penstock.engine.step.messages import ToEngine


class ListInbox:
    """Commands posted by the test; remembers how long the loop was ready to wait."""

    def __init__(self) -> None:
        self.commands: list[ToEngine] = []
        self.patience: list[float | None] = []

    def receive(self, timeout_s: float | None) -> Iterable[ToEngine]:
        self.patience.append(timeout_s)
        commands, self.commands = self.commands, []
        return commands
