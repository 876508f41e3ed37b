"""A GPU's answers with drafts are those without: by Triton's interpreter, in float32."""

from collections import deque
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed; pip install 'penstock[dev]'")

from penstock.engine.config import KVCacheDtype, SpeculativeConfig
from penstock.engine.executors.cuda.device import Interpreter
from penstock.engine.executors.cuda.executor import CudaExecutor
from penstock.engine.executors.cuda.graphs import drafted_sizes
from penstock.engine.step.device_step import DraftSizes
from penstock.engine.step.executor import PendingTokens
from penstock.scheduler.config import SchedulerConfig
from penstock.scheduler.drafts.limits import DraftLimits
from penstock.scheduler.scheduler import Scheduler
from penstock.scheduler.types import (
    FinishReason,
    Request,
    RequestOutput,
    SamplingParams,
    ScheduledBatch,
)
from tests.support.drafting import EveryDraft, Oracle
from tests.support.executors import cuda_executor
from tests.support.kernels import ON_GPU
from tests.support.scheduling import make_request
from tests.support.stepping import ids_of
from tests.support.tiny_models import SMALLEST, engine_config, make_model, save

pytestmark = pytest.mark.skipif(ON_GPU, reason="kernels are compiled here, not interpreted")
BLOCK_SIZE, MAX_LEN = 16, 96
# Of each a request runs beside the others.
WAYS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0, "num_logprobs": 2},
    "drawn": {"temperature": 0.9, "num_logprobs": 0},
    "filtered": {"temperature": 0.8, "top_p": 0.9, "top_k": 30},
}
# Those cannot have drafts: others have them beside.
ALONE: dict[str, dict[str, Any]] = {
    "penalties": {"temperature": 0.8, "repetition_penalty": 1.3, "presence_penalty": 0.4},
    "biased": {"temperature": 0.8, "logit_bias": ((30, 4.0), (12, -9.0))},
    "banned": {"temperature": 0.8, "bad_words": ((40, 41), (26,))},
}
LIMITS = DraftLimits(16, 3)


def _executor(path: Path, family: str, **changes: Any) -> CudaExecutor:
    save(make_model(family, **SMALLEST), path)
    config = engine_config(
        path,
        block_size=BLOCK_SIZE,
        max_model_len=MAX_LEN,
        kv_cache_memory_bytes=2**20,
        scheduler=SchedulerConfig(max_num_seqs=4, max_num_batched_tokens=24),
        speculative=SpeculativeConfig(num_speculative_tokens=3),
        **changes,
    )
    return cuda_executor(config, path, Interpreter())


def _requests(ways: dict[str, dict[str, Any]], max_tokens: int = 10) -> list[Request]:
    prompts = [[5, 6, 7], [3, 9] * 7, list(range(3, 31))]
    return [
        replace(
            make_request(name, prompts[number % 3]),
            sampling=SamplingParams(max_tokens=max_tokens, seed=number, **way),
        )
        for number, (name, way) in enumerate(ways.items())
    ]


