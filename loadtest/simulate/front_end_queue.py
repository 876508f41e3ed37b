"""`FrontEndQueue`: how requests and tokens wait for the server's other process.

One thread parses requests, and writes the tokens of each step to their streams. It does one thing
after another; so while it writes, a new request waits, and while it parses, tokens wait.
"""

from penstock.loadtest.calibrate.front_end import FrontEnd


class FrontEndQueue:
    """The one thread of a server. Call it in the order of time."""

    def __init__(self, front_end: FrontEnd) -> None:
        self._costs = front_end
        self._free_s = 0.0

    def request(self, sent_s: float) -> float:
        """When the engine gets what a client sends now."""
        self._free_s = max(sent_s, self._free_s) + self._costs.request_s
        return self._free_s + self._costs.delay_s

    def report(self, sent_s: float) -> float:
        """When the first token of what the engine sends now may be written; see `token`."""
        self._free_s = max(sent_s, self._free_s) + self._costs.report_s
        return self._free_s

    def tokens(self, num: int) -> None:
        """The report's tokens: each takes `token_s`, after the one before."""
        self._free_s += num * self._costs.token_s
