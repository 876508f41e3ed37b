"""`DraftPrices`: what a draft adds to a step of decodes, by the live step model."""

from typing import NamedTuple

from penstock.scheduler.stats import StepClass, expected_work
from penstock.scheduler.step_model.live import LiveStepModel

# A draft is to give so many times the tokens that its time is worth: prices are of a fit, which is
# even where tiles of products make steps.
MARGIN = 1.5
# The time of a draft while nothing is known, as a share of that of a step of one sequence.
_UNKNOWN_SHARE = 0.2
# No draft is free, whatever was learned of steps that had none.
_LEAST_SHARE = 0.02
# So many drafts are priced together; their price is asked for again after so many steps.
_NUM_PRICED, _EVERY = 4, 16


class Price(NamedTuple):
    """step_s: of a step without drafts. draft_s: what each adds."""

    step_s: float
    draft_s: float


class DraftPrices:
    def __init__(self, live: LiveStepModel | None) -> None:
        self._live = live
        self._known: dict[int, tuple[Price, int]] = {}
        self._num_asked = 0

    def of(self, num_decodes: int, num_positions: int) -> Price:
        """num_positions: all that the decodes attend to."""
        self._num_asked += 1
        price, until = self._known.get(num_decodes, (None, 0))
        if price is None or self._num_asked >= until:
            price = self._ask(num_decodes, num_positions) or Price(1.0, _UNKNOWN_SHARE)
            self._known[num_decodes] = price, self._num_asked + _EVERY
        return price

    def _ask(self, num_decodes: int, num_positions: int) -> Price | None:
        live = self._live
        if live is None:
            return None
        windows = [group.window for group in live.served.attention]
        work = expected_work(windows, keys=num_positions, num_decodes=num_decodes)
        more = work._replace(
            num_decode_tokens=work.num_decode_tokens + _NUM_PRICED,
            num_sampled=work.num_sampled + _NUM_PRICED,
        )
        times = [live.predict(live.served.amounts(each), StepClass.DECODE) for each in (work, more)]
        step_s, with_drafts_s = times
        if step_s is None or with_drafts_s is None:
            return None
        draft_s = (with_drafts_s - step_s) / _NUM_PRICED
        return Price(step_s, max(_LEAST_SHARE * step_s, draft_s))
