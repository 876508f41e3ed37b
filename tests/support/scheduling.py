"""What the scheduler's tests share: requests in a word, and a driver for the halves of a step."""

from collections import defaultdict, deque
from collections.abc import Callable, Iterable
from dataclasses import replace

from penstock.engine.executors.scripted import scripted_info
from penstock.engine.memory.pool.kv_memory import KVMemory
from penstock.engine.memory.tiers.disk_tier import BlockMemory, DiskTier
from penstock.engine.memory.tiers.host_tier import HostTier
from penstock.engine.step.executor import PendingTokens
from penstock.engine.step.model_info import EncoderInfo
from penstock.scheduler.cache.group_cache import GroupCache
from penstock.scheduler.cache.kv_events import KVEvents
from penstock.scheduler.config import SchedulerConfig
from penstock.scheduler.drafts.drafter import Drafter
from penstock.scheduler.scheduler import Scheduler
from penstock.scheduler.types import (
    Finish,
    Insert,
    Pooling,
    PromptOutput,
    Request,
    RequestId,
    RequestOutput,
    SampledTokens,
    SamplingParams,
    ScheduledBatch,
    TokenLogprobs,
)
from tests.support.drafting import OracleProposer, ProposingExecutor

EOS = 2


def make_request(
    name: str,
    prompt: list[int] | int,
    *,
    max_tokens: int = 8,
    n: int = 1,
    seed: int = 0,
    temperature: float = 0.0,
    priority: int = 0,
    tenant: str = "",
    ttft_target_s: float | None = None,
    itl_target_s: float | None = None,
    arrival_s: float = 0.0,
    cache_salt: str = "",
    stop_token_ids: tuple[int, ...] = (),
    num_prompt_logprobs: int | None = None,
    num_logprobs: int | None = None,
    pooling: Pooling | None = None,
    adapter: str | None = None,
    max_drafts: int | None = None,
    inserts: tuple[Insert, ...] = (),
) -> Request:
    """A request whose prompt is given, or as many made-up ids as the number says."""
    ids = [3 + i % 97 for i in range(prompt)] if isinstance(prompt, int) else prompt
    sampling = SamplingParams(
        max_tokens=max_tokens,
        seed=seed,
        temperature=temperature,
        stop_token_ids=stop_token_ids,
        num_logprobs=num_logprobs,
        num_prompt_logprobs=num_prompt_logprobs,
    )
    return Request(
        id=RequestId(name),
        prompt_token_ids=tuple(ids),
        sampling=sampling,
        arrival_s=arrival_s,
        n=n,
        priority=priority,
        tenant=tenant,
        ttft_target_s=ttft_target_s,
        itl_target_s=itl_target_s,
        cache_salt=cache_salt,
        pooling=pooling,
        adapter=adapter,
        max_drafts=max_drafts,
        inserts=inserts,
    )


class Pending:
    """A step that has run."""

    def __init__(self, sampled: SampledTokens) -> None:
        self._sampled = sampled

    def wait(self) -> SampledTokens:
        return self._sampled


