"""The goals for one H200, in bf16 with random weights, and whether a run meets them."""

from dataclasses import dataclass
from typing import Any

Row = dict[str, Any]
LLAMA, QWEN, SMALL = "Llama-3.1-8B", "Qwen3-8B", "Qwen3-0.6B"


@dataclass(frozen=True, slots=True, kw_only=True)
class Goal:
    """row: fields that identify the measured row; key: the field of its figure.

    limit: what the hardware allows, computed from its measured bandwidth, as text. scale: of the
    figure, before it is compared and shown.
    """

    what: str
    row: Row
    key: str
    wanted: float
    unit: str
    is_at_most: bool = False
    limit: str = ""
    scale: float = 1.0

    def measured(self, rows: list[Row]) -> float | None:
        """Of the last such row; None where the row, or the figure in it, is missing."""
        for row in reversed(rows):
            if self.row.items() <= row.items() and row.get(self.key) is not None:
                return float(row[self.key]) * self.scale
        return None

    def is_met_by(self, measured: float) -> bool:
        return measured <= self.wanted if self.is_at_most else measured >= self.wanted


@dataclass(frozen=True, slots=True)
class Verdict:
    goal: Goal
    measured: float | None

    @property
    def word(self) -> str:
        if self.measured is None:
            return "not measured"
        return "met" if self.goal.is_met_by(self.measured) else "NOT MET"


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
        limit="3.51",
    ),
    Goal(
        what="the same, of the measured copy bandwidth",
        row=_decode(LLAMA, 1, 512),
        key="of_copy",
        wanted=90,
        unit="%",
        scale=100,
        limit="100",
    ),
    Goal(
        what="Qwen3-0.6B, batch 1, context 512: TPOT",
        row=_decode(SMALL, 1, 512),
        key="tpot_ms",
        wanted=0.6,
        unit="ms",
        is_at_most=True,
        limit="0.29",
    ),
    Goal(
        what="Llama-3.1-8B, batch 256, context 1,024: decode",
        row=_decode(LLAMA, 256, 1024),
        key="tokens_per_s",
        wanted=16_000,
        unit="tok/s",
        limit="19,900",
    ),
    Goal(
        what="offline benchmark, Qwen3-0.6B",
        row={"part": "offline", "model": SMALL},
        key="tokens_per_s",
        wanted=25_000,
        unit="tok/s",
        limit="36,300",
    ),
    Goal(
        what="offline benchmark, Llama-3.1-8B",
        row={"part": "offline", "model": LLAMA},
        key="tokens_per_s",
        wanted=11_000,
        unit="tok/s",
        limit="13,300",
    ),
    Goal(
        what="Qwen3-8B by HTTP, 128 in, 1,024 out, 256 streams",
        row={"part": "http", "model": QWEN},
        key="tokens_per_s",
        wanted=19_000,
        unit="tok/s",
        limit="24,300",
    ),
    Goal(
        what="the same, engine idle",
        row={"part": "http", "model": QWEN},
        key="engine_idle_ratio",
        wanted=2,
        unit="%",
        is_at_most=True,
        scale=100,
        limit="0",
    ),
    Goal(
        what="TTFT of one 1,024-token prompt, Llama-3.1-8B",
        row={"part": "ttft", "model": LLAMA, "prompt": 1024},
        key="ttft_ms",
        wanted=30,
        unit="ms",
        is_at_most=True,
        limit="18",
    ),
    Goal(
        what="decode attention, batch 32, context 8,192: of copy",
        row=_ATTENTION,
        key="of_copy",
        wanted=85,
        unit="%",
        scale=100,
        limit="100",
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
    return [Verdict(goal, goal.measured(rows)) for goal in GOALS]


def table(found: list[Verdict]) -> str:
    """A line per goal."""
    lines = [f"{'goal':<56} {'wanted':>16} {'limit':>8} {'measured':>10}"]
    for verdict in found:
        goal, sign = verdict.goal, "<=" if verdict.goal.is_at_most else ">="
        measured = "-" if verdict.measured is None else f"{verdict.measured:,.{_digits(goal)}f}"
        wanted = f"{sign} {goal.wanted:,g} {goal.unit}"
        lines.append(f"{goal.what:<56} {wanted:>16} {goal.limit:>8} {measured:>10}  {verdict.word}")
    return "\n".join(lines)


def _digits(goal: Goal) -> int:
    return 0 if goal.wanted >= 1000 else 2
