"""A request's own targets, from its headers, where they have the names that gateways use."""

import math
from typing import NamedTuple

from starlette.datastructures import Headers

from penstock.scheduler.config import SchedulerConfig
from penstock.server.errors import InvalidRequest

TTFT_HEADER = "x-slo-ttft-ms"
TPOT_HEADER = "x-slo-tpot-ms"


class RequestTargets(NamedTuple):
    """In seconds; None without a target. ttft_s, tpot_s: the request's own, or the server's.
    own_itl_s: the request's alone, to which steps are fitted while it runs."""

    ttft_s: float | None = None
    tpot_s: float | None = None
    own_itl_s: float | None = None


def targets_of(headers: Headers, config: SchedulerConfig) -> RequestTargets:
    """A client may ask for slower steps than the server's target, and for faster ones only where
    the server has none: its streams are not to slow the prompts of others more than the operator
    wants. Raises InvalidRequest."""
    ttft_s, tpot_s = _seconds(headers, TTFT_HEADER), _seconds(headers, TPOT_HEADER)
    own_itl_s = tpot_s
    if tpot_s is not None and config.itl_target_s is not None:
        own_itl_s = max(tpot_s, config.itl_target_s)
    return RequestTargets(
        ttft_s=config.ttft_target_s if ttft_s is None else ttft_s,
        tpot_s=config.itl_target_s if tpot_s is None else tpot_s,
        own_itl_s=own_itl_s,
    )


def _seconds(headers: Headers, name: str) -> float | None:
    text = headers.get(name)
    if text is None:
        return None
    try:
        milliseconds = float(text)
    except ValueError:
        milliseconds = math.nan
    if not 0 < milliseconds < math.inf:
        raise InvalidRequest(
            f"the header {name} is {text[:40]!r}; it must be milliseconds, more than 0", param=name
        )
    return milliseconds / 1e3
