"""`TransferRate`: how long a load would take, by what is on its way and what others took."""

# Each new measurement is this share of the bandwidth; and each load that was not begun moves it as
# far back to what was measured at the start, so that a slow direction gets another chance.
_NEW_SHARE = 0.3
_RETURN_SHARE = 0.05
# To begin and end a load, whatever its size: threads, and the loop that looks for what has ended.
_LATENCY_S = 0.002


class TransferRate:
    """One direction's. One thread at a time may change it."""

    def __init__(self, bytes_per_s: float) -> None:
        self._start_bytes_per_s = self.bytes_per_s = bytes_per_s
        self.open_bytes = 0
        """Loads that have begun and not ended have these."""

    def seconds(self, num_bytes: int) -> float:
        """For so many more, from now."""
        return _LATENCY_S + (self.open_bytes + num_bytes) / self.bytes_per_s

    def measure(self, num_bytes: int, seconds: float) -> None:
        measured = num_bytes / max(seconds, 1e-6)
        self.bytes_per_s += _NEW_SHARE * (measured - self.bytes_per_s)

    def decline(self) -> None:
        """A load was not begun, as it would have taken too long."""
        self.bytes_per_s += _RETURN_SHARE * (self._start_bytes_per_s - self.bytes_per_s)
