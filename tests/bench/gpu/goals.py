"""The goals in bf16 with random weights, and whether a run meets them.

They are wanted of an H200. Of another device is wanted what its own rates allow: the part of a time
that is the memory's lasts longer by the copy that was measured there, the matrix units' part by the
measured product, and the rest, latencies and the host's work, as long as on an H200.
"""

from dataclasses import dataclass, replace
from typing import Any

Row = dict[str, Any]
LLAMA, QWEN, SMALL = "Llama-3.1-8B", "Qwen3-8B", "Qwen3-0.6B"
MIXTURE = "Qwen3-30B-A3B"


@dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    """What the part `device` measured: bytes read and written, and operations of a bf16 product,
    in a second."""

    name: str
    copy: float
    matrix: float

    @property
    def text(self) -> str:
        return f"{self.name} (copy {self.copy / 1e12:.2f} TB/s, bf16 {self.matrix / 1e12:.0f} TF/s)"


H200 = Device(name="H200", copy=4.26e12, matrix=702e12)
# Supposed until one has been measured: the same multiprocessors with a slower memory.
H100 = Device(name="H100 SXM", copy=3.0e12, matrix=702e12)


def device_of(rows: list[Row]) -> Device | None:
    """The last that was measured."""
    for row in reversed(rows):
        if row.get("part") == "device" and row.get("copy_bytes_per_s"):
            rates = float(row["copy_bytes_per_s"]), float(row["matrix_flops_per_s"])
            return Device(name=str(row["name"]), copy=rates[0], matrix=rates[1])
    return None


@dataclass(frozen=True, slots=True, kw_only=True)
class Goal:
    """row: fields that identify the measured row; key: the field of its figure.

    limit: what an H200 allows, by its measured copy or product. scale: of the figure, before it is
    compared and shown. of_memory, of_matrix: the shares of the time that are the memory's and the
    matrix units', as ESTIMATE.md has them; none of what is a share or the host's.
    """

    what: str
    row: Row
    key: str
    wanted: float
    unit: str
    is_at_most: bool = False
    limit: float | None = None
    scale: float = 1.0
    of_memory: float = 0.0
    of_matrix: float = 0.0

    def on(self, device: Device) -> "Goal":
        """As it is wanted of this device."""
        more = (
            (0.0, 0.0),  # the host's, as long everywhere
            (self.of_memory, H200.copy / device.copy - 1),
            (self.of_matrix, H200.matrix / device.matrix - 1),
        )
        longer = 1 + sum(share * by for share, by in more)
        _, bound = max(more, key=lambda each: each[0])
        limit = self.limit and _by(self.limit, 1 + bound, is_time=self.is_at_most)
        return replace(self, wanted=_by(self.wanted, longer, is_time=self.is_at_most), limit=limit)

    def measured(self, rows: list[Row]) -> float | None:
        """Of the last such row; None where the row, or the figure in it, is missing."""
        for row in reversed(rows):
            if self.row.items() <= row.items() and row.get(self.key) is not None:
                return float(row[self.key]) * self.scale
        return None

    def is_met_by(self, measured: float) -> bool:
        return measured <= self.wanted if self.is_at_most else measured >= self.wanted


def _by(figure: float, longer: float, *, is_time: bool) -> float:
    """A time, or a rate, of what takes so many times as long."""
    return figure * longer if is_time else figure / longer


@dataclass(frozen=True, slots=True)
class Verdict:
    """here: the goal as it is wanted of the device that was measured."""

    goal: Goal
    here: Goal
    measured: float | None

    @property
    def word(self) -> str:
        if self.measured is None:
            return "not measured"
        return "met" if self.here.is_met_by(self.measured) else "NOT MET"


def _decode(model: str, batch: int, context: int) -> Row:
    return {"part": "decode", "model": model, "batch": batch, "context": context}


_ATTENTION: Row = {
    "part": "kernel",
    "kernel": "decode attention",
    "model": LLAMA,
    "batch": 32,
    "context": 8192,
}

