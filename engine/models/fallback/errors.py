"""`UnsupportedClass`: a class of transformers whose answers would be wrong here, or that cannot be
called."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager

from penstock.engine.models.errors import InvalidModel

logger = logging.getLogger(__name__)


class UnsupportedClass(InvalidModel):
    def __init__(self, architecture: str, why: str) -> None:
        super().__init__(
            f"the architecture {architecture} has no implementation of our own, and cannot be "
            f"computed by transformers' class either: {why}",
            brief=f"{architecture} is not supported",
        )


@contextmanager
def calling(architecture: str) -> Iterator[None]:
    """Whatever a class raises when it is called as ours means that it cannot be."""
    try:
        yield
    except InvalidModel:
        raise
    except Exception as error:
        if "out of memory" in str(error).lower():
            raise
        logger.debug("the class %s failed", architecture, exc_info=True)
        reason = str(error).strip().partition("\n")[0]
        raise UnsupportedClass(
            architecture, f"it does not run on a step of ours ({type(error).__name__}: {reason})"
        ) from error
