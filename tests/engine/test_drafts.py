"""Answers with drafts are those without, to the last bit."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from llguidance import LLMatcher

from penstock.engine.config import (
    AdapterSource,
    Dtype,
    EngineConfig,
    KVCacheDtype,
    LoraConfig,
    Quantization,
)
from penstock.scheduler.config import SchedulerConfig
from penstock.scheduler.drafts.sources import FinishedAnswers, OwnText
from penstock.scheduler.types import Request, SamplingParams
from tests.support.adapters import save_adapter
from tests.support.compiler import needs_compiler
from tests.support.drafting import EveryDraft, Oracle
from tests.support.paths import STORIES
from tests.support.scheduling import make_request
from tests.support.stepping import SteppedEngine
from tests.support.tiny_models import engine_config, make_model, save
from tests.support.ways import WAYS, Answers, answers_of, requests_of

pytestmark = [
    needs_compiler,
    pytest.mark.skipif(
        not STORIES.exists(), reason="the stories260K weights are not beside the checkout"
    ),
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


def _oracle(requests: list[Request], answers: Answers, share: float) -> Oracle:
    oracle = Oracle(share)
    for request in requests:
        prompt = request.prompt_token_ids
        oracle.learn(request, [answers[prompt, index][0] for index in range(request.n)])
    return oracle


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("share", [0.0, 0.5, 1.0])
def test_an_oracles_drafts_change_nothing(way: str, share: float) -> None:
    requests = requests_of(WAYS[way], n=2)
    plain = _engine()
    expected = answers_of(requests, plain.run(requests))
    oracle = _oracle(requests, expected, share)
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
    oracle = _oracle(requests, expected, 0.7)
    drafted = _engine(drafter=EveryDraft([oracle], most=7), num_blocks=9)
    assert answers_of(requests, drafted.run(requests)) == expected
    assert drafted.scheduler.stats().preemptions_total


def test_blocks_of_accepted_drafts_alone_are_found_again() -> None:
    requests = requests_of(WAYS["greedy"])
    expected = answers_of(requests, _engine().run(requests))
    oracle = _oracle(requests, expected, 0.6)
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
        drafter = EveryDraft([_oracle(requests, expected, share)], most=6)
        found = answers_of(requests, SteppedEngine(config, drafter=drafter).run(requests))
        assert found == expected
        assert drafter.stats[-1].num_accepted_tokens > 20


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
    drafter = EveryDraft([_oracle(requests, expected, 0.7)], most=5)
    assert run(drafter) == expected
    assert drafter.stats[-1].num_accepted_tokens > 10
