"""`ChunkBudget`: how many prompt tokens a step may run beside its decodes, to end by a given time.

A step's time is linear in the chunk's tokens and, by attention, quadratic: the most tokens within a
time are the root of a quadratic. (Sarathi-Serve, Agrawal et al. 2024, finds one number of tokens by
profiling for all steps; here each step has its own, by the contexts that its decodes have.)
"""

from math import inf, sqrt

from penstock.scheduler.stats import StepClass, StepWork
from penstock.scheduler.step_model.live import Expected, LiveStepModel, SteppedModel

# Prompt tokens that a step may run though they take longer, so that prompts go on under a target
# that cannot be met: one tile of a GPU's matrix products, and a few blocks.
PREFILL_FLOOR = 64
# Prompt tokens of a step of which nothing is known yet, in multiples of what any step may run: few,
# since a target would be missed by as many steps as it takes to learn; and enough to learn from.
_UNKNOWN_FLOORS = 4


class ChunkBudget:
    """max_tokens: the most prompt tokens that the step may run, whatever time they take. enough: so
    many that no further prompt is worth making those that end with the step wait.

    is_spent: no further chunk fits, or is worth it.
    """

    def __init__(self, max_tokens: int, enough: float = inf) -> None:
        self.tokens_left = max_tokens
        self._spare = max(0, max_tokens - enough)
        self.is_spent = max_tokens <= 0

    def take(self, start: int, num_wanted: int, least: int = 0) -> int:
        """Spends as many of a prompt's tokens from `start` on as fit, or as `least`, and returns
        how many."""
        num_tokens = max(min(num_wanted, self.most(start)), least)
        self.spend(start, num_tokens)
        self.is_spent = num_tokens < num_wanted or self.tokens_left <= self._spare
        return num_tokens

    def most(self, start: int) -> int:
        """The most tokens that fit of a prompt whose tokens from `start` on are next."""
        return self.tokens_left

    def spend(self, start: int, num_tokens: int) -> None:
        self.tokens_left -= num_tokens


