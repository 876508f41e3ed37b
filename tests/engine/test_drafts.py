"""Answers with drafts are those without, to the last bit."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from llguidance import LLMatcher
from torch import Tensor

from penstock.engine.config import (
    AdapterSource,
    Dtype,
    EngineConfig,
    KVCacheDtype,
    LoraConfig,
    Quantization,
    SpeculativeConfig,
)
from penstock.engine.executors.cpu import CpuExecutor
from penstock.engine.ipc.process import _drafter
from penstock.scheduler.cache.state_cache import StateCache
from penstock.scheduler.config import SchedulerConfig
from penstock.scheduler.drafts.sources import FinishedAnswers, OwnText
from penstock.scheduler.errors import InvalidConfig
from penstock.scheduler.step_model.live import LiveStepModel
from penstock.scheduler.types import Request, SamplingParams
from tests.support.adapters import save_adapter
from tests.support.compiler import needs_compiler
from tests.support.drafting import EveryDraft
from tests.support.paths import STORIES
from tests.support.scheduling import make_request
from tests.support.stepping import SteppedEngine
from tests.support.stories import needs_stories
from tests.support.tiny_models import engine_config, make_model, save
from tests.support.ways import WAYS, Answers, answers_of, oracle_of, requests_of

pytestmark = [
    needs_compiler,
    needs_stories,
]


def _engine(**options: Any) -> SteppedEngine:
    config = EngineConfig(
        model=str(STORIES),
        num_threads=1,
        kv_cache_memory_bytes=1 << 22,
        max_model_len=128,
        scheduler=SchedulerConfig(max_num_seqs=4, max_num_batched_tokens=64),
    )
    return SteppedEngine(config, **options)


@pytest.mark.parametrize(
    ("way", "share"),
    [(way, 0.5) for way in WAYS]
    + [(way, share) for way in ("greedy", "drawn", "grammar") for share in (0.0, 1.0)],
)
def test_an_oracles_drafts_change_nothing(way: str, share: float) -> None:
    requests = requests_of(WAYS[way], n=2)
    plain = _engine()
    expected = answers_of(requests, plain.run(requests))
    oracle = oracle_of(requests, expected, share)
    drafter = EveryDraft([oracle], most=7)
    drafted = _engine(drafter=drafter)
    assert answers_of(requests, drafted.run(requests)) == expected
    grammar, stats = drafter.stats
    assert (stats.num_drafts_total > 5) and bool(grammar.num_drafts_total) <= (way == "grammar")
    if share == 1.0:
        assert stats.num_accepted_tokens > 0.7 * stats.num_draft_tokens_total
    if share == 0.0:
        assert not stats.num_accepted_tokens


@pytest.mark.parametrize("way", ["greedy", "drawn", "penalties", "grammar"])
def test_what_was_said_before_changes_nothing_either(way: str) -> None:
    requests = requests_of(WAYS[way])
    plain = _engine()
    expected = answers_of(requests, plain.run(requests))
    drafter = EveryDraft([OwnText(), FinishedAnswers()], most=5)
    drafted = _engine(drafter=drafter)
    for _ in range(2):
        assert answers_of(requests, drafted.run(requests)) == expected
    _, own, finished = drafter.stats
    assert (own.num_drafts_total or way == "penalties") and finished.num_accepted_tokens > 20


def test_nor_do_they_where_blocks_are_short_and_sequences_preempted() -> None:
    requests = requests_of(WAYS["drawn"])
    expected = answers_of(requests, _engine().run(requests))
    oracle = oracle_of(requests, expected, 0.7)
    drafted = _engine(drafter=EveryDraft([oracle], most=7), num_blocks=9)
    assert answers_of(requests, drafted.run(requests)) == expected
    assert drafted.scheduler.stats().preemptions_total


def test_blocks_of_accepted_drafts_alone_are_found_again() -> None:
    requests = requests_of(WAYS["greedy"])
    expected = answers_of(requests, _engine().run(requests))
    oracle = oracle_of(requests, expected, 0.6)
    drafted = _engine(drafter=EveryDraft([oracle], most=7))
    drafted.run(requests)
    again = [
        replace(
            request,
            prompt_token_ids=(*request.prompt_token_ids, *ids[:50]),
            sampling=replace(request.sampling, max_tokens=10),
        )
        for request, (ids, *_) in zip(requests, expected.values(), strict=True)
        if len(ids) == 60
    ]
    drafted.scheduler._drafter = None
    assert again and answers_of(again, drafted.run(again)) == answers_of(
        again, _engine().run(again)
    )


def test_what_a_grammar_forces_is_drafted_and_changes_nothing() -> None:
    keys = LLMatcher.grammar_from_regex(
        '(\\{"the width of it": [0-9], "the height": [0-9]\\}\n){3}'
    )
    requests = requests_of({"temperature": 1.0, "grammar": keys, "num_logprobs": 1})
    expected = answers_of(requests, _engine().run(requests))
    drafter = EveryDraft([], most=7)
    assert answers_of(requests, _engine(drafter=drafter).run(requests)) == expected
    (grammar,) = drafter.stats
    assert grammar.num_draft_tokens_total > 50 and grammar.num_accepted_tokens > 10


def _tiny(path: Path, family: str, **changes: Any) -> tuple[EngineConfig, Any]:
    """A model of random weights, and the same in transformers."""
    model = make_model(family)
    settings: dict[str, Any] = {"dtype": Dtype.BFLOAT16, "block_size": 16, "max_model_len": 128}
    scheduler = SchedulerConfig(max_num_seqs=8, max_num_batched_tokens=64)
    return engine_config(save(model, path), scheduler=scheduler, **settings, **changes), model


@pytest.mark.parametrize(
    ("family", "changes"),
    [
        ("qwen3", {}),
        ("mistral_window", {}),
        ("gemma3", {}),
        ("qwen3_moe", {}),
        ("llama_biases", {"kv_cache_dtype": KVCacheDtype.INT8}),
        ("qwen3", {"quantization": Quantization.INT4}),
        ("qwen3", {"quantization": Quantization.INT8, "num_threads": 2}),
        ("qwen3_5", {}),
        ("qwen3_5_narrow", {"num_threads": 2}),
        ("qwen3_5_moe", {"quantization": Quantization.INT8}),
    ],
)
def test_families_and_formats_answer_with_drafts_what_they_answer_without(
    family: str, changes: dict[str, Any], tmp_path: Path
) -> None:
    config, _ = _tiny(tmp_path, family, **changes)
    sampling = SamplingParams(max_tokens=40, temperature=0.8, seed=4, num_logprobs=2)
    requests = [
        replace(make_request(str(i), prompt), sampling=sampling, n=2)
        for i, prompt in enumerate([[5, 6, 7], [3, 9] * 20, list(range(3, 60))])
    ]
    expected = answers_of(requests, SteppedEngine(config).run(requests))
    for share in (0.6, 1.0):
        drafter = EveryDraft([oracle_of(requests, expected, share)], most=6)
        found = answers_of(requests, SteppedEngine(config, drafter=drafter).run(requests))
        assert found == expected
        assert drafter.stats[-1].num_accepted_tokens > 20


HYBRIDS = ["qwen3_5", "qwen3_5_moe"]


def _hybrid_requests(way: str, n: int = 1) -> list[Request]:
    sampling = SamplingParams(max_tokens=60, seed=4, **WAYS[way])
    return [
        replace(make_request(str(i), prompt), sampling=sampling, n=n)
        for i, prompt in enumerate([[5, 6, 7], [3, 9] * 20, list(range(3, 60))])
    ]


def _snapshots(engine: SteppedEngine) -> dict[bytes, Tensor]:
    """The recurrent states that can be found again, by the digest of their last block."""
    cache = engine.scheduler._kv.groups[-1]
    assert isinstance(engine.executor, CpuExecutor)
    recurrent = engine.executor.pool.recurrent
    assert isinstance(cache, StateCache) and recurrent is not None
    return {
        digest: torch.cat(
            (recurrent.matrices[:, state].flatten(), recurrent.inputs[:, state].flatten())
        )
        for digest, state in cache._block_of.items()
    }


@pytest.mark.parametrize(
    ("family", "way", "share"),
    [
        ("qwen3_5", "greedy", 0.0),
        ("qwen3_5", "drawn", 0.5),
        ("qwen3_5", "penalties", 1.0),
        ("qwen3_5_moe", "penalties", 0.0),
        ("qwen3_5_moe", "greedy", 0.5),
        ("qwen3_5_moe", "drawn", 1.0),
        ("qwen3_5_moe", "penalties", 0.5),
    ],
)
def test_recurrent_states_are_those_of_accepted_drafts_alone(
    family: str, way: str, share: float, tmp_path: Path
) -> None:
    config, _ = _tiny(tmp_path, family)
    config = replace(config, block_size=8)
    requests = _hybrid_requests(way, n=2)
    plain = SteppedEngine(config)
    expected = answers_of(requests, plain.run(requests))
    oracle = oracle_of(requests, expected, share)
    drafter = EveryDraft([oracle], most=7)
    drafted = SteppedEngine(config, drafter=drafter)
    assert answers_of(requests, drafted.run(requests)) == expected
    assert bool(drafter.stats[-1].num_accepted_tokens) == bool(share)
    # As many are found, and all of them hold what they hold without drafts.
    found, right = _snapshots(drafted), _snapshots(plain)
    assert found.keys() == right.keys() and len(found) > len(requests)
    assert all(torch.equal(found[digest], right[digest]) for digest in found)


def test_states_are_right_after_a_preemption_amid_drafts(tmp_path: Path) -> None:
    config, _ = _tiny(tmp_path, "qwen3_5")
    requests = _hybrid_requests("drawn", n=2)
    expected = answers_of(requests, SteppedEngine(config).run(requests))
    oracle = oracle_of(requests, expected, 0.7)
    for enough in (True, False):
        scheduler = replace(config.scheduler, enable_prefix_caching=enough)
        short = replace(config, scheduler=scheduler)
        drafted = SteppedEngine(short, drafter=EveryDraft([oracle], most=7), num_blocks=18)
        assert answers_of(requests, drafted.run(requests)) == expected
        assert drafted.scheduler.stats().preemptions_total


def test_the_next_turn_goes_on_from_a_state_after_accepted_drafts(tmp_path: Path) -> None:
    config, _ = _tiny(tmp_path, "qwen3_5")
    requests = _hybrid_requests("greedy")[:2]
    plain = SteppedEngine(config)
    expected = answers_of(requests, plain.run(requests))
    oracle = oracle_of(requests, expected, 0.6)
    drafted = SteppedEngine(config, drafter=EveryDraft([oracle], most=7))
    drafted.run(requests)
    again = [
        replace(
            request,
            prompt_token_ids=(*request.prompt_token_ids, *ids, 7, 8, 9),
            sampling=replace(request.sampling, max_tokens=10),
        )
        for request, (ids, *_) in zip(requests, expected.values(), strict=True)
    ]
    drafted.scheduler._drafter = None
    outputs = drafted.run(again)
    assert answers_of(again, outputs) == answers_of(again, SteppedEngine(config).run(again))
    for request, of_request, of_plain in zip(again, outputs, plain.run(again), strict=True):
        assert of_request[0].num_cached_tokens == of_plain[0].num_cached_tokens
        assert of_request[0].num_cached_tokens > len(request.prompt_token_ids) - 3 - 16 - 1


def test_an_adapters_answers_are_the_same_beside_those_of_the_base_model(tmp_path: Path) -> None:
    path = tmp_path / "adapter"
    config, model = _tiny(tmp_path / "model", "qwen3")
    source = AdapterSource(name="a", path=str(save_adapter(model, path, size=0.5)))
    config = replace(config, lora=LoraConfig(adapters=(source,)))

    def run(drafter: EveryDraft | None) -> Answers:
        engine = SteppedEngine(config, drafter=drafter)
        assert engine.executor.adapters is not None
        loaded = engine.executor.adapters.load(source).result()
        requests[0] = replace(requests[0], adapter=loaded.id)
        return answers_of(requests, engine.run(requests))

    sampling = SamplingParams(max_tokens=30, temperature=0.0, num_logprobs=1)
    prompts = [list(range(3, 20)), list(range(4, 30))]
    requests = [replace(make_request("r", prompt), sampling=sampling) for prompt in prompts]
    expected = run(None)
    drafter = EveryDraft([oracle_of(requests, expected, 0.7)], most=5)
    assert run(drafter) == expected
    assert drafter.stats[-1].num_accepted_tokens > 10


@pytest.mark.parametrize("dtype", [Dtype.FLOAT32, Dtype.BFLOAT16])
def test_where_torch_computes_a_model_it_takes_none_since_bits_depend_on_the_number_of_rows(
    dtype: Dtype, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("penstock.engine.loading.cpu.load_library", lambda *_, **__: None)
    config = engine_config(save(make_model("qwen3"), tmp_path), dtype=dtype)
    info = SteppedEngine(config).executor.info
    assert (info.computed_by or "").startswith("torch") and not info.takes_drafts
    wanted = replace(config, speculative=SpeculativeConfig())
    step_model = LiveStepModel(info)
    assert _drafter(config, info, step_model) is None
    with pytest.raises(InvalidConfig, match="--speculative-config needs the compiled step"):
        _drafter(wanted, info, step_model)
