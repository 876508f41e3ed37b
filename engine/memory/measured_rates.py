"""How fast this machine reads memory and multiplies matrices, and whether that can be trusted.

A start beside other programs measures too little, and MBU against that reads too high. So the best
of all undisturbed starts on such a processor is kept, a measurement beside others is marked, and
when nothing else runs it is made again.
"""

import json
import logging
import os
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import torch

from penstock.engine.memory.hardware import matmul_flops, read_bandwidth
from penstock.engine.memory.machine import available_memory_bytes

logger = logging.getLogger(__name__)

# Of all cores, for programs beside this one and the server that started it.
_MAX_SHARE_OF_OTHERS = 0.1
_PROC = Path("/proc")
_ROOM_BYTES = 2**30  # more than a measurement takes
_FILE = Path("penstock") / "rates.json"  # below the user's directory for caches


class Rates(NamedTuple):
    """As in `ModelInfo`."""

    measured_bandwidth_bytes_per_s: float
    measured_flops_per_s: float
    rates_are_doubtful: bool


class CpuTimes(NamedTuple):
    """Processor time until now, in seconds: of all that runs on this machine, and of this program,
    which is this process, those that it has waited for, and its parent."""

    at_s: float
    all_s: float
    own_s: float

    @classmethod
    def now(cls, proc: Path = _PROC) -> "CpuTimes":
        per_s = os.sysconf("SC_CLK_TCK")
        total, parent = 0.0, 0.0
        with suppress(OSError):  # not Linux: then nothing is known of others
            fields = (proc / "stat").read_text().split("\n", 1)[0].split()[1:9]
            user, nice, system, _, _, irq, softirq, steal = map(int, fields)
            total = (user + nice + system + irq + softirq + steal) / per_s
            of_parent = (proc / str(os.getppid()) / "stat").read_text().rpartition(")")[2].split()
            parent = (int(of_parent[11]) + int(of_parent[12])) / per_s
        return cls(time.monotonic(), total, sum(os.times()[:4]) + parent)

    def share_of_others(self, later: "CpuTimes") -> float:
        """Of all cores' time, from 0 to 1."""
        others_s = later.all_s - self.all_s - (later.own_s - self.own_s)
        return max(0.0, others_s) / max(1e-9, (later.at_s - self.at_s) * (os.cpu_count() or 1))


AT_IMPORT = CpuTimes.now()  # a start imports this when it begins


class RateMeter:
    """Measures a processor's rates, and again when nothing else runs."""

    def __init__(
        self, dtype: torch.dtype, measure: Callable[[], tuple[float, float]], file: Path | None
    ) -> None:
        """measure: returns bytes and operations per second, of products of this type. file: keeps
        the best, if there is one."""
        self._key = f"{processor_name()}, {torch.get_num_threads()} threads, {dtype}"
        self._measure = measure
        self._file = file
        self._before = CpuTimes.now()

    def rates(self, before: CpuTimes = AT_IMPORT) -> Rates:
        """before: some time ago; who else has worked since then may work still."""
        share = before.share_of_others(CpuTimes.now())
        measured, best = self._measure(), self._kept()
        is_disturbed = share > _MAX_SHARE_OF_OTHERS
        if best is not None:
            measured = (max(measured[0], best[0]), max(measured[1], best[1]))
        elif is_disturbed:
            logger.info(
                "how fast the machine is was measured while other programs took %.0f %% of its "
                "processors' time: MBU against it may read too high, until that is measured again "
                "when nothing else runs",
                share * 100,
            )
        if not is_disturbed and measured != best:
            self._keep(measured)
        return Rates(*measured, is_disturbed and best is None)

    def when_idle(self) -> Rates | None:
        """Call it while there is no work, some seconds apart. Measures, which takes some 50 ms, if
        nothing else has run since the last call."""
        before, self._before = self._before, CpuTimes.now()
        is_disturbed = before.share_of_others(self._before) > _MAX_SHARE_OF_OTHERS
        if is_disturbed or available_memory_bytes() < _ROOM_BYTES:
            return None
        return self.rates(before)

    def _kept(self) -> tuple[float, float] | None:
        with suppress(OSError, ValueError, TypeError, KeyError):
            bytes_per_s, flops_per_s = self._all()[self._key]
            return float(bytes_per_s), float(flops_per_s)
        return None

    def _all(self) -> dict[str, list[float]]:
        kept = json.loads(self._file.read_text()) if self._file else {}
        return kept if isinstance(kept, dict) else {}

    def _keep(self, rates: tuple[float, float]) -> None:
        if self._file is None:
            return
        kept: dict[str, list[float]] = {}
        with suppress(OSError, ValueError):
            kept = self._all()
        with suppress(OSError, TypeError):
            kept[self._key] = list(rates)
            self._file.parent.mkdir(parents=True, exist_ok=True)
            written = self._file.with_suffix(f".{os.getpid()}")
            written.write_text(json.dumps(kept))
            written.replace(self._file)


def rates_file() -> Path | None:
    """Returns where rates are kept; None for a user without a home, as in containers."""
    try:
        return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / _FILE
    except RuntimeError:
        return None


def processor_meter(dtype: torch.dtype) -> RateMeter:
    return RateMeter(dtype, lambda: (read_bandwidth(), matmul_flops(dtype)), rates_file())


def processor_name() -> str:
    with suppress(OSError):
        for line in (_PROC / "cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return "unknown processor"
