"""How long a step takes, and a run of the scheduler: sums over what the launch code launches."""

from tests.bench.gpu.launches import Model, Step  # isort: skip: turns the interpreter on

from collections.abc import Callable
from functools import cache

import torch

from penstock.engine.executors.cuda.chunk_steps import chunk_sizes
from penstock.engine.executors.cuda.graphs import captured_sizes
from penstock.engine.models.config import ModelConfig
from penstock.scheduler.config import SchedulerConfig
from penstock.scheduler.groups import KVGroup
from penstock.scheduler.scheduler import Scheduler
from penstock.scheduler.types import Request, SampledTokens
from tests.bench.gpu.assumptions import Assumptions, Early, Timed, timed
from tests.bench.gpu.work import Work, Workbench
from tests.support.compile_kernels import QUANTIZED
from tests.support.paths import MODEL_CONFIGS

# `tests.bench.engine.steps` times steps 7 to 46 after the context.
STEPS_SINCE = 26
# Which microseconds of a launch are counted: all of them, or those that the memory or the matrix
# units take where they take longer than the other.
Count = Callable[[Timed], float]


def all_of(one: Timed) -> float:
    return one.us


def of_memory(one: Timed) -> float:
    return one.memory_us if one.memory_us > one.matrix_us else 0.0


def of_matrix(one: Timed) -> float:
    return one.matrix_us if one.matrix_us >= one.memory_us else 0.0


class StepTimes:
    """Of one model. Contexts are rounded up or down, so that few steps are recorded."""

    def __init__(
        self,
        model: str,
        given: Assumptions,
        max_rows: int = 256,
        codes: str | None = None,
        count: Count = all_of,
        early: Early = Early.AS_ROOM_ALLOWS,
        kv_dtype: torch.dtype = torch.bfloat16,
    ) -> None:
        """codes: of the weights, one of QUANTIZED. kv_dtype: of keys and values. count: what `us`
        and `of_batch` sum."""
        self._model = model, max_rows, codes, kv_dtype
        self._given, self._early, self._count = given, early, count
        self._known: dict[Step, float] = {}
        self._sizes = captured_sizes(max_rows)
        config = ModelConfig.from_dir(MODEL_CONFIGS / model)
        self._chunk_sizes = chunk_sizes(config, 1, "NVIDIA H200", torch.bfloat16, 2048)

    def launches(self, step: Step) -> list[Timed]:
        return timed(self.works(step), self._given, self._early)

    def works(self, step: Step) -> list[Work]:
        return _works(*self._model, step)

    def us(self, step: Step) -> float:
        if step not in self._known:
            self._known[step] = sum(map(self._count, self.launches(step)))
        return self._known[step]

    def of_batch(self, decodes: list[int], chunks: list[tuple[int, int]]) -> float:
        """A step of the scheduler, with the mean context of its decodes."""
        mean = sum(decodes) // len(decodes) // 256 * 256 + 128 if decodes else 0
        if not chunks:
            size = next(size for size in self._sizes if size >= len(decodes))
            return self.us(Step(decodes=(mean,) * size))
        count = sum(count for count, _ in chunks)
        total = len(decodes) + count
        graph = next((size for size in self._chunk_sizes if size >= total), None)
        each = max(16, count // len(chunks) // 16 * 16)
        of_chunks = ((each, 0),) * len(chunks)
        if graph:
            each = min(each, (graph - len(decodes)) // len(chunks))
            of_chunks = ((max(1, each), 0),) * len(chunks)
        return self.us(Step(decodes=(mean,) * len(decodes), chunks=of_chunks, graph=graph))


@cache
def _model(model: str, max_rows: int, codes: str | None, kv_dtype: torch.dtype) -> Model:
    of_weights = None if codes is None else QUANTIZED[codes]
    path = MODEL_CONFIGS / model
    return Model(path, max_rows=max_rows, codes=of_weights, kv_dtype=kv_dtype)


@cache
def _works(
    model: str, max_rows: int, codes: str | None, kv_dtype: torch.dtype, step: Step
) -> list[Work]:
    bench = Workbench()
    launches = _model(model, max_rows, codes, kv_dtype).launches(step)
    return [bench.of(one, step) for one in launches]


def served(times: StepTimes, requests: list[Request], max_batched_tokens: int) -> tuple[float, int]:
    """Seconds and steps until all of these requests, there at the start, have ended."""
    config = SchedulerConfig(max_num_seqs=256, max_num_batched_tokens=max_batched_tokens)
    scheduler = Scheduler(config, groups=[KVGroup(40_000)], block_size=64, max_model_len=2048)
    for request in requests:
        scheduler.add(request)
    us, num_steps, num_open = 0.0, 0, len(requests)
    while num_open:
        batch = scheduler.schedule(0.0)
        assert batch is not None
        num = batch.num_decodes
        chunks = list(zip(batch.num_tokens[num:], batch.starts[num:], strict=True))
        us += times.of_batch([start + 1 for start in batch.starts[:num]], chunks)
        num_steps += 1
        sampled = SampledTokens(step=batch.step, token_ids=[7] * sum(batch.samples))
        num_open -= sum(output.finish is not None for output in scheduler.update(sampled))
    return us / 1e6, num_steps
