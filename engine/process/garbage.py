"""When cycles are not collected: a collection walks all objects that live, garbage or not."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def uncollected() -> Iterator[None]:
    """For work that makes many objects, or long ones, and few cycles."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


@contextmanager
def importing() -> Iterator[None]:
    """Around the imports of a start: what they load stays, and no later collection walks it."""
    with uncollected():
        yield
        gc.freeze()
