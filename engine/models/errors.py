"""What the person who names a model can mend."""

from penstock.scheduler.errors import PenstockError


class InvalidModel(PenstockError):
    """The model cannot be served. The message says which file or field, and what to change."""