class TimedChunkBudget(ChunkBudget):
    """Within a time, too. floor: as PREFILL_FLOOR."""

    def __init__(
        self,
        max_tokens: int,
        enough: float,
        *,
        floor: int,
        target_s: float,
        expected: Expected,
        served: SteppedModel,
        decodes: StepWork,
    ) -> None:
        """decodes: what the step runs besides, without padding."""
        super().__init__(max_tokens, enough)
        self._floor = min(floor, max_tokens)
        self._model, self._served = expected.model, served
        self._num_tokens = decodes.num_decode_tokens
        # With the weights of a whole chunk, which may reach every expert of a mixture.
        full = served.amounts(decodes._replace(num_prefill_tokens=max_tokens))
        base = full._replace(tokens=self._num_tokens, prefill_tokens=0)
        self._device_s, self._host_s = self._model.sums_of(base)
        self._target_s = target_s / expected.tail
        _, sequence, chunk, self._host_token_s = self._model.host
        self._host_chunk_s = sequence + chunk

    def most(self, start: int) -> int:
        most = self.tokens_left
        if most <= 0:
            return 0
        # The correction depends on the size of the whole step, which depends on what is found here.
        for _ in range(2):
            factor = self._model.correction(StepClass.MIXED, self._num_tokens + most)
            most = min(most, self._within(start, factor))
        return max(self._fitting(most), min(self._floor, self.tokens_left))

    def spend(self, start: int, num_tokens: int) -> None:
        if not num_tokens:
            return
        super().spend(start, num_tokens)
        self._floor = max(0, self._floor - num_tokens)
        fixed, linear, quadratic = self._device_terms(start, is_above=False)
        model, step, above, below = self._model, self._num_tokens, 0, num_tokens
        if step + num_tokens > model.knee:
            below = max(0, min(num_tokens, model.knee - step))
            above = num_tokens - below
        _, _, per_below, per_above, *_ = model.device
        linear -= per_below
        self._device_s += fixed + linear * num_tokens + quadratic * num_tokens**2
        self._device_s += per_below * below + per_above * above
        self._host_s += self._host_chunk_s + self._host_token_s * num_tokens
        self._num_tokens += num_tokens

    def _within(self, start: int, factor: float) -> int:
        """The most tokens that end by the target; factor: of the device's time."""
        below_knee = self._model.knee - self._num_tokens
        most = self._root(start, factor, is_above=False) if below_knee > 0 else inf
        if most > below_knee:
            most = max(self._root(start, factor, is_above=True), max(0, below_knee))
        return int(min(most, self.tokens_left))

    def _root(self, start: int, factor: float, *, is_above: bool) -> float:
        """Where tokens cost what they do above the knee, or below it."""
        fixed, linear, quadratic = self._device_terms(start, is_above=is_above)
        device_s = factor * (self._device_s + fixed)
        host_s, host_linear = self._host_s + self._host_chunk_s, self._host_token_s
        linear, quadratic = factor * linear, factor * quadratic
        if self._model.runs_ahead:
            on_device = _positive_root(linear, quadratic, self._target_s - device_s)
            return min(on_device, _positive_root(host_linear, 0.0, self._target_s - host_s))
        left_s = self._target_s - device_s - host_s
        return _positive_root(linear + host_linear, quadratic, left_s)

    def _device_terms(self, start: int, *, is_above: bool) -> tuple[float, float, float]:
        """A chunk's time: fixed, for each token, and for each token's square."""
        _, _, below, above, _, kv_byte, flop, sequence, chunk, sampled = self._model.device
        fixed, linear, quadratic = sequence + chunk + sampled, below, 0.0
        if is_above:
            free = max(0, self._model.knee - self._num_tokens)
            linear, fixed = above, fixed + (below - above) * free
        for group in self._served.attention:
            kv_s, pair_s = kv_byte * group.kv_bytes_per_token, flop * group.flops_per_pair
            window = group.window
            if window is not None and start >= window:
                fixed += kv_s * (window - 1)
                linear += kv_s + pair_s * window
            else:  # of a window that the chunk goes beyond, a little more than it takes
                fixed += kv_s * start
                linear += kv_s + pair_s * (start + 0.5)
                quadratic += pair_s / 2
        return fixed, linear, quadratic

    def _fitting(self, most: int) -> int:
        """No more than fill a graph: a step that is a little larger takes as long as the next."""
        total = self._num_tokens + most
        sizes = self._served.graph_sizes.chunks
        if most <= 0 or not sizes or total >= sizes[-1]:
            return most
        fitting = max((size for size in sizes if size <= total), default=0) - self._num_tokens
        return fitting if fitting > 0 else most


def chunk_budget(
    live: LiveStepModel | None,
    target_s: float | None,
    *,
    max_tokens: int,
    decodes: StepWork,
    enough: float = inf,
    floor: int = PREFILL_FLOOR,
) -> ChunkBudget:
    """Without a target, that of tokens alone; and of few, as long as nothing is known of the
    time."""
    if live is None or target_s is None or not decodes.num_decode_tokens:
        return ChunkBudget(max_tokens, enough)
    expected = live.expected(StepClass.MIXED)
    if expected is None:
        return ChunkBudget(min(max_tokens, _UNKNOWN_FLOORS * floor), enough)
    return TimedChunkBudget(
        max_tokens,
        enough,
        floor=floor,
        target_s=target_s,
        expected=expected,
        served=live.served,
        decodes=decodes,
    )


def _positive_root(linear: float, quadratic: float, left: float) -> float:
    """The largest x of which linear * x + quadratic * x^2 is at most `left`."""
    if left <= 0:
        return 0.0
    if quadratic * left <= 1e-12 * linear**2:
        return left / linear if linear > 0 else inf
    return (sqrt(linear**2 + 4 * quadratic * left) - linear) / (2 * quadratic)
