"""The order of a comparison: which server has its turn when, and what a turn measures."""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TypeAlias

from penstock.loadtest.bench.http_target import HttpTarget, TargetConfig
from penstock.loadtest.bench.replay import replay, run
from penstock.loadtest.report.report import (
    Replay,
    ReportConfig,
    Summary,
    report_warnings,
    summarize,
)
from penstock.loadtest.workload.config import PromptFormat, cache_advice
from penstock.loadtest.workload.token_counter import TokenCounter
from penstock.loadtest.workload.workload import TimedRequest, make_requests
from penstock.scheduler.errors import PenstockError
from tests.bench.in_turns.cases import Case
from tests.bench.in_turns.conversations import Encoder, converse, summarize_turns
from tests.bench.in_turns.machine import CpuUse, Snapshot, busy_processes, cpu_use, snapshot
from tests.bench.in_turns.server import Server, ServerFailed, ServerSpec, started

_REPORT = ReportConfig(percentiles=(50.0, 90.0, 99.0))
# Shorter outputs than were asked for by more than this share are other work.
_NOTABLE_SHORTFALL = 0.01
_CONVERSATIONS = "each turn of a conversation sends those before it again"
# The machine when the measurement began, what was observed, and its summary.
_Observed: TypeAlias = tuple[Snapshot, Replay, Summary]


@dataclass(frozen=True, slots=True, kw_only=True)
class PeersConfig:
    """servers: in the order of the first round. model: of {model}; empty for none.

    threads: of {threads}, and OMP_NUM_THREADS. is_busy: a busy process on each core beside.
    count: counts the tokens of servers that send no count. encode: of conversations in ids.
    """

    servers: list[ServerSpec]
    cases: list[Case]
    num_rounds: int
    model: str
    threads: int
    is_busy: bool
    seed: int
    prompt_format: PromptFormat
    count: TokenCounter | None
    encode: Encoder | None
    ready_timeout_s: float
    request_timeout_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Measurement:
    """One case of one turn. round: from 1."""

    round: int
    server: str
    case: str
    summary: Summary
    cpu: CpuUse


@dataclass(slots=True)
class Outcome:
    """failures: why a server has no turns after one, by its name."""

    measurements: list[Measurement] = field(default_factory=list)
    failures: dict[str, str] = field(default_factory=dict)
    is_interrupted: bool = False


def order(servers: list[ServerSpec], number: int) -> list[ServerSpec]:
    """Of round `number`, from 1: A B, then B A, so that a drift of the machine favours none."""
    return servers if number % 2 else servers[::-1]


def measure(config: PeersConfig, say: Callable[[str], None]) -> Outcome:
    """All rounds. A server that fails loses its further turns and no other server's."""
    outcome = Outcome()
    num_servers = len(config.servers)
    try:
        for number in range(1, config.num_rounds + 1):
            for index, spec in enumerate(order(config.servers, number), start=1):
                if len(outcome.failures) > len(config.servers) - 2:
                    say("fewer than two servers are left, so there is nothing more to compare")
                    return outcome
                if spec.name not in outcome.failures:
                    turn = (number - 1) * num_servers + index
                    say(f"turn {turn} of {config.num_rounds * num_servers}: {spec.name} starts")
                    _try_turn(config, spec, number, outcome, say)
    except KeyboardInterrupt:
        outcome.is_interrupted = True
    return outcome


def _try_turn(
    config: PeersConfig,
    spec: ServerSpec,
    number: int,
    outcome: Outcome,
    say: Callable[[str], None],
) -> None:
    try:
        with started(spec, model=config.model, threads=config.threads) as server:
            run(_Turn(config, server, number, outcome.measurements, say).measure())
    except PenstockError as error:
        outcome.failures[spec.name] = f"in round {number}, {error}"
        say(f"{spec.name} failed {outcome.failures[spec.name]}")