class Run:
    """What requests gave, and how."""

    def __init__(
        self,
        executor: CudaExecutor,
        requests: list[Request],
        drafter: EveryDraft | None = None,
        *,
        in_flight: int = 1,
        num_blocks: int | None = None,
        late: int = 0,
    ) -> None:
        """in_flight: steps that are launched before one is waited for. late: of the requests, how
        many come after the first step with drafts."""
        info = executor.info
        groups = [
            group if num_blocks is None else replace(group, num_blocks=num_blocks)
            for group in info.kv_groups
        ]
        self.scheduler = scheduler = Scheduler(
            SchedulerConfig(max_num_seqs=4, max_num_batched_tokens=24),
            groups=groups,
            block_size=info.block_size,
            max_model_len=info.max_model_len,
            drafter=drafter,
        )
        for request in requests:
            if future := executor.prepare(request):
                future.result()
        waiting = deque(requests)
        while len(waiting) > late:
            scheduler.add(waiting.popleft())
        self.batches: list[ScheduledBatch] = []
        found: dict[str, list[RequestOutput]] = {each.id: [] for each in requests}
        launched: deque[PendingTokens] = deque()
        while scheduler.has_work or launched:
            if batch := scheduler.schedule(0.0):
                self.batches.append(batch)
                launched.append(executor.execute(batch))
                while waiting and batch.drafts:
                    scheduler.add(waiting.popleft())
            if launched and (not batch or len(launched) >= in_flight):
                for output in scheduler.update(launched.popleft().wait()):
                    found[output.request_id].append(output)
        self.outputs = list(found.values())

    @property
    def answers(self) -> list[tuple[list[int], list[int], FinishReason | None]]:
        """Ids, the likeliest besides where these are wanted, and why each ended."""
        return [
            (
                ids_of(outputs),
                [
                    token_id
                    for output in outputs
                    for entry in output.logprobs or ()
                    for token_id, _ in entry.top
                ],
                outputs[-1].finish.reason if outputs[-1].finish else None,
            )
            for outputs in self.outputs
        ]

    @property
    def logprobs(self) -> list[float]:
        return [
            entry.logprob
            for outputs in self.outputs
            for output in outputs
            for entry in output.logprobs or ()
        ]


def _drafter(requests: list[Request], plain: Run, share: float) -> EveryDraft:
    oracle = Oracle(share)
    for request, (ids, *_) in zip(requests, plain.answers, strict=True):
        oracle.learn(request, [ids])
    return EveryDraft([oracle], 8, limits=LIMITS)


def _check(executor: CudaExecutor, requests: list[Request], share: float, in_flight: int) -> Run:
    plain = Run(executor, requests)
    drafter = _drafter(requests, plain, share)
    drafted = Run(executor, requests, drafter, in_flight=in_flight)
    assert drafted.answers == plain.answers
    assert drafted.logprobs == pytest.approx(plain.logprobs, abs=1e-4)
    assert len(drafted.logprobs) == len(plain.logprobs)
    stats = drafter.stats[-1]
    assert stats.num_draft_tokens_total > 15
    if share == 0.0:
        # What is wrong where it was meant may be right a place before it.
        assert stats.num_accepted_tokens < 0.1 * stats.num_draft_tokens_total
    if share == 1.0:
        assert stats.num_accepted_tokens > 0.6 * stats.num_draft_tokens_total
        assert len(drafted.batches) < 0.8 * len(plain.batches)
    return drafted


@pytest.mark.parametrize("share", [0.0, pytest.param(0.5, marks=pytest.mark.slow), 1.0])
@pytest.mark.parametrize("in_flight", [1, 2])
def test_an_oracles_drafts_change_nothing(share: float, in_flight: int, tmp_path: Path) -> None:
    executor = _executor(tmp_path, "qwen3")
    assert executor.info.takes_drafts and executor.info.draft_limits == LIMITS
    drafted = _check(executor, _requests(WAYS), share, in_flight)
    assert max(sum(batch.num_tokens) for batch in drafted.batches if batch.drafts) > 8
    assert any(batch.num_unresolved for batch in drafted.batches) == (in_flight > 1)


@pytest.mark.slow
@pytest.mark.parametrize("way", ALONE)
def test_requests_that_cannot_have_drafts_have_none_beside_others_that_have(
    way: str, tmp_path: Path
) -> None:
    executor = _executor(tmp_path, "qwen3")
    requests = _requests({"greedy": WAYS["greedy"], way: ALONE[way], "drawn": WAYS["drawn"]})
    drafted = _check(executor, requests, 0.7, 2)
    assert any(batch.drafts and not all(batch.drafts) for batch in drafted.batches)
    alone = Run(executor, requests[1:2], _drafter(requests, Run(executor, requests), 1.0))
    assert not any(batch.drafts for batch in alone.batches)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "changes"),
    [
        ("mistral_window", {}),
        ("gemma3", {}),
        ("qwen3_moe", {}),
        ("qwen3", {"kv_cache_dtype": KVCacheDtype.INT8}),
    ],
)
def test_windows_mixtures_and_codes_give_the_same_too(
    family: str, changes: dict[str, Any], tmp_path: Path
) -> None:
    executor = _executor(tmp_path, family, **changes)
    _check(executor, _requests(WAYS), 0.8, 2)


