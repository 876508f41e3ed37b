"""A `StepModel` for a device that has not run a step: from the peaks of its datasheet.

The shares of the peaks are those that tests/bench/gpu/ESTIMATE.md expects of an H200, launch by
launch, from what others measured. No step of ours has confirmed them, so the errors are assumed.
What several ranks exchange comes from the link between their devices.
"""

from dataclasses import dataclass
from math import log2

from penstock.scheduler.stats import StepClass
from penstock.scheduler.step_model.amounts import DEVICE_UNITS
from penstock.scheduler.step_model.model import ClassError, StepModel

# Copies reach 4.3 of the 4.8 TB/s, and kernels that stream 0.95 of that.
_READ_SHARE = 0.85
# Products of 1,024 rows and more, and prefill attention.
_MATRIX_SHARE, _ATTENTION_SHARE = 0.72, 0.30
# A step takes this besides: gaps between the launches of a graph, a few for each layer.
_LAYER_S, _STEP_S = 5e-6, 30e-6
_SAMPLED_ROW_S = 2e-6
# Seconds of the host: `make bench-scheduler`, the launch of a graph, a message.
_HOST_S = (200e-6, 2.0e-6, 20e-6, 0.05e-6)
# Half of the distance between ESTIMATE.md's expected and worst figures, doubled: it is unconfirmed.
_ASSUMED_ERROR = 0.2
# Published figures of several GPUs are up to 28 % further off than those of one of the same engine
# (loadtest/LOG.md), which has to be added to it: the root of both squares.
_ASSUMED_ERROR_OF_RANKS = 0.35


@dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    """Between the devices of a machine: see configs/hardware.toml."""

    name: str
    latency_s: float
    bus_bytes_per_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Exchange:
    """Ranks of tensor parallelism tell each other this in a step. Nothing is computed meanwhile:
    each sum is between two products that depend on each other.

    num_sums: all-reduces of a step, each of `token_bytes` for each of its tokens. row_bytes: of the
    logits of a row, which rank 0 gathers from all ranks; it sends back an id.
    """

    link: Link
    num_ranks: int
    num_sums: int
    token_bytes: int
    row_bytes: int

    @property
    def step_s(self) -> float:
        """Latencies: of the sums, of gathering logits and of sending the ids."""
        return (self.num_sums + 2) * self.link.latency_s * log2(self.num_ranks)

    @property
    def token_s(self) -> float:
        """Seconds that each token adds to the sums. Each rank sends and receives all of its bytes
        but its own share twice: once to be added, and once as part of the sum (a ring, Patarasuk
        and Yuan 2009)."""
        return 2 * self._others * self.num_sums * self.token_bytes / self.link.bus_bytes_per_s

    @property
    def row_s(self) -> float:
        return self._others * self.row_bytes / self.link.bus_bytes_per_s

    @property
    def _others(self) -> float:
        return (self.num_ranks - 1) / self.num_ranks


def analytic_model(
    *,
    bandwidth: float,
    flops: float,
    weight_bytes: int,
    flops_per_token: int,
    num_layers: int,
    runs_ahead: bool = True,
    exchange: Exchange | None = None,
) -> StepModel:
    """bandwidth, flops: the datasheet's peaks, per second. weight_bytes: read by each step.
    exchange: of several ranks, of which the bytes and operations are those of one."""
    read_s = 1.0 / (_READ_SHARE * bandwidth)
    token_s = flops_per_token / (_MATRIX_SHARE * flops)
    seconds = {
        "step": _STEP_S + _LAYER_S * num_layers,
        "weight_byte": read_s,
        # Multiplying hides behind reading the weights up to the knee, and takes longer from there.
        "token_above_knee": token_s,
        "decode_kv_byte": read_s,
        "attention_flop": 1.0 / (_ATTENTION_SHARE * flops),
        "sampled_row": _SAMPLED_ROW_S,
    }
    error = _ASSUMED_ERROR
    if exchange is not None:
        error = _ASSUMED_ERROR_OF_RANKS
        seconds["step"] += exchange.step_s
        seconds["token_below_knee"] = exchange.token_s
        seconds["token_above_knee"] += exchange.token_s
        seconds["sampled_row"] += exchange.row_s
    return StepModel(
        device=tuple(seconds.get(unit, 0.0) for unit in DEVICE_UNITS),
        host=_HOST_S,
        knee=int(weight_bytes * read_s / token_s),
        runs_ahead=runs_ahead,
        errors={kind: ClassError(num_steps=0, mape=error, bias=error) for kind in StepClass},
    )
