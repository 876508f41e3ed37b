"""`simulate`: a workload through replicas behind a router, in virtual time.

Each replica has a clock of its own. The one that is furthest behind steps next, and a request is
routed when no replica that has work is behind its arrival; so a router sees what it would have
seen, but for the steps under way.
"""

import heapq
import math
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import NamedTuple

from penstock.engine.process.garbage import uncollected
from penstock.engine.step.messages import Refused
from penstock.loadtest.report.report import Replay, RequestResult, seconds_of
from penstock.loadtest.simulate.replica import Replica, SimulatedServer, StepRecord
from penstock.loadtest.workload.config import WorkloadConfig
from penstock.loadtest.workload.workload import TimedRequest, make_prompt
from penstock.scheduler.batch import StepOutputs
from penstock.scheduler.routing import RouterPolicy, make_router, prefix_digests
from penstock.scheduler.stats import SchedulerStats, StepClass
from penstock.scheduler.types import Request, RequestId, SamplingParams

# Steps from one question to the judge to the next, and the percentile that its targets are of.
_JUDGED_EVERY, PERCENT = 64, 99.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """num_replicas of one server, and how requests are spread over them. max_concurrency: as in
    penstock bench. seed: of the spread of step times; None for none."""

    server: SimulatedServer
    num_replicas: int = 1
    router: RouterPolicy = RouterPolicy.LEAST_LOADED
    max_concurrency: int | None = None
    seed: int | None = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Simulated:
    """observed: as of a server that was measured. steps: of each replica. stats: at the end.
    num_outside: steps outside of what the step model was checked on. cpu_s: of this process.
    """

    observed: Replay
    steps: list[list[StepRecord]]
    stats: list[SchedulerStats]
    num_outside: int
    cpu_s: float

    @property
    def all_steps(self) -> list[StepRecord]:
        return [step for steps in self.steps for step in steps]

    @property
    def num_steps(self) -> int:
        return sum(map(len, self.steps))


class TargetJudge:
    """Ends a simulation once more requests are too slow than a percentile leaves out."""

    def __init__(self, limits_ms: dict[str, float], num_requests: int) -> None:
        self._limits_s = {metric: limit / 1e3 for metric, limit in limits_ms.items()}
        # The sorted values up to the percentile's rank must be within the limit.
        self._num_allowed = num_requests - 1 - math.floor((num_requests - 1) * PERCENT / 100)
        self._num_late = dict.fromkeys(limits_ms, 0)

    def on_end(self, result: RequestResult) -> None:
        for metric, limit_s in self._limits_s.items():
            self._num_late[metric] += seconds_of(result, metric) > limit_s

    def is_over(self, open_results: Iterable[RequestResult], now_s: float) -> bool:
        """Open requests count as soon as they are late, whatever becomes of them."""
        late = dict(self._num_late)
        ttft_s, e2el_s = (self._limits_s.get(metric, math.inf) for metric in ("ttft", "e2el"))
        for result in open_results:
            arrived = result.arrivals_s
            waited_s = (arrived[0] if arrived else now_s) - result.start_s
            if waited_s > ttft_s:
                late["ttft"] += 1
            if now_s - result.start_s > e2el_s:
                late["e2el"] += 1
        return any(num > self._num_allowed for num in late.values())


@lru_cache(maxsize=1024)
def _sampling(max_tokens: int) -> SamplingParams:
    """Made once for all requests that have it: its many fields take as long as all others."""
    return SamplingParams(max_tokens=max_tokens, temperature=0.0)


class _Arrival(NamedTuple):
    """A request on its way from the client. Ordered by time, then by number."""

    at_s: float
    number: int


def simulate(
    plan: Plan,
    requests: Sequence[TimedRequest],
    *,
    factors: dict[StepClass, float] | None = None,
    on_progress: Callable[[int, int], None] = lambda num_done, num_steps: None,
    judge: TargetJudge | None = None,
) -> Simulated:
    """factors: what step times are multiplied by, by class. on_progress: called now and then.

    The prompts of the requests must be token ids. Where the judge ends it, what was observed is
    marked as interrupted, and has only the requests that had ended.
    """
    return _Simulation(plan, requests, factors or {}, judge).run(on_progress)


def step_factors(server: SimulatedServer, sign: int) -> dict[StepClass, float]:
    """Makes every step as much shorter (-1) or longer (1) as the step model may be off."""
    errors = server.step_model.errors
    bias = {kind: min(errors[kind].bias, 0.9) if kind in errors else 0.0 for kind in StepClass}
    return {kind: 1 + sign * bias[kind] for kind in StepClass}


def as_ids(requests: list[TimedRequest], config: WorkloadConfig) -> list[TimedRequest]:
    """Texts become as many ids as they have tokens, and equal texts equal ids."""
    return [
        request
        if isinstance(request.prompt, list)
        else replace(
            request,
            prompt=make_prompt(
                f"{request.prompt}{request.messages}", request.num_prompt_tokens, config.vocab_size
            ),
        )
        for request in requests
    ]


