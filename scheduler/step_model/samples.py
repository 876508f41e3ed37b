"""`StepSamples`: a bounded memory of steps that ran, of every kind that there was.

Steps are kept by class and by the magnitude of their tokens and of their context: a server that
decodes all day does not forget how long its few long prompts took. (Dynamo's planner retires its
samples by bucket for the same reason.) Of each kind, those kept are spread over the last thousand
or so, since a few in a row say only what the machine did in that moment.
"""

from random import Random
from typing import NamedTuple

from penstock.scheduler.stats import StepClass
from penstock.scheduler.step_model.amounts import Amounts

_PER_BUCKET = 96
# This share of the steps that come when a bucket is full replace one that is drawn.
_KEPT_SHARE = 0.125
# The first steps of a kind in a process compile, allocate and fill caches.
_NUM_WARM_UP = 2
# Below this share of a cycle spent waiting for it, the device may have been idle meanwhile.
_LEAST_WAIT = 0.1

_Bucket = tuple[StepClass, int, int]


class StepSample(NamedTuple):
    """A step that ran. number: of the step, since the first engine started. device_s: None where it
    hid behind the host's time. cycle_s: from the end of the step before to this one's, without
    idleness."""

    number: int
    kind: StepClass
    amounts: Amounts
    device_s: float | None
    host_s: float
    cycle_s: float


def sample_of(
    number: int,
    kind: StepClass,
    amounts: Amounts,
    *,
    wait_s: float,
    host_s: float,
    runs_ahead: bool,
) -> StepSample:
    """wait_s, host_s: as the engine reports them, see its StepReport."""
    cycle_s = wait_s + host_s
    if not runs_ahead:
        return StepSample(number, kind, amounts, wait_s, host_s, cycle_s)
    device_s = cycle_s if wait_s >= _LEAST_WAIT * cycle_s else None
    return StepSample(number, kind, amounts, device_s, host_s, cycle_s)


class StepSamples:
    """Add steps in their order; read them in the same."""

    def __init__(self) -> None:
        self._random = Random(0)
        self._buckets: dict[_Bucket, list[StepSample]] = {}
        self._num_seen: dict[_Bucket, int] = {}

    def add(self, sample: StepSample) -> None:
        amounts = sample.amounts
        context = amounts.decode_kv_bytes + amounts.prefill_kv_bytes
        bucket = (sample.kind, amounts.tokens.bit_length(), context.bit_length())
        num_seen = self._num_seen[bucket] = self._num_seen.get(bucket, 0) + 1
        if num_seen <= _NUM_WARM_UP:
            return
        kept = self._buckets.setdefault(bucket, [])
        if len(kept) < _PER_BUCKET:
            kept.append(sample)
        elif self._random.random() < _KEPT_SHARE:
            kept[int(self._random.random() * _PER_BUCKET)] = sample

    def warm_up(self) -> None:
        """Leaves out the first steps of each kind again: another process runs those that follow."""
        self._num_seen.clear()

    def all(self) -> list[StepSample]:
        """Those that are kept, in the order in which they ran."""
        return sorted(sample for kept in self._buckets.values() for sample in kept)