GOALS: tuple[Goal, ...] = (
    Goal(
        what="Llama-3.1-8B, batch 1, context 512: TPOT",
        row=_decode(LLAMA, 1, 512),
        key="tpot_ms",
        wanted=3.9,
        unit="ms",
        is_at_most=True,
        limit=3.51,
        of_memory=0.81,
    ),
    Goal(
        what="the same, of the measured copy bandwidth",
        row=_decode(LLAMA, 1, 512),
        key="of_copy",
        wanted=90,
        unit="%",
        scale=100,
        limit=100,
    ),
    Goal(
        what="Qwen3-0.6B, batch 1, context 512: TPOT",
        row=_decode(SMALL, 1, 512),
        key="tpot_ms",
        wanted=0.6,
        unit="ms",
        is_at_most=True,
        limit=0.29,
        of_memory=0.31,
    ),
    Goal(
        what="Llama-3.1-8B, batch 256, context 1,024: decode",
        row=_decode(LLAMA, 256, 1024),
        key="tokens_per_s",
        wanted=16_000,
        unit="tok/s",
        limit=19_900,
        of_memory=0.57,
        of_matrix=0.32,
    ),
    Goal(
        what="offline benchmark, Qwen3-0.6B",
        row={"part": "offline", "model": SMALL},
        key="tokens_per_s",
        wanted=25_000,
        unit="tok/s",
        limit=36_300,
        of_memory=0.76,
        of_matrix=0.06,
    ),
    Goal(
        what="offline benchmark, Llama-3.1-8B",
        row={"part": "offline", "model": LLAMA},
        key="tokens_per_s",
        wanted=11_000,
        unit="tok/s",
        limit=13_300,
        of_memory=0.55,
        of_matrix=0.3,
    ),
    Goal(
        what="Qwen3-8B by HTTP, 128 in, 1,024 out, 256 streams",
        row={"part": "http", "model": QWEN},
        key="tokens_per_s",
        wanted=19_000,
        unit="tok/s",
        limit=24_300,
        of_memory=0.45,
        of_matrix=0.41,
    ),
    Goal(
        what="the same, engine idle",
        row={"part": "http", "model": QWEN},
        key="engine_idle_ratio",
        wanted=2,
        unit="%",
        is_at_most=True,
        scale=100,
        limit=0,
    ),
    Goal(
        what="TTFT of one 1,024-token prompt, Llama-3.1-8B",
        row={"part": "ttft", "model": LLAMA, "prompt": 1024},
        key="ttft_ms",
        wanted=30,
        unit="ms",
        is_at_most=True,
        limit=18,
        of_memory=0.07,
        of_matrix=0.88,
    ),
    Goal(
        what="decode attention, batch 32, context 8,192: of copy",
        row=_ATTENTION,
        key="of_copy",
        wanted=85,
        unit="%",
        scale=100,
        limit=100,
    ),
    Goal(
        what="the same, FlashAttention 3's time over ours",
        row=_ATTENTION,
        key="flash_attention_3_over_ours",
        wanted=1.0,
        unit="times",
    ),
    Goal(
        what="ready to serve, weights in the page cache, 8B",
        row={"part": "ready", "model": LLAMA},
        key="ready_s",
        wanted=15,
        unit="s",
        is_at_most=True,
    ),
)


# A share, of which figure of a row, and of which one of the `device` row.
_SHARES = (
    ("of_copy", "bytes_per_s", "copy_bytes_per_s"),
    ("of_datasheet", "bytes_per_s", "datasheet_bytes_per_s"),
    ("of_matrix_rate", "flops_per_s", "matrix_flops_per_s"),
)


def with_shares(row: Row, device: Row) -> Row:
    """The row with its shares of the device's peaks, where these are known."""
    shares = {
        share: row[figure] / device[peak]
        for share, figure, peak in _SHARES
        if row.get(figure) and device.get(peak)
    }
    rivals = row.get("rivals", {}).items()
    times = [us for name, us in rivals if "FlashAttention 3" in name]
    if times:
        shares["flash_attention_3_over_ours"] = min(times) / row["us"]
    return row | shares


def verdicts(rows: list[Row]) -> list[Verdict]:
    """As wanted of an H200 where no device was measured."""
    device = device_of(rows) or H200
    return [Verdict(goal, goal.on(device), goal.measured(rows)) for goal in GOALS]


def table(rows: list[Row]) -> str:
    """The device, and a line for each goal."""
    device = device_of(rows)
    name = "wanted here: no copy was measured, so as of an H200"
    lines = [name if device is None else f"wanted here: of the device, {device.text}"]
    heads = (f"{'wanted of H200':>16}", f"{'wanted here':>11}", f"{'limit here':>10}")
    lines.append(f"{'goal':<56} {' '.join(heads)} {'measured':>10}")
    for verdict in verdicts(rows):
        goal, here = verdict.goal, verdict.here
        wanted = f"{sign(goal)} {goal.wanted:,g} {goal.unit}"
        figures = " ".join(
            f"{shown(goal, figure):>{width}}"
            for figure, width in ((here.wanted, 11), (here.limit, 10), (verdict.measured, 10))
        )
        lines.append(f"{goal.what:<56} {wanted:>16} {figures}  {verdict.word}")
    return "\n".join(lines)


def sign(goal: Goal) -> str:
    return "<=" if goal.is_at_most else ">="


def shown(goal: Goal, figure: float | None) -> str:
    return "-" if figure is None else f"{figure:,.{0 if goal.wanted >= 1000 else 2}f}"
