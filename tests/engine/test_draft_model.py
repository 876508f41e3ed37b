"""A draft model changes no answer; one that is the served model itself has every draft accepted,
which a key that is not its sequence's would show."""

import shutil
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import pytest

from penstock.engine.config import (
    AdapterSource,
    DraftMethod,
    Dtype,
    EngineConfig,
    KVCacheDtype,
    LoadFormat,
    LoraConfig,
    Quantization,
    SpeculativeConfig,
)
from penstock.engine.drafting import draft_model
from penstock.engine.drafting.draft_model import CATCH_UP_TOKENS, DraftModel
from penstock.engine.drafting.proposer import Proposals, ProposingRow
from penstock.engine.executors.cpu import CpuExecutor
from penstock.engine.executors.cuda.device import Processor
from penstock.engine.loading.load import load
from penstock.engine.process.phases import Phases
from penstock.scheduler.config import SchedulerConfig
from penstock.scheduler.errors import PenstockError
from penstock.scheduler.stats import DraftStats
from penstock.scheduler.types import Request, SampledTokens, SamplingParams
from tests.support.adapters import save_adapter
from tests.support.compiler import needs_compiler
from tests.support.drafting import EveryDraft
from tests.support.executors import cpu_executor
from tests.support.paths import STORIES
from tests.support.scheduling import make_request
from tests.support.stepping import SteppedEngine, ids_of
from tests.support.stories import needs_stories
from tests.support.tiny_models import engine_config, make_model, save
from tests.support.ways import WAYS, answers_of, requests_of

pytestmark = [
    needs_compiler,
    needs_stories,
]


class SometimesWants(EveryDraft):
    """Wants drafts of the executor after some steps, and after others none, so that blocks are
    computed without it."""

    def __init__(self, seed: int, most: int) -> None:
        super().__init__([], most, proposes="model")
        self._random = Random(seed)
        self._wants = True

    def want(self, sequences):  # type: ignore[no-untyped-def]
        if self._random.random() < 0.1:
            self._wants = not self._wants
        nums = super().want(sequences) if self._wants else ()  # type: ignore[no-untyped-call]
        return tuple(num if self._random.random() < 0.8 else 0 for num in nums)


def _drafted(config: EngineConfig, draft: Path | str, most: int = 5, **fields: Any) -> EngineConfig:
    wanted = SpeculativeConfig(
        method=DraftMethod.DRAFT_MODEL, model=str(draft), num_speculative_tokens=most, **fields
    )
    return replace(config, speculative=wanted)


def _stories(max_model_len: int = 128, **changes: Any) -> EngineConfig:
    return EngineConfig(
        model=str(STORIES),
        num_threads=1,
        kv_cache_memory_bytes=1 << 22,
        max_model_len=max_model_len,
        scheduler=SchedulerConfig(max_num_seqs=4, max_num_batched_tokens=64),
        **changes,
    )


def _every(most: int = 5) -> EveryDraft:
    return EveryDraft([], most=most, proposes="model")


def _by_model(drafter: EveryDraft) -> DraftStats:
    stats = drafter.stats[-1]
    assert stats.source == "model"
    return stats


