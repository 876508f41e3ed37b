"""Ranks and stages answer with drafts what they answer without, to the last bit; stages, what one
process does."""

from collections import deque
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from random import Random

import pytest

from penstock.engine.config import AdapterSource, EngineConfig, LoraConfig
from penstock.engine.executors.cpu import CpuExecutor
from penstock.engine.executors.first_rank import FirstRank
from penstock.engine.models.config import ModelConfig
from penstock.engine.models.division.stage import Stage
from penstock.engine.step.executor import PendingTokens
from penstock.scheduler.config import SchedulerConfig
from penstock.scheduler.drafts.drafter import Drafter
from penstock.scheduler.drafts.sources import FinishedAnswers, OwnText
from penstock.scheduler.types import Request, RequestId, RequestOutput, SamplingParams
from tests.support.adapters import save_adapter
from tests.support.compiler import needs_compiler
from tests.support.drafting import EveryDraft
from tests.support.executors import cpu_executor
from tests.support.parallel_answers import parallel_config
from tests.support.paths import DEMO_MODEL
from tests.support.rank_threads import RankThreads, memberships
from tests.support.scheduling import make_request
from tests.support.stepping import SteppedEngine, ids_of
from tests.support.tiny_models import make_model, save
from tests.support.ways import WAYS, Answers, answers_of, oracle_of, requests_of

pytestmark = needs_compiler

# Tensor parallel, and stages.
SIZES = [(2, 1), (1, 2), (2, 2), (1, 3)]
CONFIG = EngineConfig(
    model=str(DEMO_MODEL),
    num_threads=1,
    max_model_len=128,
    kv_cache_memory_bytes=1 << 22,
    # As many as there are answers: drafts are for steps that nobody waits for.
    scheduler=SchedulerConfig(max_num_seqs=8, max_num_batched_tokens=64),
)


def run(
    executor: FirstRank[CpuExecutor] | CpuExecutor,
    asked: list[Request],
    drafter: Drafter | None = None,
    num_blocks: int | None = None,
    config: EngineConfig = CONFIG,
) -> Answers:
    engine = SteppedEngine(config, executor, num_blocks, drafter)
    found = answers_of(asked, engine.run(asked))
    assert num_blocks is None or engine.scheduler.stats().preemptions_total
    return found


def _check(
    ranks: RankThreads, asked: list[Request], config: EngineConfig, *, share: float, most: int
) -> None:
    """Drafts, of which this share is right, change no answer. most: of a row."""
    expected = run(ranks, asked, config=config)
    drafter = EveryDraft([oracle_of(asked, expected, share)], most=most)
    assert run(ranks, asked, drafter, config=config) == expected
    assert drafter.stats[-1].num_accepted_tokens > 20


def started(config: EngineConfig, sizes: tuple[int, int]) -> RankThreads:
    config = replace(config, tensor_parallel_size=sizes[0], pipeline_parallel_size=sizes[1])
    return RankThreads(config, memberships(config))


@pytest.fixture(scope="module", params=SIZES, ids=lambda sizes: f"tp{sizes[0]}-pp{sizes[1]}")
def sizes(request: pytest.FixtureRequest) -> tuple[int, int]:
    found: tuple[int, int] = request.param
    return found


@pytest.fixture(scope="module")
def ranks(sizes: tuple[int, int]) -> Iterator[RankThreads]:
    """Others have used them before: what is in their tables is of other sequences."""
    made = started(CONFIG, sizes)
    try:
        yield made
    finally:
        made.close()


@pytest.fixture(scope="module")
def alone() -> CpuExecutor:
    return cpu_executor(CONFIG, DEMO_MODEL)


@pytest.mark.parametrize("way", ["logprobs", "drawn", "penalties", "grammar"])
def test_an_oracles_drafts_change_nothing(
    ranks: RankThreads, sizes: tuple[int, int], alone: CpuExecutor, way: str
) -> None:
    assert ranks.info.takes_drafts
    asked = requests_of(WAYS[way], n=2)
    expected = run(ranks, asked)
    if sizes[0] == 1:  # sums over ranks round otherwise than those of one
        assert expected == run(alone, asked)
    # Some are wrong and some are right in all; none and all of them in two.
    for share in (0.0, 0.5, 1.0) if way in ("logprobs", "grammar") else (0.5,):
        drafter = EveryDraft([oracle_of(asked, expected, share)], most=7)
        assert run(ranks, asked, drafter) == expected
        stats = drafter.stats[-1]
        assert stats.num_drafts_total > 5
        assert bool(stats.num_accepted_tokens) == bool(share)
        if share == 1.0:
            assert stats.num_accepted_tokens > 0.5 * stats.num_draft_tokens_total