class _Simulation:
    def __init__(
        self,
        plan: Plan,
        requests: Sequence[TimedRequest],
        factors: dict[StepClass, float],
        judge: TargetJudge | None,
    ) -> None:
        self._plan = plan
        self._judge = judge
        self._requests = requests
        self._router = make_router(plan.router)
        self._results: dict[RequestId, RequestResult] = {}
        # Called for every token of an open request, so that it is looked up once.
        self._note_arrival: dict[RequestId, Callable[[float], None]] = {}
        self._done: list[RequestResult] = []
        self._is_open_loop = plan.max_concurrency is None and any(r.arrival_s for r in requests)
        num_first = plan.max_concurrency or len(requests)
        self._unsent = iter(range(num_first, len(requests)))
        self._arrivals = [_Arrival(r.arrival_s, i) for i, r in enumerate(requests[:num_first])]
        heapq.heapify(self._arrivals)
        self._replicas = [
            Replica(
                plan.server,
                self._on_outputs,
                self._on_refused,
                factors=factors,
                seed=None if plan.seed is None else plan.seed + number,
            )
            for number in range(plan.num_replicas)
        ]
        # When each does something next: its own steps and requests alone change that.
        self._next_times = [each.next_s for each in self._replicas]

    @uncollected()
    def run(self, on_progress: Callable[[int, int], None]) -> Simulated:
        begin_s = time.process_time()
        num_steps, is_over = 0, False
        replicas, arrivals, judge = self._replicas, self._arrivals, self._judge
        next_times = self._next_times
        while True:
            next_s = min(next_times)
            arrival_s = arrivals[0].at_s if arrivals else math.inf
            if arrivals and arrival_s <= next_s:
                self._route(heapq.heappop(arrivals))
            elif next_s < math.inf:
                number = next_times.index(next_s)
                replicas[number].step(arrival_s)
                next_times[number] = replicas[number].next_s
                num_steps += 1
                if num_steps % 256 == 0:
                    on_progress(len(self._done), num_steps)
                if judge and num_steps % _JUDGED_EVERY == 0:
                    is_over = judge.is_over(self._results.values(), next_s)
                    if is_over:
                        break
            else:
                break
        return self._simulated(time.process_time() - begin_s, is_over)

    def _simulated(self, cpu_s: float, is_over: bool) -> Simulated:
        start_s = min((each.sent_s for each in self._done), default=0.0)
        end_s = max((each.ended_s for each in self._done), default=0.0)
        return Simulated(
            observed=Replay(
                results=self._done,
                duration_s=max(end_s - start_s, 1e-9),
                client_cpu_share=0.0,
                is_interrupted=is_over,
            ),
            steps=[replica.steps for replica in self._replicas],
            stats=[replica.scheduler.stats() for replica in self._replicas],
            num_outside=sum(replica.executor.num_outside for replica in self._replicas),
            cpu_s=cpu_s,
        )

    def _route(self, arrival: _Arrival) -> None:
        timed = self._requests[arrival.number]
        assert isinstance(timed.prompt, list), "simulated prompts are token ids"
        prompt = tuple(timed.prompt)
        number = 0 if len(self._replicas) == 1 else self._chosen(prompt)
        replica = self._replicas[number]
        request = Request(
            id=RequestId(str(timed.index)),
            prompt_token_ids=prompt,
            sampling=_sampling(timed.max_tokens),
            arrival_s=replica.parse(arrival.at_s),
            priority=timed.priority,
            tenant=timed.tenant,
        )
        self._results[request.id] = result = RequestResult(
            index=timed.index,
            scheduled_s=timed.arrival_s,
            sent_s=arrival.at_s,
            ended_s=arrival.at_s,
            num_prompt_tokens=timed.num_prompt_tokens,
            num_output_tokens=0,
            is_open_loop=self._is_open_loop,
            status=200,
        )
        self._note_arrival[request.id] = result.arrivals_s.append
        if replica.submit(request):
            self._next_times[number] = replica.next_s
        else:
            self._fail(request.id, "the queue is full", 429, arrival.at_s)

    def _chosen(self, prompt: tuple[int, ...]) -> int:
        """The number of a replica: by the router, of several."""
        # They take a quarter of the time of a step, and one policy alone reads them.
        is_read = self._plan.router is RouterPolicy.PREFIX_AWARE
        digests = prefix_digests(prompt) if is_read else []
        num_open = {number: each.num_open for number, each in enumerate(self._replicas)}
        return self._router.choose(digests, num_open)

    def _on_outputs(self, outputs: StepOutputs, written_s: float, token_s: float) -> int:
        """written_s: when the first token begins to be written, which takes each `token_s`. Returns
        how many requests have ended."""
        note_arrival = self._note_arrival
        for request_id in outputs.request_ids:
            written_s += token_s
            note_arrival[request_id](written_s)
        num_ended = 0
        for output in outputs.others.values():
            result = self._results[output.request_id]
            result.num_output_tokens += len(output.token_ids) - 1  # besides one of each arrival
            if output.finish is not None:
                result.num_output_tokens += len(result.arrivals_s)
                result.num_cached_tokens = output.num_cached_tokens
                self._end(output.request_id, result.arrivals_s[-1])
                num_ended += 1
        return num_ended

    def _on_refused(self, refused: Refused, at_s: float) -> None:
        self._fail(refused.request_id, refused.message, 429 if refused.late else 400, at_s)

    def _fail(self, request_id: RequestId, why: str, status: int, at_s: float) -> None:
        result = self._results[request_id]
        result.error, result.status = why, status
        self._end(request_id, at_s)

    def _end(self, request_id: RequestId, at_s: float) -> None:
        """Where concurrency is limited, the next request is sent."""
        result = self._results.pop(request_id)
        del self._note_arrival[request_id]
        result.ended_s = at_s
        self._done.append(result)
        if self._judge:
            self._judge.on_end(result)
        if (index := next(self._unsent, None)) is not None:
            at_s = max(at_s, self._requests[index].arrival_s)
            heapq.heappush(self._arrivals, _Arrival(at_s, index))
