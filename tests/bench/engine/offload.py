"""What `--kv-offload-gb` gains on a GPU: blocks to the host's memory and back against the link, and
the time to a first token with a prefix that is computed, in the host's memory, or in the KV cache.
"""

import random
import statistics
import time
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import partial

import torch

from penstock.engine.executors.cuda.executor import CudaExecutor
from penstock.engine.executors.cuda.pool_mover import PoolMover, words_of
from penstock.engine.kernels.blocks import add_checksums, gather_blocks, scatter_blocks
from penstock.engine.memory.tiers.host_tier import HostTier, Move
from penstock.engine.step.loop import EngineLoop
from penstock.engine.step.messages import FromLoop, StepReport, Submit, ToEngine
from penstock.scheduler.config import SchedulerConfig
from penstock.scheduler.scheduler import Scheduler
from penstock.scheduler.types import Request, RequestId, RequestOutput, SamplingParams
from tests.bench.engine.driver import Driver
from tests.bench.engine.executors import build_executor
from tests.bench.engine.models import model_dir
from tests.bench.engine.timing import Call, report, seconds_per_call, the_device

# For memory to be pinned, or blocks to be copied: far more than either takes.
_PATIENCE_S = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """counts: blocks that are moved at once. prefixes: in tokens, before `question` more.
    num_prompts: of each prefix, which all have room in host_bytes."""

    counts: tuple[int, ...]
    prefixes: tuple[int, ...]
    question: int
    num_prompts: int
    repeats: int
    host_bytes: int
    max_batched_tokens: int


FULL = Sizes(
    counts=(1, 4, 16),
    prefixes=(1024, 4096, 8192),
    question=64,
    num_prompts=4,
    repeats=7,
    host_bytes=6 * 2**30,
    max_batched_tokens=8192,
)
TINY = Sizes(
    counts=(1, 3),
    prefixes=(32,),
    question=4,
    num_prompts=2,
    repeats=1,
    host_bytes=2**20,
    max_batched_tokens=64,
)


def measure_offload(model: str, tiny: bool, enforce_eager: bool) -> None:
    sizes = TINY if tiny else FULL
    config = SchedulerConfig(max_num_seqs=1, max_num_batched_tokens=sizes.max_batched_tokens)
    with model_dir(model, tiny) as directory:
        executor = build_executor(
            directory,
            max_model_len=max(sizes.prefixes) + sizes.question + 1,
            max_num_seqs=config.max_num_seqs,
            max_num_batched_tokens=config.max_step_tokens,
            enforce_eager=enforce_eager,
            kv_offload_bytes=sizes.host_bytes,
        )
    tier = executor.tier
    assert isinstance(tier, HostTier), tier
    Driver(executor).fill(sizes.max_batched_tokens)
    # Pages that are being pinned would slow both what is copied and what is computed.
    _wait_until(tier, lambda: tier._pieces.num_grown == tier._pieces.num_slots)
    for count in sizes.counts:
        _measure_moves(executor, tier, model, count, sizes.repeats)
    for prefix in sizes.prefixes:
        _measure_first_token(executor, tier, config, model, prefix, sizes)


@torch.inference_mode()
def _measure_moves(
    executor: CudaExecutor, tier: HostTier, model: str, count: int, repeats: int
) -> None:
    """Two rows, before any block is anybody's. Blocks and slots are next to each other."""
    mover = tier._mover
    assert isinstance(mover, PoolMover), mover
    count = min(count, mover.most_blocks(0))
    outward = [Move(block_id, block_id, 0) for block_id in range(count)]
    inward = [move._replace(block_id=count + move.block_id) for move in outward]
    parts = words_of(executor.pool.groups[0])
    for words in parts:
        words[:, count : 2 * count].zero_()
    to_host, to_device = [], []
    for _ in range(repeats):
        gathering = mover.gather(0, outward)
        checksums = gathering.wait()
        scattering = mover.scatter(0, inward, checksums, [mover.fence()])
        scattering.wait()
        to_host.append(gathering.seconds)
        to_device.append(scattering.seconds)
    are_right = all(torch.equal(words[:, :count], words[:, count : 2 * count]) for words in parts)
    num_bytes = count * mover.piece_bytes[0]
    gather, scatter = _kernels(executor, mover, count)
    links = mover.measure()
    for direction, seconds, kernel, link in (
        ("to the host", to_host, gather, links[0]),
        ("to the device", to_device, scatter, links[1]),
    ):
        bytes_per_s = num_bytes / statistics.median(seconds)
        report(
            part="offload",
            model=model,
            direction=direction,
            blocks=count,
            block_bytes=mover.piece_bytes[0],
            gb_per_s=bytes_per_s / 1e9,
            link_gb_per_s=link / 1e9,
            of_link=bytes_per_s / link,
            kernel_gb_per_s=num_bytes / seconds_per_call([kernel]) / 1e9,
            is_right=are_right,
        )