@pytest.fixture(scope="module")
def random_draft(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of random weights with the vocabulary of stories260K."""
    path = tmp_path_factory.mktemp("random")
    return save(make_model("llama2", vocab_size=512, num_hidden_layers=1), path)


@pytest.mark.parametrize("way", WAYS)
def test_of_drafts_by_the_model_itself_all_are_accepted_and_nothing_changes(way: str) -> None:
    requests = requests_of(WAYS[way], n=2)
    expected = answers_of(requests, SteppedEngine(_stories()).run(requests))
    drafter = _every()
    engine = SteppedEngine(_drafted(_stories(), STORIES), drafter=drafter)
    assert engine.executor.info.proposes == "model"
    for _ in range(2):  # prompts, and then some of the answers, are cached
        assert answers_of(requests, engine.run(requests)) == expected
    stats = _by_model(drafter)
    assert stats.num_draft_tokens_total > 200
    if way != "grammar":  # which the proposals do not know
        assert stats.num_accepted_tokens == stats.num_draft_tokens_total


@pytest.mark.parametrize("way", WAYS)
def test_of_drafts_by_a_random_model_hardly_any_are_accepted_and_nothing_changes(
    way: str, random_draft: Path
) -> None:
    requests = requests_of(WAYS[way], n=2)
    expected = answers_of(requests, SteppedEngine(_stories()).run(requests))
    drafter = _every()
    engine = SteppedEngine(_drafted(_stories(), random_draft), drafter=drafter)
    assert answers_of(requests, engine.run(requests)) == expected
    stats = _by_model(drafter)
    assert stats.num_draft_tokens_total > 500
    assert stats.num_accepted_tokens < 0.1 * stats.num_draft_tokens_total


@pytest.mark.parametrize("seed", range(4))
def test_blocks_computed_without_drafts_evicted_preempted_or_shared_are_never_taken_for_others(
    seed: int,
) -> None:
    random = Random(seed)
    common = [random.randrange(3, 512) for _ in range(40)]
    sampling = SamplingParams(max_tokens=30, temperature=0.8, seed=seed, num_logprobs=0)
    requests = [
        replace(
            make_request(str(i), [*common[: random.choice((0, 5, 16, 32, 40))], *range(3 + i, 12)]),
            sampling=replace(sampling, seed=i),
            n=random.choice((1, 2)),
        )
        for i in range(9)
    ]
    plain = SteppedEngine(_stories())
    drafter = SometimesWants(seed, most=7)
    engine = SteppedEngine(_drafted(_stories(), STORIES, most=7), drafter=drafter, num_blocks=9)
    for _ in range(12):
        some = random.sample(requests, 5)
        assert answers_of(some, engine.run(some)) == answers_of(some, plain.run(some))
    stats, scheduled = _by_model(drafter), engine.scheduler.stats()
    assert scheduled.preemptions_total and scheduled.prefix_hit_tokens_total
    assert stats.num_accepted_tokens == stats.num_draft_tokens_total > 150


class _Watched:
    """An executor whose results are kept."""

    def __init__(self, executor: CpuExecutor) -> None:
        self.executor = executor
        self.sampled: list[SampledTokens] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self.executor, name)

    def execute(self, batch: Any) -> Any:
        launched = self.executor.execute(batch)
        self.sampled.append(launched.wait())
        return launched


def _watched(
    config: EngineConfig, drafter: EveryDraft, num_blocks: int | None = None
) -> tuple[SteppedEngine, _Watched]:
    executor = SteppedEngine(config).executor
    assert isinstance(executor, CpuExecutor)
    watched = _Watched(executor)
    return SteppedEngine(config, watched, num_blocks, drafter), watched


class _Forgetful:
    """Computes all tokens of a sequence again whenever it proposes."""

    def __init__(self, model: DraftModel) -> None:
        self._model = model

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)

    def propose(self, rows: list[ProposingRow]) -> Proposals:
        self._model._tags = [None] * len(self._model._tags)
        for slot in self._model._slots.values():
            slot.num_valid, slot.digests = None, []
        return self._model.propose(rows)


@pytest.mark.parametrize("seed", range(2))
def test_drafts_are_those_that_a_fresh_computation_has(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(draft_model, "CATCH_UP_TOKENS", 1000)
    proposed = []
    for is_forgetful in (False, True):
        random = Random(seed)
        # It is right often, and not always.
        config = _drafted(_stories(), STORIES, quantization=Quantization.INT4)
        drafter = SometimesWants(seed, most=5)
        engine, watched = _watched(config, drafter, num_blocks=12)
        if is_forgetful:
            executor = watched.executor
            assert isinstance(executor._proposer, DraftModel)
            executor._proposer = _Forgetful(executor._proposer)
        requests = requests_of(WAYS["drawn"], n=2)
        for _ in range(6):
            engine.run(random.sample(requests, 3))
        stats = _by_model(drafter)
        assert 0 < stats.num_accepted_tokens < stats.num_draft_tokens_total
        proposed.append([each.proposed for each in watched.sampled if each.proposed])
    assert proposed[0] == proposed[1] and len(proposed[0]) > 50


def test_a_long_prompt_is_caught_up_on_in_parts_and_found_by_the_next_request() -> None:
    config = _drafted(_stories(max_model_len=512), STORIES)
    drafter = _every()
    engine, watched = _watched(config, drafter)
    prompt = [3 + i * i % 500 for i in range(400)]
    requests = [make_request("a", prompt, max_tokens=20)]
    engine.run(requests)
    nums = [each.num_caught_up for each in watched.sampled if each.num_caught_up]
    assert max(nums) == CATCH_UP_TOKENS and len(nums) == -(-400 // CATCH_UP_TOKENS)
    assert 400 <= sum(nums) <= 410
    waiting = [each for each in watched.sampled if each.num_caught_up == CATCH_UP_TOKENS]
    assert not any(each.proposed for each in waiting)
    watched.sampled.clear()
    engine.run(requests)
    assert sum(each.num_caught_up for each in watched.sampled) <= 24  # of a block that is not full
    stats = _by_model(drafter)
    assert stats.num_accepted_tokens == stats.num_draft_tokens_total > 10


def test_those_who_are_caught_up_have_drafts_while_another_catches_up() -> None:
    config = _drafted(_stories(max_model_len=512), STORIES)
    engine, watched = _watched(config, _every())
    short = make_request("short", [5, 6, 7], max_tokens=60)
    long = make_request("long", [3 + i * i % 500 for i in range(400)], max_tokens=20)
    engine.run([short, long])
    during = [each for each in watched.sampled if each.num_caught_up == CATCH_UP_TOKENS]
    assert during and all(len(each.proposed) == 1 for each in during)


def test_prompts_without_drafts_cost_nothing() -> None:
    class Never(EveryDraft):
        def want(self, sequences):  # type: ignore[no-untyped-def]
            return ()

    drafter = Never([], most=5, proposes="model")
    engine, watched = _watched(_drafted(_stories(), STORIES), drafter)
    engine.run(requests_of(WAYS["greedy"]))
    assert not any(each.proposing_s or each.num_caught_up for each in watched.sampled)


def test_none_are_proposed_after_the_token_that_ends_an_answer() -> None:
    requests = requests_of(WAYS["greedy"])
    ids = [ids_of(outputs) for outputs in SteppedEngine(_stories()).run(requests)]
    stops = tuple({each[len(each) // 2] for each in ids})
    sampling = replace(requests[0].sampling, stop_token_ids=stops)
    engine, watched = _watched(_drafted(_stories(), STORIES), _every(most=1))
    engine.run([replace(request, sampling=sampling) for request in requests])
    proposed = [(each, row) for each in watched.sampled for row in each.proposed]
    assert proposed and not any(
        each.token_ids[row] in stops and row not in each.further for each, row in proposed
    )


def test_drafts_end_where_the_shorter_context_of_their_model_does(tmp_path: Path) -> None:
    draft = save(make_model("llama2", vocab_size=512, max_position_embeddings=64), tmp_path)
    requests = requests_of(WAYS["drawn"])
    expected = answers_of(requests, SteppedEngine(_stories()).run(requests))
    engine, watched = _watched(_drafted(_stories(), draft), _every())
    assert answers_of(requests, engine.run(requests)) == expected
    assert any(each.proposed for each in watched.sampled)


def _tiny(path: Path, family: str, seed: int = 0, **changes: Any) -> EngineConfig:
    settings: dict[str, Any] = {"dtype": Dtype.BFLOAT16, "block_size": 16, "max_model_len": 128}
    scheduler = SchedulerConfig(max_num_seqs=8, max_num_batched_tokens=64)
    saved = save(make_model(family, seed), path)
    return engine_config(saved, scheduler=scheduler, **settings, **changes)


def _three(**changes: Any) -> list[Request]:
    sampling = SamplingParams(max_tokens=40, temperature=0.8, seed=4, num_logprobs=2, **changes)
    return [
        replace(make_request(str(i), prompt), sampling=sampling, n=2)
        for i, prompt in enumerate([[5, 6, 7], [3, 9] * 20, list(range(3, 60))])
    ]


@pytest.mark.parametrize(
    ("family", "draft", "changes"),
    [
        ("qwen3", "qwen3", {}),
        ("qwen3", "mistral_window", {}),
        ("gemma3", "gemma3", {}),
        ("gemma4_small_wrapped", "gemma4", {}),
        ("qwen3_moe", "qwen3", {}),
        ("qwen3_5", "qwen3", {}),
        ("llama_biases", "llama_biases", {"kv_cache_dtype": KVCacheDtype.INT8}),
        ("qwen3", "qwen3", {"num_threads": 2}),
    ],
)
def test_families_and_formats_answer_with_a_draft_model_what_they_answer_without(
    family: str, draft: str, changes: dict[str, Any], tmp_path: Path
) -> None:
    config = _tiny(tmp_path / "model", family, **changes)
    beside = save(make_model(draft, 0 if draft == family else 1), tmp_path / "draft")
    requests, drafter = _three(), _every()
    expected = answers_of(requests, SteppedEngine(config).run(requests))
    engine = SteppedEngine(_drafted(config, beside), drafter=drafter)
    assert answers_of(requests, engine.run(requests)) == expected
    stats = _by_model(drafter)
    assert stats.num_draft_tokens_total > 100
    if draft == family:
        assert stats.num_accepted_tokens == stats.num_draft_tokens_total


@pytest.mark.parametrize("quantization", [Quantization.INT4, Quantization.INT8])
def test_a_rounded_draft_of_the_model_itself_is_mostly_right(quantization: Quantization) -> None:
    requests, drafter = requests_of(WAYS["drawn"]), _every(most=3)
    config = _drafted(_stories(), STORIES, most=3, quantization=quantization)
    expected = answers_of(requests, SteppedEngine(_stories()).run(requests))
    assert answers_of(requests, SteppedEngine(config, drafter=drafter).run(requests)) == expected
    stats = _by_model(drafter)
    assert 0.5 * stats.num_draft_tokens_total < stats.num_accepted_tokens
    assert stats.num_accepted_tokens < stats.num_draft_tokens_total


def test_an_adapters_answers_are_the_same_with_drafts_of_the_base_model(tmp_path: Path) -> None:
    model = make_model("qwen3")
    path = save(model, tmp_path / "model")
    source = AdapterSource(name="a", path=str(save_adapter(model, tmp_path / "adapter", size=0.5)))
    config = engine_config(
        path,
        dtype=Dtype.BFLOAT16,
        max_model_len=128,
        scheduler=SchedulerConfig(max_num_seqs=8, max_num_batched_tokens=64),
        lora=LoraConfig(adapters=(source,)),
    )
    requests = [make_request("r", list(range(3, 20)), max_tokens=30, num_logprobs=1)] * 2

    def run(config: EngineConfig, drafter: EveryDraft | None) -> Any:
        engine = SteppedEngine(config, drafter=drafter)
        assert engine.executor.adapters is not None
        loaded = engine.executor.adapters.load(source).result()
        adapted = replace(requests[0], adapter=loaded.id, prompt_token_ids=(4, 5, 6))
        both = [adapted, requests[1]]
        return answers_of(both, engine.run(both))

    drafter = _every()
    assert run(_drafted(config, path), drafter) == run(config, None)
    stats = _by_model(drafter)
    assert 0 < stats.num_accepted_tokens < stats.num_draft_tokens_total


def test_the_ledger_has_the_draft_model_and_both_pools_fit_what_was_given() -> None:
    def loaded(config: EngineConfig) -> Any:
        return load(config, STORIES, None, Processor(), Phases())

    # Less than the sequences that may run could fill.
    plain = replace(_stories(), kv_cache_memory_bytes=1 << 18)
    without, beside = loaded(plain), loaded(_drafted(plain, STORIES))
    assert without.ledger.draft_model is None
    assert beside.info.num_blocks == without.info.num_blocks // 2
    # A spare block for each of max_num_seqs.
    block_bytes = without.ledger.kv_pool // without.info.num_blocks
    assert beside.ledger.kv_pool == beside.info.num_blocks * block_bytes
    keys = (beside.info.num_blocks + 4) * block_bytes
    assert beside.ledger.draft_model == without.ledger.weights + keys
    assert 2 * beside.ledger.kv_pool <= 1 << 18
    free = beside.ledger.total - beside.ledger.others - beside.ledger.weights
    assert beside.ledger.free == free - beside.ledger.kv_pool - beside.ledger.draft_model


@pytest.mark.parametrize(
    ("draft", "options", "message"),
    [
        ("llama2", {}, "vocabulary of 96 ids, and the served model one of 512"),
        ("qwen3_5", {"vocab_size": 512}, "recurrent layers"),
    ],
)
def test_a_draft_model_that_cannot_be_one_is_refused(
    draft: str, options: dict[str, Any], message: str, tmp_path: Path
) -> None:
    path = save(make_model(draft, **options), tmp_path)
    with pytest.raises(PenstockError, match=message) as refusal:
        SteppedEngine(_drafted(_stories(), path))
    assert str(path) in str(refusal.value) and "\n" not in str(refusal.value)


def test_a_model_whose_layers_all_have_a_window_is_refused_one(tmp_path: Path) -> None:
    config = _tiny(tmp_path, "mistral_window")
    with pytest.raises(PenstockError, match="sliding window"):
        SteppedEngine(_drafted(config, config.model))


def test_a_draft_model_is_refused_where_torch_or_transformers_computes(tmp_path: Path) -> None:
    config = _tiny(tmp_path, "qwen3", kv_cache_dtype=KVCacheDtype.FP8)
    with pytest.raises(PenstockError, match="compiled step cannot compute"):
        SteppedEngine(_drafted(config, config.model))


def _with_own_draft(draft: Path, folder: Path) -> EngineConfig:
    """Of a copy of stories260K, with that model in its folder draft/."""
    copy = folder / "model"
    shutil.copytree(STORIES, copy)
    shutil.copytree(draft, copy / "draft")
    return replace(_stories(), model=str(copy))


def test_the_draft_in_a_models_own_folder_is_used_unless_drafts_are_set_otherwise(
    tmp_path: Path,
) -> None:
    config = _with_own_draft(STORIES, tmp_path)
    drafter, requests = _every(), requests_of(WAYS["drawn"])
    engine = SteppedEngine(config, drafter=drafter)
    expected = answers_of(requests, SteppedEngine(_stories()).run(requests))
    assert answers_of(requests, engine.run(requests)) == expected
    assert _by_model(drafter).num_accepted_tokens > 50
    for others in (
        {"speculative": SpeculativeConfig()},
        {"speculative": SpeculativeConfig(num_speculative_tokens=0)},
        {"load_format": LoadFormat.DUMMY},
    ):
        executor = cpu_executor(replace(config, **others), Path(config.model))
        assert executor.info.proposes is None


def test_an_own_draft_that_cannot_be_one_is_left_out(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    other = save(make_model("llama2", vocab_size=256, num_hidden_layers=1), tmp_path / "other")
    config = _with_own_draft(other, tmp_path)
    with caplog.at_level("INFO"):
        assert cpu_executor(config, Path(config.model)).info.proposes is None
    assert "starts without the draft model in" in caplog.text and "256 ids" in caplog.text
