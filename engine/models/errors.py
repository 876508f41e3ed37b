"""Errors in a model's files, which the person who names the model can correct."""

from collections.abc import Iterable

from penstock.engine.errors import InvalidModel

__all__ = ["InvalidModel", "UnsupportedFeature", "UnsupportedWeightFormat"]


class UnsupportedFeature(InvalidModel):
    """The architecture has something that this path through the model does not compute."""

    def __init__(self, features: Iterable[str], path: str) -> None:
        """features: in words. path: its name in error messages."""
        super().__init__(
            f"this model has {', '.join(sorted(features))}, which {path} does not support; "
            "torch on the CPU does (--device cpu)"
        )


class UnsupportedWeightFormat(InvalidModel):
    """A linear layer is stored in a format that this path through the model cannot compute."""

    def __init__(self, weight_format: str, path: str, supported: Iterable[str]) -> None:
        super().__init__(
            f"this model has weights in the format {weight_format!r}, which {path} does not "
            f"support; it supports {', '.join(map(repr, supported))}: use an unquantized "
            "version of the model"
        )


class WrongProducts(InvalidModel):
    """The compiled step multiplies wrongly on this machine."""

    def __init__(self, weight_format: str) -> None:
        super().__init__(
            f"the compiled step gives wrong products with weights in the format {weight_format!r} "
            "on this processor; please report it, with the model name in /proc/cpuinfo and the "
            "compiler's version"
        )
