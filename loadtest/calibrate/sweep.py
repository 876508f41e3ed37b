"""A short sweep of loads through an engine in this process: from one sequence to as many as run."""

import logging
import time
from collections.abc import Callable, Iterable
from random import Random

import msgspec

from penstock.engine.step.executor import Executor
from penstock.engine.step.loop import EngineLoop
from penstock.engine.step.messages import FromEngine, StepReport, Submit, ToEngine
from penstock.scheduler.config import SchedulerConfig
from penstock.scheduler.scheduler import Scheduler
from penstock.scheduler.stats import class_of
from penstock.scheduler.step_model.samples import StepSample, StepSamples, sample_of
from penstock.scheduler.types import Request, RequestId, SamplingParams

logger = logging.getLogger(__name__)

# Each load is visited this often, so that a machine that becomes slower favours none.
_NUM_ROUNDS = 3
_MAX_OUTPUT = 96


class _TimeIsUp(Exception):
    """Ends the loop."""


class _ClosedLoop:
    """An inbox that keeps `num_open` requests open, until its time is up."""

    def __init__(self, info_max_len: int, vocab_size: int, seed: int) -> None:
        self.num_open = 0  # wanted
        self.until_s = 0.0
        self._ended = 0
        self._sent = 0
        self._max_len, self._vocab_size = info_max_len, vocab_size
        self._random = Random(seed)

    def receive(self, timeout_s: float | None) -> Iterable[ToEngine]:
        if time.monotonic() >= self.until_s:
            raise _TimeIsUp
        while self._sent - self._ended < self.num_open:
            self._sent += 1
            yield Submit(self._request())

    def on_ended(self) -> None:
        self._ended += 1

    def _request(self) -> Request:
        """Prompts of all magnitudes: as many from 16 to 32 tokens as from 1,024 to 2,048."""
        longest = self._max_len - _MAX_OUTPUT
        length = min(longest, int(2 ** self._random.uniform(2, longest.bit_length())))
        ids = self._random.choices(range(3, self._vocab_size), k=max(1, length))
        # No stop token ids, so that an answer has its full length.
        output = self._random.randint(4, _MAX_OUTPUT)
        return Request(
            id=RequestId(f"sweep-{self._sent}"),
            prompt_token_ids=tuple(ids),
            sampling=SamplingParams(max_tokens=output, temperature=0.0, seed=self._sent),
            arrival_s=time.monotonic(),
        )


def run_sweep(
    executor: Executor,
    config: SchedulerConfig,
    *,
    seconds: float,
    seed: int = 0,
    on_level: Callable[[int, int], None] = lambda number, total: None,
) -> list[StepSample]:
    """Steps under loads of 1, 2, 4, ... sequences, for `seconds` together.

    on_level: called with the number of each load and that of all of them, before it begins.
    """
    info, samples = executor.info, StepSamples()
    encoder = msgspec.msgpack.Encoder()
    inbox = _ClosedLoop(info.max_model_len, info.vocab_size, seed)
    last_end_s = 0.0

    def send(message: FromEngine) -> None:
        nonlocal last_end_s
        encoder.encode(message)  # as a server's engine does, in the host's time
        if not (isinstance(message, StepReport) and message.step):
            return
        was_idle, last_end_s = message.started_s > last_end_s, message.started_s + message.step_s
        for output in message.outputs.others.values():
            if output.finish:
                inbox.on_ended()
        if not (info.runs_ahead and was_idle):
            samples.add(
                sample_of(
                    message.step,
                    class_of(message.work),
                    info.amounts(message.work),
                    wait_s=message.device_s,
                    host_s=message.host_s,
                    runs_ahead=info.runs_ahead,
                )
            )

    scheduler = Scheduler(
        config,
        groups=info.kv_groups,
        block_size=info.block_size,
        max_model_len=info.max_model_len,
        num_cohorts=info.pipeline_parallel_size,
    )
    loop = EngineLoop(scheduler, executor, inbox, send)
    levels = [1 << i for i in range(config.max_num_seqs.bit_length()) if 1 << i <= 256]
    visits = [level for number in range(_NUM_ROUNDS) for level in levels[:: (-1) ** number]]
    for number, level in enumerate(visits):
        on_level(number, len(visits))
        inbox.num_open = level
        inbox.until_s = time.monotonic() + seconds / len(visits)
        try:
            while True:
                loop.step()
        except _TimeIsUp:
            continue
    return samples.all()