class Driver:
    """The scheduler on a paranoid `ScriptedExecutor`: what the engine loop does, at any pace.

    launch() and collect() are the halves of a step, so a test can run ahead of the device.
    """

    def __init__(
        self,
        *,
        num_blocks: int = 64,
        block_size: int = 4,
        max_model_len: int = 128,
        config: SchedulerConfig | None = None,
        vocab_size: int = 512,
        kept: KVMemory | None = None,
        windows: tuple[int | None, ...] = (None,),
        more_blocks: tuple[int, ...] = (),
        num_states: int = 0,
        make_tier: Callable[[BlockMemory], DiskTier | HostTier] | None = None,
        events: KVEvents | None = None,
        num_cohorts: int = 1,
        drafter: Drafter | None = None,
        propose: OracleProposer | None = None,
        num_in_flight: int | None = None,
        encoder: EncoderInfo | None = None,
    ) -> None:
        """kept: where the pool is, else. windows, more_blocks,
        num_states: of groups of layers. make_tier: of one without threads. propose: for a draft
        model. num_in_flight: steps that `run` has there; as many as cohorts where it is not
        said."""
        config = config or SchedulerConfig(max_num_seqs=8, max_num_batched_tokens=32)
        self.config = config
        self.windows = windows
        info = scripted_info(
            vocab_size=vocab_size,
            max_model_len=max_model_len,
            block_size=block_size,
            num_blocks=num_blocks,
            windows=windows,
            more_blocks=more_blocks,
            num_states=num_states,
        )
        info = replace(info, encoder=encoder)
        self.executor = ProposingExecutor(
            info, propose, paranoid=True, kept=kept, make_tier=make_tier
        )
        self.tier: DiskTier | None = self.executor.tier  # type: ignore[assignment]
        self.scheduler = Scheduler(
            config,
            groups=self.executor.info.kv_groups,
            block_size=block_size,
            max_model_len=max_model_len,
            journals=self.executor.journals,
            tier=self.tier,
            events=events,
            num_cohorts=num_cohorts,
            drafter=drafter,
            encoder=self.executor.info.encoder_costs,
        )
        self.num_in_flight = num_in_flight or num_cohorts
        self.launched: deque[PendingTokens] = deque()
        self.batches: list[ScheduledBatch] = []
        self.tokens: dict[tuple[str, int], list[int]] = defaultdict(list)
        self.logprobs: dict[tuple[str, int], list[TokenLogprobs]] = defaultdict(list)
        self.num_cached: dict[tuple[str, int], int] = {}
        self.finishes: dict[tuple[str, int], list[Finish]] = defaultdict(list)
        self.prompts: dict[str, list[PromptOutput]] = defaultdict(list)
        self.now = 0.0

    @property
    def kv(self) -> GroupCache:
        """Of the first group."""
        return self.scheduler._kv.blocks[0]

    def add(self, request: Request, *, is_ready: bool = True) -> None:
        """One that may have inserts."""
        self.scheduler.add(request, is_ready=is_ready)
        self.executor.prepare(request)

    def launch(self) -> ScheduledBatch | None:
        batch = self.scheduler.schedule(self.now)
        if batch:
            self.batches.append(batch)
            self.launched.append(self.executor.execute(batch))
        return batch

    def collect(self) -> None:
        self.record(self.scheduler.update(self.launched.popleft().wait()))

    def record(self, outputs: Iterable[RequestOutput]) -> None:
        for output in outputs:
            key = (output.request_id, output.index)
            if output.prompt:
                assert output.index == 0 and not self.tokens[key], output
                self.prompts[output.request_id].append(output.prompt)
            self.tokens[key] += output.token_ids
            self.logprobs[key] += output.logprobs or []
            self.num_cached[key] = output.num_cached_tokens
            if output.finish:
                self.finishes[key].append(output.finish)

    def step(self) -> ScheduledBatch | None:
        batch = self.launch()
        if self.launched and (not batch or len(self.launched) >= self.num_in_flight):
            self.collect()
        return batch

    def run(self, max_steps: int = 20000) -> None:
        """Steps until every request has ended."""
        for _ in range(max_steps):
            if not self.scheduler.has_work:
                return
            if self.tier:
                self.tier.work()
            self.step()
            self.now += 0.01
        raise AssertionError(f"requests are still open after {max_steps} steps")


def run_alone(
    request: Request,
    *,
    max_model_len: int = 128,
    windows: tuple[int | None, ...] = (None,),
    num_states: int = 0,
    encoder: EncoderInfo | None = None,
) -> Driver:
    """The request in an engine of its own, with room for everything, to its end."""
    more_blocks = (1024,) * (len(windows) - 1)
    driver = Driver(
        num_blocks=1024,
        max_model_len=max_model_len,
        windows=windows,
        more_blocks=more_blocks,
        num_states=num_states,
        encoder=encoder,
    )
    driver.add(request)
    driver.run()
    return driver


def tokens_alone(
    request: Request, *, max_model_len: int = 128, num_states: int = 0
) -> dict[tuple[str, int], list[int]]:
    """What the request's answers are there."""
    return run_alone(request, max_model_len=max_model_len, num_states=num_states).tokens
