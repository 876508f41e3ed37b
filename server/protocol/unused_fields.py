"""Fields that have no effect on this server although they have one elsewhere: accepted, and
reported in the log."""

import logging

logger = logging.getLogger("penstock")

# vLLM's, for plugins that this server does not have, and for templates of other models.
UNUSED = ("documents", "vllm_xargs")
# Clients choose names of variables: without a limit they could fill the log and the memory.
_MAX_REPORTED = 100
_reported: set[str] = set()


def report_unused(field: str, why: str) -> None:
    """Once for each field."""
    field = field[:100]
    if field in _reported or len(_reported) >= _MAX_REPORTED:
        return
    _reported.add(field)
    logger.warning("%r in a request had no effect: %s (reported once)", field, why)