def _kernels(executor: CudaExecutor, mover: PoolMover, count: int) -> tuple[Call, Call]:
    """What runs between the pool and a staging buffer, with checksums: of a gather, and of a
    scatter, which reads the staging buffer twice."""
    parts = words_of(executor.pool.groups[0])
    device = parts[0].device
    block_ids = torch.arange(count, dtype=torch.int32, device=device)
    pieces = torch.zeros(count, mover.piece_bytes[0] // 4, dtype=torch.int32, device=device)
    found, expected = torch.zeros(2, count, dtype=torch.int64, device=device)
    starts = [0]
    for words in parts:
        starts.append(starts[-1] + words.shape[0] * words.shape[2])

    def gather() -> None:
        for words, start in zip(parts, starts, strict=False):
            gather_blocks(block_ids, words, start, pieces, found)

    def scatter() -> None:
        add_checksums(pieces, found)
        # By sums that stay the same, or nothing would be written.
        for words, start in zip(parts, starts, strict=False):
            scatter_blocks(block_ids, words, start, pieces, expected, expected)

    return gather, scatter


def _measure_first_token(
    executor: CudaExecutor,
    tier: HostTier,
    config: SchedulerConfig,
    model: str,
    prefix: int,
    sizes: Sizes,
) -> None:
    """Each prompt is computed, then others take its blocks in the pool, which has room for one;
    then it comes from the host's memory, and then from the pool. The last two compute the same
    tokens, so they must have the same answer."""
    num_tokens = prefix + sizes.question
    engine = Engine(executor, tier, config, num_tokens + 1)
    chosen = random.Random(prefix)
    prompts = [
        tuple(chosen.choices(range(executor.info.vocab_size), k=num_tokens))
        for _ in range(sizes.num_prompts)
    ]
    computed, loaded, cached = [], [], []
    for prompt in prompts:
        computed.append(engine.ask(prompt))
        _wait_until(tier, partial(_is_stored, tier))
    for prompt in prompts:
        loaded.append(engine.ask(prompt))
        cached.append(engine.ask(prompt))
    before = [answer.num_cached for answer in computed]
    assert not any(before), before
    memory = tier.stats().memory
    assert memory
    report(
        part="offload ttft",
        model=model,
        prefix=prefix,
        question=sizes.question,
        loaded_tokens=min(answer.num_cached for answer in loaded),
        computed_ms=_median_ms(computed),
        from_memory_ms=_median_ms(loaded),
        from_pool_ms=_median_ms(cached),
        is_right=not memory.damaged_blocks_total
        and all(answer.num_cached >= prefix for answer in (*loaded, *cached))
        and [answer.token_id for answer in loaded] == [answer.token_id for answer in cached],
    )


@dataclass(frozen=True, slots=True)
class Answer:
    """ttft_s: from the call to the first token. num_cached: tokens that were not computed."""

    token_id: int
    num_cached: int
    ttft_s: float


class Engine:
    """An `EngineLoop` over as many blocks as one sequence needs, one request at a time."""

    def __init__(
        self,
        executor: CudaExecutor,
        tier: HostTier,
        config: SchedulerConfig,
        max_model_len: int,
    ) -> None:
        info, self._tier = executor.info, tier
        num_blocks = -(-max_model_len // info.block_size)
        scheduler = Scheduler(
            config,
            groups=[replace(group, num_blocks=num_blocks) for group in info.kv_groups],
            block_size=info.block_size,
            max_model_len=max_model_len,
            tier=tier,
        )
        self._commands: deque[ToEngine] = deque()
        self._loop = EngineLoop(scheduler, executor, self, self._note)
        self._outputs: list[tuple[RequestOutput, float]] = []
        self._num_requests = 0

    def ask(self, prompt: tuple[int, ...]) -> Answer:
        """For one token."""
        self._num_requests += 1
        request = Request(
            id=RequestId(f"{len(prompt)}-{self._num_requests}"),
            prompt_token_ids=prompt,
            sampling=SamplingParams(max_tokens=1, temperature=0.0),
            arrival_s=0.0,
        )
        self._outputs.clear()
        started_s = time.perf_counter()
        self._commands.append(Submit(request))
        while not self._outputs:
            self._loop.step()
        [(output, at_s)] = self._outputs
        self._loop.step()  # collects the step that was ahead
        return Answer(output.token_ids[0], output.num_cached_tokens, at_s - started_s)

    def receive(self, timeout_s: float | None) -> Iterable[ToEngine]:
        """See `penstock.engine.step.loop.Inbox`."""
        _work(self._tier)
        # As where commands come from another process: not at once, if there are none.
        if timeout_s and not self._commands:
            time.sleep(timeout_s)
        while self._commands:
            yield self._commands.popleft()

    def _note(self, message: FromLoop) -> None:
        assert isinstance(message, StepReport), message
        now_s = time.perf_counter()
        self._outputs += [(output, now_s) for output in message.outputs]


def _median_ms(answers: list[Answer]) -> float:
    return statistics.median(answer.ttft_s for answer in answers) * 1e3


def _is_stored(tier: HostTier) -> bool:
    with tier._lock:
        return not (any(tier._pending) or tier._gathering)


def _wait_until(tier: HostTier, is_done: Callable[[], bool]) -> None:
    ends_s = time.monotonic() + _PATIENCE_S
    while not is_done():
        assert time.monotonic() < ends_s, "blocks did not get to the host's memory"
        _work(tier)
        time.sleep(1e-3)


def _work(tier: HostTier) -> None:
    """Without a GPU there are no threads for it."""
    if the_device().type != "cuda":
        tier.work()
