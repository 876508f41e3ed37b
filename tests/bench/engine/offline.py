"""The offline benchmark: requests of mixed lengths, all there at the start, in one process.

Source: the workload of nano-vllm's bench.py (github.com/GeeeekExplorer/nano-vllm): 256 requests,
prompt and output lengths uniform in 100 to 1,024, temperature 0.6, no end before the length.
"""

import json
import random
import time
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, replace

import torch

from penstock.engine.ranks.layout import RankLayout
from penstock.engine.step.executor import Executor
from penstock.engine.step.loop import EngineLoop
from penstock.engine.step.messages import FromLoop, StepReport, Submit, ToEngine
from penstock.scheduler.config import SchedulerConfig
from penstock.scheduler.scheduler import Scheduler
from penstock.scheduler.types import Request, RequestId, SamplingParams
from tests.bench.engine.executors import build_executor, build_ranks
from tests.bench.engine.models import model_dir
from tests.bench.engine.timing import report


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """Lengths are uniform in [shortest, longest], of prompts and of outputs."""

    num_requests: int
    shortest: int
    longest: int
    max_batched_tokens: int
    seed: int = 0


FULL = Workload(num_requests=256, shortest=100, longest=1024, max_batched_tokens=8192)
TINY = Workload(num_requests=2, shortest=3, longest=8, max_batched_tokens=32)


def measure_offline(model: str, tiny: bool, enforce_eager: bool) -> None:
    workload = TINY if tiny else FULL
    scheduler = SchedulerConfig(
        max_num_seqs=workload.num_requests, max_num_batched_tokens=workload.max_batched_tokens
    )
    with model_dir(model, tiny) as directory:
        executor = build_executor(
            directory,
            max_model_len=2 * workload.longest,
            max_num_seqs=scheduler.max_num_seqs,
            max_num_batched_tokens=scheduler.max_step_tokens,
            enforce_eager=enforce_eager,
        )
    _report(executor, scheduler, model, workload, part="offline")


def measure_ranks(model: str, tiny: bool, enforce_eager: bool, layout: RankLayout) -> None:
    """The same by several GPUs. bubble_ratio: of stages, what each waits for others."""
    num_gpus = torch.cuda.device_count()
    at: dict[str, object] = {
        "part": "ranks",
        "tensor_parallel_size": layout.tensor_size,
        "pipeline_parallel_size": layout.num_stages,
    }
    if num_gpus < layout.size and not tiny:
        report(**at, model=model, skipped=f"needs {layout.size} GPUs, and there are {num_gpus}")
        return
    workload = TINY if tiny else FULL
    scheduler = SchedulerConfig(
        max_num_seqs=workload.num_requests, max_num_batched_tokens=workload.max_batched_tokens
    )
    with model_dir(model, tiny) as directory:
        if tiny:  # a layer for each stage
            file = directory / "config.json"
            fields = json.loads(file.read_text(encoding="utf-8"))
            file.write_text(json.dumps(fields | {"num_hidden_layers": layout.num_stages}))
        ranks = build_ranks(
            directory,
            layout,
            max_model_len=2 * workload.longest,
            scheduler=scheduler,
            enforce_eager=enforce_eager,
        )
        try:
            _report(ranks, scheduler, model, workload, **at)
        finally:
            ranks.close()


def _report(
    executor: Executor, scheduler: SchedulerConfig, model: str, workload: Workload, **at: object
) -> None:
    # A short warm-up, which compiles the kernels.
    warm = replace(workload, num_requests=workload.num_requests // 2, longest=workload.shortest)
    Run(executor, scheduler).of(requests_of(warm, executor.info.vocab_size))
    requests = requests_of(workload, executor.info.vocab_size)
    run = Run(executor, scheduler)
    seconds = run.of(requests)
    output = sum(request.sampling.max_tokens for request in requests)
    assert run.num_tokens == output, (run.num_tokens, output)
    report(
        **at,
        model=model,
        requests=len(requests),
        input_tokens=sum(len(request.prompt_token_ids) for request in requests),
        output_tokens=output,
        seconds=seconds,
        tokens_per_s=output / seconds,
        steps=run.num_steps,
        bytes_per_s=run.model_bytes / seconds,
        engine_idle_ratio=1 - run.busy_s / seconds,
        preemptions=run.num_preemptions,
        bubble_ratio=None if run.computed_s is None else 1 - run.computed_s / run.busy_s,
    )


def requests_of(workload: Workload, vocab_size: int) -> list[Request]:
    chosen = random.Random(workload.seed)

    def length() -> int:
        return chosen.randint(workload.shortest, workload.longest)

    return [
        Request(
            id=RequestId(str(index)),
            prompt_token_ids=tuple(chosen.choices(range(vocab_size), k=length())),
            sampling=SamplingParams(max_tokens=length(), temperature=0.6, seed=index),
            arrival_s=0.0,
        )
        for index in range(workload.num_requests)
    ]


class Run:
    """One round of requests through a new `EngineLoop`, and its step statistics."""

    def __init__(self, executor: Executor, config: SchedulerConfig) -> None:
        info = executor.info
        scheduler = Scheduler(
            config,
            groups=info.kv_groups,
            block_size=info.block_size,
            max_model_len=info.max_model_len,
            num_cohorts=info.pipeline_parallel_size,
        )
        self._commands: deque[ToEngine] = deque()
        self._loop = EngineLoop(scheduler, executor, self, self._note)
        self._num_open = 0
        self._num_ahead = info.max_in_flight - 1
        self.num_tokens = self.num_steps = self.num_preemptions = self.model_bytes = 0
        self.busy_s = 0.0
        self.computed_s: float | None = None

    def of(self, requests: list[Request]) -> float:
        """Seconds until the last of them has ended."""
        self._commands.extend(Submit(request) for request in requests)
        self._num_open = len(requests)
        start = time.perf_counter()
        while self._num_open:
            self._loop.step()
        seconds = time.perf_counter() - start
        for _ in range(self._num_ahead):
            self._loop.step()  # collects what was ahead
        return seconds

    def receive(self, timeout_s: float | None) -> Iterable[ToEngine]:
        """See `penstock.engine.step.loop.Inbox`."""
        while self._commands:
            yield self._commands.popleft()

    def _note(self, message: FromLoop) -> None:
        assert isinstance(message, StepReport), message
        self.num_steps += 1
        self.busy_s += message.step_s
        if message.computed_s is not None:
            self.computed_s = (self.computed_s or 0.0) + message.computed_s
        self.model_bytes += message.model_bytes
        self.num_preemptions = message.stats.preemptions_total
        for output in message.outputs:
            self.num_tokens += len(output.token_ids)
            self._num_open -= output.finish is not None