def test_nor_do_those_of_earlier_answers(ranks: RankThreads) -> None:
    asked = requests_of(WAYS["greedy"], n=2)
    expected = run(ranks, asked)
    drafter = EveryDraft([OwnText(), FinishedAnswers()], most=5)
    for _ in range(2):
        assert run(ranks, asked, drafter) == expected
    assert drafter.stats[-1].num_accepted_tokens > 20


def test_nor_do_they_where_sequences_are_preempted_while_their_drafts_are_verified(
    ranks: RankThreads,
) -> None:
    asked = requests_of(WAYS["drawn"], n=2)
    expected = run(ranks, asked)
    drafter = EveryDraft([oracle_of(asked, expected, 0.7)], most=7)
    assert run(ranks, asked, drafter, num_blocks=9) == expected
    assert drafter.stats[-1].num_accepted_tokens


def test_an_abort_in_flight_leaves_nothing_to_who_has_the_slot_next(ranks: RankThreads) -> None:
    asked = [
        replace(each, id=RequestId(f"{each.id}{salt}"), cache_salt=salt)
        for each in requests_of(WAYS["drawn"])
        for salt in "abcd"
    ]
    expected = run(ranks, asked)
    drafter = EveryDraft([oracle_of(asked, expected, 0.7)], most=7)
    scheduler = SteppedEngine(CONFIG, ranks, drafter=drafter).scheduler
    outputs: dict[RequestId, list[RequestOutput]] = {each.id: [] for each in asked}
    draw, waiting, launched = Random(2), asked.copy(), deque[PendingTokens]()
    aborted = {each.id for each in draw.sample(asked, 5)}
    while waiting or scheduler.has_work or launched:
        if waiting and scheduler.num_running < 4:
            scheduler.add(waiting.pop(0))
        for running in set(scheduler.running_ids) & aborted:
            if draw.random() < 0.1:
                scheduler.abort(running)
        if batch := scheduler.schedule(0.0):
            launched.append(ranks.execute(batch))
        if launched and (not batch or len(launched) >= ranks.info.pipeline_parallel_size):
            for output in scheduler.update(launched.popleft().wait()):
                outputs[output.request_id].append(output)
    for each in asked:
        key = each.prompt_token_ids, 0
        if each.id in aborted:
            found = ids_of(outputs[each.id])
            assert expected[key][0][: len(found)] == found
        else:
            assert answers_of([each], [outputs[each.id]]) == {key: expected[key]}
    assert drafter.stats[-1].num_accepted_tokens > 50


@pytest.mark.parametrize("sizes", [(2, 1), (1, 2)])
def test_nor_do_they_beside_an_adapter(sizes: tuple[int, int], tmp_path: Path) -> None:
    model = make_model("qwen3", max_position_embeddings=512)
    path = save_adapter(model, tmp_path / "adapter", size=0.5)
    source = AdapterSource(name="a", path=str(path))
    config = parallel_config(save(model, tmp_path / "model"), lora=LoraConfig(adapters=(source,)))
    sampling = SamplingParams(max_tokens=40, temperature=0.0, num_logprobs=1)
    ranks = started(config, sizes)
    try:
        assert ranks.adapters is not None
        loaded = ranks.adapters.load(source).result(timeout=60)
        asked = [
            replace(make_request("r", list(range(first, 30)), adapter=adapter), sampling=sampling)
            for first, adapter in zip(range(3, 9), (None, loaded.id) * 3, strict=True)
        ]
        _check(ranks, asked, config, share=0.7, most=5)
    finally:
        ranks.close()


@pytest.mark.parametrize(
    ("family", "sizes"),
    [(family, sizes) for family in ("gpt_oss", "gemma3") for sizes in ((2, 1), (1, 2))]
    + [("qwen3_5", (2, 1)), ("qwen3_5_moe", (2, 1))],
)
def test_nor_do_they_with_experts_windows_and_states(
    family: str, sizes: tuple[int, int], tmp_path: Path
) -> None:
    sampling = SamplingParams(max_tokens=40, temperature=0.8, seed=4, num_logprobs=2)
    asked = [
        replace(make_request(str(i), prompt), sampling=sampling, n=2)
        for i, prompt in enumerate([[5, 6, 7], [3, 9] * 20, list(range(3, 60))])
    ]
    config = parallel_config(save(make_model(family, max_position_embeddings=512), tmp_path))
    ranks = started(config, sizes)
    try:
        _check(ranks, asked, config, share=0.8, most=6)
    finally:
        ranks.close()


def test_stages_take_none_where_others_of_them_have_recurrent_layers(tmp_path: Path) -> None:
    save(make_model("qwen3_5", max_position_embeddings=512), tmp_path)
    assert not any(Stage(ModelConfig.from_dir(tmp_path), 3, 4).config.recurrent)
    ranks = started(parallel_config(tmp_path), (1, 4))
    ranks.close()
    assert not ranks.info.takes_drafts
