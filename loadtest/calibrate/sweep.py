"""A short sweep of loads through an engine in this process: from one sequence to as many as run."""

import time
from collections.abc import Callable, Iterable
from random import Random

import msgspec

from penstock.engine.step.executor import Executor
from penstock.engine.step.loop import EngineLoop
from penstock.engine.step.messages import FromEngine, StepReport, Submit, ToEngine
from penstock.engine.step.model_info import ModelInfo
from penstock.scheduler.config import SchedulerConfig
from penstock.scheduler.scheduler import Scheduler
from penstock.scheduler.stats import class_of
from penstock.scheduler.step_model.samples import StepSample, StepSamples, sample_of
from penstock.scheduler.types import Request, RequestId, SamplingParams

# Each load is visited this often, so that a machine that becomes slower favours none.
_NUM_ROUNDS = 3
_MAX_OUTPUT = 96


class _TimeIsUp(Exception):
    """Ends the loop."""


class _Sweep:
    """The other side of an engine's loop: its inbox keeps `num_open` requests open until the time
    is up, and what it sends becomes samples."""

    def __init__(self, info: ModelInfo) -> None:
        self.num_open = 0  # wanted
        self.until_s = 0.0
        self.samples = StepSamples()
        self._ended = 0
        self._sent = 0
        self._info = info
        self._random = Random(0)
        self._encoder = msgspec.msgpack.Encoder()
        self._last_end_s = 0.0

    def receive(self, timeout_s: float | None) -> Iterable[ToEngine]:
        if time.monotonic() >= self.until_s:
            raise _TimeIsUp
        while self._sent - self._ended < self.num_open:
            self._sent += 1
            yield Submit(self._request())

    def send(self, message: FromEngine) -> None:
        self._encoder.encode(message)  # as a server's engine does, in the host's time
        if not (isinstance(message, StepReport) and message.step):
            return
        was_idle = message.started_s > self._last_end_s
        self._last_end_s = message.started_s + message.step_s
        self._ended += sum(bool(output.finish) for output in message.outputs.others.values())
        info = self._info
        if not (info.runs_ahead and was_idle):
            sample = sample_of(
                message.step,
                class_of(message.work),
                info.amounts(message.work),
                wait_s=message.device_s,
                host_s=message.host_s,
                runs_ahead=info.runs_ahead,
            )
            self.samples.add(sample)

    def _request(self) -> Request:
        """Prompts of all magnitudes: as many from 16 to 32 tokens as from 1,024 to 2,048."""
        longest = self._info.max_model_len - _MAX_OUTPUT
        length = min(longest, int(2 ** self._random.uniform(2, longest.bit_length())))
        ids = self._random.choices(range(3, self._info.vocab_size), k=max(1, length))
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
    on_level: Callable[[int, int], None],
) -> list[StepSample]:
    """Steps under loads of 1, 2, 4, ... sequences, for `seconds` together. on_level: called with
    the number of each load and that of all of them, before it begins."""
    info = executor.info
    sweep = _Sweep(info)
    scheduler = Scheduler(
        config,
        groups=info.kv_groups,
        block_size=info.block_size,
        max_model_len=info.max_model_len,
        num_cohorts=info.pipeline_parallel_size,
    )
    loop = EngineLoop(scheduler, executor, sweep, sweep.send)
    levels = [1 << i for i in range(config.max_num_seqs.bit_length()) if 1 << i <= 256]
    visits = [level for number in range(_NUM_ROUNDS) for level in levels[:: (-1) ** number]]
    for number, level in enumerate(visits):
        on_level(number, len(visits))
        sweep.num_open = level
        sweep.until_s = time.monotonic() + seconds / len(visits)
        try:
            while True:
                loop.step()
        except _TimeIsUp:
            continue
    return sweep.samples.all()
