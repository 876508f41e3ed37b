"""When an engine process counts as stalled: what an honest step may take, and how long it has been
silent.

It reads no clock and ends nothing.
"""

from penstock.engine.step.model_info import ModelInfo
from penstock.scheduler.config import SchedulerConfig
from penstock.scheduler.stats import AttentionWork, StepWork

# Kernels reach a tenth of the peak in every shape that we have measured.
_LEAST_EFFICIENCY = 0.1
# A start reads weights, and it or the first step may compile kernels: minutes on a busy machine.
_FIRST_STEP_S = 600.0


def stall_limit_s(
    timeout_s: float, info: ModelInfo, config: SchedulerConfig, *, has_stepped: bool
) -> float:
    """How long the engine may take for a step: timeout_s, or the longest step that the limits allow
    at a tenth of the hardware's speed, whichever is longer; ten minutes until it has made one."""
    limit_s = max(timeout_s, _roofline_s(info, config) / _LEAST_EFFICIENCY)
    return limit_s if has_stepped else max(limit_s, _FIRST_STEP_S)


def _roofline_s(info: ModelInfo, config: SchedulerConfig) -> float:
    """The least time of a step that is full of prompt tokens, at the end of the longest contexts.
    0 where no speed is known."""
    num_tokens = config.max_step_tokens
    num_context = min(info.num_blocks * info.block_size, info.max_model_len * config.max_num_seqs)
    attention = AttentionWork(num_context, num_tokens * info.max_model_len)
    work = StepWork(
        num_prefill_tokens=num_tokens,
        num_decode_tokens=0,
        num_sequences=config.max_num_seqs,
        num_sampled=config.max_num_seqs,
        num_scored=num_tokens,
        attention=(attention,) * len(info.attention),
    )
    flops_per_s = info.measured_flops_per_s or info.peak_flops_per_s
    bytes_per_s = info.measured_bandwidth_bytes_per_s or info.peak_bandwidth_bytes_per_s
    return max(
        info.step_flops(work) / flops_per_s if flops_per_s else 0.0,
        info.step_bytes(work) / bytes_per_s if bytes_per_s else 0.0,
    )


class Silence:
    """How long something has given no sign of life, as far as this process was there to see it. A
    server that was stopped itself, as its whole container may be, has seen nothing meanwhile."""

    def __init__(self, interval_s: float) -> None:
        """interval_s: at which `look` is called."""
        self._interval_s = interval_s
        self._sign: object = None
        self._looked_at_s = 0.0
        self.seconds = 0.0

    def look(self, now_s: float, sign: object) -> float:
        """sign: what changes whenever there is life."""
        elapsed_s, self._looked_at_s = now_s - self._looked_at_s, now_s
        if sign != self._sign:
            self._sign, self.seconds = sign, 0.0
        else:
            self.seconds += min(elapsed_s, 2 * self._interval_s)
        return self.seconds
