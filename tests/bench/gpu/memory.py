"""Whether the GPU's memory is free again: what a process had may take a while after its end."""

import re
import time

from tests.bench.gpu.processes import Log, Process, Row

_QUERY = ("nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits")
_LIMIT_S = 10.0
_POLL_S = 0.3
# Above what was in use before the first part, which other programs may hold.
_SPARE_MB = 1024


class GpuMemory:
    """The first GPU's, as nvidia-smi has it."""

    def __init__(self, log: Log) -> None:
        self._log = log
        self._before_mb = self._used_mb()

    def wait_until_free(self, patience_s: float) -> str | None:
        """None when it is; else what is still in use after these seconds."""
        ends_s = time.monotonic() + patience_s
        while True:
            used = self._used_mb()
            if used is None or self._before_mb is None:
                return None
            if used <= self._before_mb + _SPARE_MB:
                return None
            if time.monotonic() > ends_s:
                return f"{used} MB of the GPU's memory are still in use"
            time.sleep(_POLL_S)

    def _used_mb(self) -> int | None:
        """None without nvidia-smi, or where it says nothing."""
        rows: list[Row] = []
        # As a row, so that a driver that hangs cannot stop the suite.
        script = f'printf \'{{"mb": "%s"}}\\n\' "$({" ".join(_QUERY)} | head -n 1)"'
        process = Process(["sh", "-c", script], rows.append, self._log, limit_s=_LIMIT_S)
        process.wait()
        found = re.fullmatch(r"\s*(\d+)\s*", str(rows[0]["mb"])) if rows else None
        return int(found[1]) if found else None