@pytest.mark.slow
def test_a_prompt_that_comes_meanwhile_does_not_move_decodes(tmp_path: Path) -> None:
    """A step of its chunk follows one with drafts whose results are not known."""
    executor = _executor(tmp_path, "qwen3")
    requests = _requests(WAYS)
    plain = Run(executor, requests)
    drafter = _drafter(requests, plain, 0.5)
    drafted = Run(executor, requests, drafter, in_flight=2, late=1)
    assert drafted.answers == plain.answers
    assert any(
        batch.num_unresolved and len(batch.slots) > batch.num_decodes for batch in drafted.batches
    )


@pytest.mark.slow
def test_preempted_sequences_go_on_with_what_was_accepted(tmp_path: Path) -> None:
    executor = _executor(tmp_path, "qwen3")
    requests = _requests(WAYS, max_tokens=20)
    plain = Run(executor, requests)
    drafter = _drafter(requests, plain, 0.6)
    drafted = Run(executor, requests, drafter, in_flight=2, num_blocks=6)
    assert drafted.answers == plain.answers
    assert drafted.scheduler.stats().preemptions_total


def test_a_row_whose_logits_are_invalid_ends_with_that_reason(tmp_path: Path) -> None:
    """A draft whose values are not finite spoils the tokens before it in its step, since 0 times
    NaN is NaN: so the answer may end a few tokens earlier, and has no other ids."""
    executor = _executor(tmp_path, "llama2")
    requests = _requests({"greedy": WAYS["greedy"]})
    ids, *_ = Run(executor, requests).answers[0]
    broken_id = next(token_id for token_id in ids[5:] if token_id not in ids[:5])
    with torch.inference_mode():
        executor._model._model.embedding[broken_id] = torch.nan
    plain = Run(executor, requests)
    drafter = EveryDraft([oracle := Oracle(1.0)], 8, limits=LIMITS)
    oracle.learn(requests[0], [ids])
    drafted = Run(executor, requests, drafter, in_flight=2)
    expected, _, reason = plain.answers[0]
    assert reason is FinishReason.INVALID_LOGITS and broken_id in expected
    found, _, reason = drafted.answers[0]
    assert reason is FinishReason.INVALID_LOGITS
    assert found == expected[: len(found)] and len(found) >= len(expected) - LIMITS.per_row


@pytest.mark.parametrize(
    ("rows", "num_drafts", "expected"),
    [
        (1, 8, DraftSizes((2, 4, 8), 8)),
        (4, 3, DraftSizes((2, 4, 8, 16), 4)),
        (3, 1, DraftSizes((2, 4, 6), 2)),
        (256, 8, DraftSizes((2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192), 8)),
    ],
)
def test_a_step_with_drafts_has_few_sizes(rows: int, num_drafts: int, expected: DraftSizes) -> None:
    assert drafted_sizes(rows, num_drafts) == expected


def test_drafts_are_taken_where_they_are_wanted_alone(tmp_path: Path) -> None:
    executor = _executor(tmp_path, "qwen3", enforce_eager=True)
    assert executor.info.takes_drafts
    save(make_model("qwen3", **SMALLEST), tmp_path)
    config = engine_config(
        tmp_path,
        block_size=BLOCK_SIZE,
        max_model_len=MAX_LEN,
        kv_cache_memory_bytes=2**20,
        scheduler=SchedulerConfig(max_num_seqs=4, max_num_batched_tokens=24),
    )
    assert not cuda_executor(config, tmp_path, Interpreter()).info.takes_drafts
