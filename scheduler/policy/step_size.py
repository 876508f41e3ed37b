"""`StepSize`: how many tokens a step runs, at most, where prompts are computed.

More tokens in a step spread what every step costs, the reading of all weights above all, over more
of them; and each of them waits for all: a prompt's first token for the end of its step, and every
stream for its next one. So a step has as few as compute nearly as fast as any number would, which
the server learns from its own steps.
"""

from math import inf

from penstock.scheduler.config import SchedulerConfig
from penstock.scheduler.stats import StepClass, expected_work
from penstock.scheduler.step_model.live import LiveStepModel

# While nothing is known: a CPU's products are then within a few per cent of their best.
_UNKNOWN = 256
_LEAST = 128
# What every step costs may be this share of what its tokens do.
_SHARE = 0.1
# Two numbers of tokens between which a step's time grows evenly.
_FEW, _MANY = 256, 512
_LOOK_EVERY = 64  # steps


class StepSize:
    """As many as --max-num-batched-tokens says; where it says nothing and the host computes steps,
    as many as are worth while. A GPU's are as many as may be: its graphs are made for them."""

    def __init__(self, config: SchedulerConfig, live: LiveStepModel | None) -> None:
        self._most = most = config.max_step_tokens
        is_chosen = config.max_num_batched_tokens is None
        self._live = live if live and is_chosen and not live.served.runs_ahead else None
        self._tokens = most if self._live is None else min(most, _UNKNOWN)
        self._num_steps = 0

    def num_prompt_tokens(self, num_decodes: int) -> int:
        """Of the next step, which has so many decodes. These count as tokens too, but leave prompts
        half a step."""
        self._num_steps += 1
        if self._live is not None and self._num_steps % _LOOK_EVERY == 0:
            self._tokens = self._efficient(self._live)
        wanted = max(self._tokens - num_decodes, self._tokens // 2)
        return min(wanted, self._most - num_decodes)

    @property
    def enough(self) -> float:
        """So many prompt tokens that no further prompt joins the step."""
        return inf if self._live is None else self._tokens // 2

    def _efficient(self, live: LiveStepModel) -> int:
        few_s, many_s = (self._predicted(live, num) for num in (_FEW, _MANY))
        if few_s is None or many_s is None:
            return self._tokens
        token_s = (many_s - few_s) / (_MANY - _FEW)
        step_s = few_s - token_s * _FEW
        wanted = step_s / (_SHARE * token_s) if token_s > 0 else inf
        tokens = _LEAST
        while tokens < min(wanted, self._most):
            tokens *= 2
        return min(tokens, self._most)

    @staticmethod
    def _predicted(live: LiveStepModel, num_tokens: int) -> float | None:
        windows = [group.window for group in live.served.attention]
        amounts = live.served.amounts(expected_work(windows, chunk=num_tokens, start=0))
        # A prompt attends to as much, whatever its chunks are.
        amounts = amounts._replace(attention_flops=0, prefill_kv_bytes=0)
        for kind in (StepClass.PREFILL, StepClass.MIXED):
            if (time_s := live.predict(amounts, kind)) is not None:
                return time_s
        return None
