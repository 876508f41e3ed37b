"""`DraftsAssumed`: how often drafts of next tokens are found and accepted in a simulation."""

import re
from collections import defaultdict
from typing import NamedTuple

# A position that fewer drafts have reached is as the one before it.
_MIN_REACHED = 30
_REACHED, _ACCEPTED = (f"spec_decode_{each}_tokens_per_pos" for each in ("reached", "accepted"))


class DraftsAssumed(NamedTuple):
    """acceptance: of a draft at each position, if those before it were accepted; the last is that
    of all after it. found: of the decoded tokens, the share for which there are drafts."""

    acceptance: tuple[float, ...]
    found: float = 1.0

    def changed_by(self, more: float) -> "DraftsAssumed":
        """With an acceptance that is so much higher, within 0 and 1."""
        changed = [min(1.0, max(0.0, each + more)) for each in self.acceptance]
        return self._replace(acceptance=tuple(changed))

    def __str__(self) -> str:
        shares = ", ".join(f"{each:.0%}" for each in self.acceptance)
        return f"found for {self.found:.0%} of the tokens, accepted by position {shares}"


def drafts_of(metrics: str, before: str = "") -> DraftsAssumed | None:
    """What those of a server did since its start, by its /metrics, or since it had those before;
    None where there were few."""
    counts: defaultdict[tuple[str, int | None], float] = defaultdict(float)
    for text, sign in ((metrics, 1), (before, -1)):
        for name, labels, value in re.findall(
            r"^penstock_(\w+)_total(?:\{(.*)\})? (\S+)$", text, re.MULTILINE
        ):
            position = re.search(r'position="(\d+)"', labels)
            counts[name, int(position[1]) if position else None] += sign * float(value)
    acceptance: list[float] = []
    while (reached := counts[_REACHED, len(acceptance)]) >= _MIN_REACHED:
        acceptance.append(counts[_ACCEPTED, len(acceptance)] / reached)
    if not acceptance:
        return None
    # All sources together, and of tokens those that a row began with.
    num_accepted = counts["spec_decode_accepted_tokens", None]
    num_rows = max(1.0, counts["generated_tokens", None] - num_accepted)
    return DraftsAssumed(tuple(acceptance), min(1.0, counts["spec_decode_drafts", None] / num_rows))
