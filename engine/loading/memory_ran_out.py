"""What a GPU whose memory ran out tells who started it: which flag to lower."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager

from penstock.engine.config import EngineConfig
from penstock.engine.memory.gpu_budget import out_of_memory
from penstock.engine.process.phases import Phases
from penstock.scheduler.errors import InvalidConfig

logger = logging.getLogger(__name__)


@contextmanager
def advising(config: EngineConfig, phases: Phases) -> Iterator[None]:
    """Raises InvalidConfig for it, by the phase of the start."""
    try:
        yield
    except RuntimeError as error:
        # torch.OutOfMemoryError, or the driver's error where torch did not allocate.
        if "out of memory" not in str(error).lower():
            raise
        logger.exception("the GPU's memory ran out")
        raise InvalidConfig(out_of_memory(config, phases.current)) from error
