"""Requests that an earlier engine began: they end as if there had been one engine."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.scheduler.config import SchedulerConfig
from penstock.scheduler.types import FinishReason, Request, RequestId, ResumedAnswer, Started
from tests.support.scheduling import Driver, make_request, tokens_alone

CONFIG = SchedulerConfig(max_num_seqs=4, max_num_batched_tokens=16)


class Engines:
    """One engine after another, each of which gets what the one before it had not finished."""

    def __init__(self, requests: list[Request], *, num_blocks: int = 64):
        self._options = {"num_blocks": num_blocks}
        self.requests = requests
        self.tokens: dict[tuple[str, int], list[int]] = {
            (request.id, index): [] for request in requests for index in range(request.n)
        }
        self.ended: dict[tuple[str, int], FinishReason] = {}
        self.started: dict[tuple[str, int], Started] = {}
        self.num_prompts: dict[str, int] = {request.id: 0 for request in requests}
        self.driver = self._engine(requests)

    def _engine(self, requests: list[Request]) -> Driver:
        driver = Driver(config=CONFIG, **self._options)  # type: ignore[arg-type]
        for request in requests:
            driver.scheduler.add(request)
        return driver

    def run(self, num_steps: int) -> bool:
        """Whether anything is left."""
        for _ in range(num_steps):
            if not self.driver.scheduler.has_work:
                return False
            if self.driver.launch():
                outputs = self.driver.scheduler.update(self.driver.launched.popleft().wait())
                for started in self.driver.scheduler.take_started():
                    key = (started.request_id, started.index)
                    assert key not in self.started, "it is started once"
                    self.started[key] = started
                for output in outputs:
                    key = (output.request_id, output.index)
                    self.tokens[key] += output.token_ids
                    self.num_prompts[output.request_id] += output.prompt is not None
                    assert output.num_cached_tokens == self.started[key].num_cached_tokens
                    if output.finish:
                        self.ended[key] = output.finish.reason
                        assert output.finish.first_scheduled_s == self.started[key].at_s
        return self.driver.scheduler.has_work

    def crash(self) -> None:
        """What a step in flight would have sampled is lost."""
        self.driver.launch()
        self.driver = self._engine([*filter(None, map(self._resumed, self.requests))])

    def _resumed(self, request: Request) -> Request | None:
        answers = []
        for index in range(request.n):
            key = (request.id, index)
            started = self.started.get(key)
            if key not in self.ended:
                seen = (started.at_s, started.num_cached_tokens) if started else (None, 0)
                answers.append(ResumedAnswer(index, tuple(self.tokens[key]), *seen))
        return replace(request, resumed=tuple(answers)) if answers else None


@st.composite
def _requests(draw: st.DrawFn) -> list[Request]:
    requests = []
    for name in range(draw(st.integers(1, 5))):
        prompt = draw(st.lists(st.integers(3, 5), min_size=1, max_size=30))
        request = make_request(
            str(name),
            prompt,
            max_tokens=draw(st.integers(1, 20)),
            n=draw(st.integers(1, 3)),
            seed=draw(st.integers(0, 9)),
            temperature=draw(st.sampled_from([0.0, 1.0])),
            stop_token_ids=tuple(range(3, 500, 37)),
            num_prompt_logprobs=draw(st.sampled_from([None, 1])),
        )
        requests.append(request)
    return requests


@given(
    requests=_requests(),
    steps=st.lists(st.integers(0, 12), max_size=6),
    num_blocks=st.sampled_from([32, 40, 200]),
)
def test_any_crashes_change_no_token_and_report_nothing_twice(
    requests: list[Request], steps: list[int], num_blocks: int
) -> None:
    engines = Engines(requests, num_blocks=num_blocks)
    for num_steps in steps:
        if not engines.run(num_steps):
            break
        engines.crash()
    assert not engines.run(5000)
    for request in requests:
        alone = tokens_alone(request)
        assert {key: engines.tokens[key] for key in alone} == alone
        assert engines.num_prompts[request.id] == (request.sampling.num_prompt_logprobs is not None)
    assert len(engines.ended) == sum(request.n for request in requests)


def resumed(name: str, *answers: ResumedAnswer, n: int = 3) -> Request:
    request = make_request(name, 20, n=n, max_tokens=8, temperature=1.0)
    return replace(request, resumed=answers)


def test_answers_that_have_ended_do_not_run_again() -> None:
    driver = Driver()
    driver.scheduler.add(resumed("a", ResumedAnswer(1, (5, 6), 0.0, 0), ResumedAnswer(2)))
    driver.run()
    assert {key: len(ids) for key, ids in driver.tokens.items()} == {("a", 1): 6, ("a", 2): 8}


def test_only_an_answer_that_had_not_run_is_reported_as_started() -> None:
    driver = Driver()
    driver.scheduler.add(resumed("a", ResumedAnswer(0, (5,), 0.0, 4), ResumedAnswer(1)))
    driver.run()
    assert [started.index for started in driver.scheduler.take_started()] == [1]
    assert driver.num_cached[RequestId("a"), 0] == 4
    assert driver.finishes["a", 0][0].first_scheduled_s == 0.0


def test_what_is_computed_again_is_counted_as_recomputed() -> None:
    driver = Driver()
    driver.scheduler.add(resumed("a", ResumedAnswer(0, (5, 6, 7), 0.0), n=1))
    driver.run()
    assert driver.scheduler.stats().recomputed_tokens_total == 22  # not the last id, which is new
    assert driver.finishes["a", 0][0].num_recomputed_tokens == 22


@pytest.mark.parametrize("index", [0, 1])
def test_a_resumed_answer_can_be_aborted(index: int) -> None:
    driver = Driver()
    driver.scheduler.add(resumed("a", ResumedAnswer(0, (5,), 0.0), ResumedAnswer(1, (9,), 0.0)))
    driver.step()
    driver.record(driver.scheduler.abort(RequestId("a"), index))
    driver.run()
    reasons = {key[1]: finish[0].reason for key, finish in driver.finishes.items()}
    assert reasons == {index: FinishReason.ABORT, 1 - index: FinishReason.LENGTH}
    assert driver.kv.num_used == 0