class _Turn:
    """One server, from when it is started until each case is measured."""

    def __init__(
        self,
        config: PeersConfig,
        server: Server,
        number: int,
        measurements: list[Measurement],
        say: Callable[[str], None],
    ) -> None:
        self._config, self._server, self._number = config, server, number
        self._measurements, self._say = measurements, say

    async def measure(self) -> None:
        config, spec = self._config, self._server.spec
        models = await self._server.models(config.ready_timeout_s)
        target_config = TargetConfig(
            base_url=self._server.url,
            model=models[0].id if models else config.model or spec.name,
            ignore_eos=True,
            extra_body=spec.extra_body,
            request_timeout_s=config.request_timeout_s,
        )
        async with HttpTarget(target_config, config.count) as target:
            with busy_processes(is_busy=config.is_busy) as busy_pids:
                for index, case in enumerate(config.cases):
                    # No two cases or rounds have a prompt in common.
                    seed = config.seed + 1000 * self._number + index
                    self._measurements.append(await self._case(target, case, seed, busy_pids))

    async def _case(
        self, target: HttpTarget, case: Case, seed: int, busy_pids: list[int]
    ) -> Measurement:
        workload = case.workload(seed, self._config.prompt_format)
        send = self._alone if case.num_turns == 1 else self._conversations
        before, observed, summary = await send(target, case, make_requests(workload))
        cpu = cpu_use(before, snapshot(), self._server.pid, busy_pids)
        name = self._server.spec.name
        measured = Measurement(
            round=self._number, server=name, case=case.name, summary=summary, cpu=cpu
        )
        at = f"round {self._number}, {name}, {case.name}"
        self._say(f"{at}: {_shown(summary)}")
        warnings = report_warnings(
            observed,
            has_due_times=False,
            cache_advice=cache_advice(workload) if case.num_turns == 1 else _CONVERSATIONS,
        )
        for line in [*warnings, *_shortfall(summary, case, name)]:
            self._say(f"{at}: {line}")
        return measured

    async def _alone(
        self, target: HttpTarget, case: Case, requests: list[TimedRequest]
    ) -> _Observed:
        await self._replayed(target, requests[: case.concurrency], case)
        before = snapshot()
        observed = await self._replayed(target, requests[case.concurrency :], case)
        return before, observed, summarize(observed, _REPORT)

    async def _replayed(
        self, target: HttpTarget, requests: list[TimedRequest], case: Case
    ) -> Replay:
        observed = await replay(target, requests, max_concurrency=case.concurrency)
        if observed.is_interrupted:
            raise asyncio.CancelledError
        self._check(observed, case)
        return observed

    async def _conversations(
        self, target: HttpTarget, case: Case, requests: list[TimedRequest]
    ) -> _Observed:
        encode, num = self._config.encode, case.concurrency
        warm_up, measured = case.conversations(requests)
        observed, _ = await converse(target, warm_up, encode, max_concurrency=num)
        self._check(observed, case)
        before = snapshot()
        observed, by_turn = await converse(target, measured, encode, max_concurrency=num)
        self._check(observed, case)
        return before, observed, summarize_turns(observed, by_turn, _REPORT)

    def _check(self, observed: Replay, case: Case) -> None:
        """Raises ServerFailed."""
        if observed.failed:
            num, error = len(observed.failed), str(observed.failed[0].error)
            advice = ""
            if "ignore_eos" in error:
                name = self._server.spec.name
                advice = f"; give --extra-body '{name}={{\"ignore_eos\": null}}'"
            total = len(observed.results)
            message = f"{num} of {total} requests of {case.name} failed: {error}{advice}"
            raise ServerFailed(self._server.with_log(message))


def _shown(summary: Summary) -> str:
    text = f"{summary['output_throughput']:.1f} tok/s, TTFT {summary['median_ttft_ms']:.1f} ms"
    tpot_ms = summary["median_tpot_ms"]
    return text if tpot_ms is None else f"{text}, TPOT {tpot_ms:.2f} ms"


def _shortfall(summary: Summary, case: Case, name: str) -> list[str]:
    wanted, got = case.num_output_tokens, summary["total_output_tokens"]
    if got >= wanted * (1 - _NOTABLE_SHORTFALL):
        return []
    return [
        f"it generated {got:,} of {wanted:,} tokens, so its numbers are of other work: find what "
        f"makes it ignore the end of a text, and give --extra-body '{name}=JSON'"
    ]
