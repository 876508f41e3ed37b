"""Errors in a model's files, which the person who names the model can correct."""

from collections.abc import Iterable

from penstock.scheduler.errors import PenstockError


class InvalidModel(PenstockError):
    """The model cannot be served. The message names the file or field, and what to change."""


class UnsupportedWeightFormat(InvalidModel):
    """A linear layer is stored in a format that this path through the model cannot compute."""

    def __init__(self, weight_format: str, path: str, supported: Iterable[str]) -> None:
        super().__init__(
            f"this model has weights in the format {weight_format!r}, which {path} does not "
            f"support; it supports {', '.join(map(repr, supported))}: use an unquantized "
            "version of the model"
        )
