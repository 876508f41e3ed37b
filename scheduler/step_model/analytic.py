"""A `StepModel` for a device that has not run a step: from the peaks of its datasheet.

The shares of the peaks are those that tests/bench/gpu/ESTIMATE.md expects of an H200, launch by
launch, from what others measured. No step of ours has confirmed them, so the errors are assumed.
What several ranks exchange comes from the link between their devices.
"""

from penstock.scheduler.stats import StepClass
from penstock.scheduler.step_model.amounts import DEVICE_UNITS
from penstock.scheduler.step_model.exchange import Exchange
from penstock.scheduler.step_model.model import ClassError, StepModel

# Copies reach 4.3 of the 4.8 TB/s, and kernels that stream 0.95 of that.
_READ_SHARE = 0.85
# Products of 1,024 rows and more, and prefill attention.
_MATRIX_SHARE, _ATTENTION_SHARE = 0.72, 0.30
# What a step takes besides: gaps between the launches of a graph, a few for each layer.
_LAYER_S, _STEP_S = 5e-6, 30e-6
_SAMPLED_ROW_S = 2e-6
# Of the host: `make bench-scheduler`, the launch of a graph, a message.
_HOST_S = (200e-6, 2.0e-6, 20e-6, 0.05e-6)
# Half of the distance between ESTIMATE.md's expected and worst figures, doubled: it is unconfirmed.
_ASSUMED_ERROR = 0.2
# Published figures of several GPUs are up to 28 % further off than those of one of the same engine
# (loadtest/LOG.md), which has to be added to it: the root of both squares.
_ASSUMED_ERROR_OF_RANKS = 0.35


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
