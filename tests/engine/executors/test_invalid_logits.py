"""NaN from a model ends the requests that it is in, with a reason, and touches no others.

One token of the model has NaN as its embedding: a prompt or answer with that token has NaN logits
from there on.
"""

import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from llguidance import LLMatcher

from penstock.engine.config import Dtype
from penstock.engine.files.dummy_tokenizer import dummy_tokenizer
from penstock.engine.step.executor import Executor, PendingTokens
from penstock.scheduler.config import SchedulerConfig
from penstock.scheduler.scheduler import Scheduler
from penstock.scheduler.types import (
    FinishReason,
    Pooling,
    Request,
    RequestId,
    RequestOutput,
    SamplingParams,
)
from tests.support.compiler import HAS_COMPILER
from tests.support.executors import cpu_executor
from tests.support.kernels import ON_GPU
from tests.support.tiny_models import engine_config, make_model, save

POISON = 70
CONFIG = SchedulerConfig(max_num_seqs=8, max_num_batched_tokens=64)
SETTINGS: dict[str, Any] = {
    "block_size": 8,
    "max_model_len": 32,
    "kv_cache_memory_bytes": 150_000,  # twelve blocks
    "scheduler": CONFIG,
}
GREEDY = SamplingParams(max_tokens=2, temperature=0.0)
SAMPLINGS = {
    "greedy": GREEDY,
    "greedy-logprobs": SamplingParams(max_tokens=2, temperature=0.0, num_logprobs=2),
    "sampled": SamplingParams(max_tokens=2, temperature=1.0, seed=1),
    "filtered-logprobs": SamplingParams(max_tokens=2, top_p=0.9, top_k=40, seed=2, num_logprobs=0),
    "penalties": SamplingParams(max_tokens=2, temperature=0.7, seed=3, repetition_penalty=1.2),
    "grammar": SamplingParams(
        max_tokens=2, seed=4, grammar=LLMatcher.grammar_from_regex("[a-f]{9}"), num_logprobs=1
    ),
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    model = make_model("llama2")
    with torch.no_grad():
        model.get_input_embeddings().weight[POISON] = torch.nan
    path = save(model, tmp_path_factory.mktemp("model"))
    (path / "tokenizer.json").write_text(dummy_tokenizer(96).to_str())
    return path


# In Triton's interpreter a test takes ten seconds.
@pytest.fixture(
    params=["torch", "native", pytest.param("cuda", marks=pytest.mark.slow)], scope="module"
)
def executor(request: pytest.FixtureRequest, model: Path) -> Executor:
    config = engine_config(model, **SETTINGS)
    if request.param == "cuda":
        pytest.importorskip("triton", reason="Triton is not installed")
        if ON_GPU:
            pytest.skip("kernels are compiled here, not interpreted")
        from penstock.engine.executors.cuda.device import Interpreter
        from tests.support.executors import cuda_executor

        return cuda_executor(config, model, Interpreter())
    with pytest.MonkeyPatch.context() as patch:
        if request.param == "torch":
            patch.setattr("penstock.engine.loading.cpu.load_library", lambda *_, **__: None)
        elif not HAS_COMPILER:
            pytest.skip("there is no C++ compiler")
        return cpu_executor(config, model)


class Outcome:
    """All outputs of some requests that ran together, and the scheduler after them."""

    def __init__(self, executor: Executor, requests: list[Request]) -> None:
        info = executor.info
        self.scheduler = Scheduler(
            CONFIG,
            groups=info.kv_groups,
            block_size=info.block_size,
            max_model_len=info.max_model_len,
        )
        for request in requests:
            if future := executor.prepare(request):
                future.result()
            self.scheduler.add(request)
        self.outputs: list[RequestOutput] = []
        launched: PendingTokens | None = None
        while self.scheduler.has_work or launched:
            batch = self.scheduler.schedule(0.0)
            pending = executor.execute(batch) if batch else None
            if not info.runs_ahead:
                launched, pending = pending, None
            if launched:
                self.outputs += self.scheduler.update(launched.wait())
            launched = pending
        for request in requests:
            executor.release(request.id)

    def ids(self, name: str) -> list[int]:
        return [i for o in self.outputs if o.request_id == name for i in o.token_ids]

    def reason(self, name: str) -> FinishReason:
        (reason,) = (o.finish.reason for o in self.outputs if o.request_id == name and o.finish)
        return reason


def request_of(name: str, sampling: SamplingParams, *, is_bad: bool, **fields: Any) -> Request:
    prompt = random.Random(name).choices(range(POISON), k=20)
    if is_bad:
        prompt[10] = POISON
    return Request(
        id=RequestId(name),
        prompt_token_ids=tuple(prompt),
        sampling=sampling,
        arrival_s=0.0,
        **fields,
    )


@pytest.mark.filterwarnings("ignore:invalid value encountered")  # by the interpreter
def test_requests_with_nan_logits_end_with_the_reason_and_the_others_are_as_without_them(
    executor: Executor,
) -> None:
    good = [request_of(name, SAMPLINGS[name], is_bad=False) for name in SAMPLINGS][::2]
    good += [request_of("more", SAMPLINGS["grammar"], is_bad=False)]
    alone = Outcome(executor, good)
    bad = [request_of(f"bad-{name}", SAMPLINGS[name], is_bad=True) for name in SAMPLINGS]
    together = Outcome(executor, bad[:4] + good + bad[4:])
    for request in bad:
        assert together.reason(request.id) is FinishReason.INVALID_LOGITS
        assert together.ids(request.id) == []
    for request in good:
        assert together.reason(request.id) is alone.reason(request.id) is FinishReason.LENGTH
        assert together.ids(request.id) == alone.ids(request.id)
    assert together.scheduler.stats().invalid_logits_total == len(bad)
    assert together.scheduler.stats().groups[0].num_used == 0


@pytest.mark.filterwarnings("ignore:invalid value encountered")
@pytest.mark.parametrize("name", [name for name in SAMPLINGS if name != "grammar"])
def test_nan_in_the_middle_of_an_answer_ends_it_there(executor: Executor, name: str) -> None:
    forced = replace(SAMPLINGS[name], max_tokens=9, logit_bias=((POISON, 100.0),))
    ran = Outcome(executor, [request_of("a", forced, is_bad=False)])
    assert ran.ids("a") == [POISON]
    assert ran.reason("a") is FinishReason.INVALID_LOGITS
    assert ran.scheduler.stats().groups[0].num_used == 0


@pytest.mark.filterwarnings("ignore:invalid value encountered")
def test_no_other_request_finds_what_a_failed_one_computed_in_the_prefix_cache(
    executor: Executor,
) -> None:
    ran = Outcome(executor, [request_of("a", GREEDY, is_bad=True)])
    assert ran.scheduler.stats().groups[0].num_evictable == 0
    ran = Outcome(executor, [request_of("a", GREEDY, is_bad=False)])
    assert ran.scheduler.stats().groups[0].num_evictable > 0


@pytest.mark.filterwarnings("ignore:invalid value encountered")
@pytest.mark.parametrize("pooling", [Pooling.LAST, Pooling.MEAN, None])
def test_outputs_of_a_prompt_with_nan_are_not_returned(
    executor: Executor, pooling: Pooling | None
) -> None:
    sampling = SamplingParams(max_tokens=0, num_prompt_logprobs=None if pooling else 1)
    requests = [
        request_of("bad", sampling, is_bad=True, pooling=pooling),
        request_of("good", sampling, is_bad=False, pooling=pooling),
    ]
    ran = Outcome(executor, requests)
    assert ran.reason("bad") is FinishReason.INVALID_LOGITS
    assert ran.reason("good") is FinishReason.LENGTH
    assert {o.request_id for o in ran.outputs if o.prompt} == {"good"}


@pytest.mark.filterwarnings("ignore:invalid value encountered")
def test_blocks_that_hold_nan_harm_no_sequence_that_gets_them_later(executor: Executor) -> None:
    good = [request_of(name, GREEDY, is_bad=False) for name in ("one", "two")]
    clean = Outcome(executor, good)
    num_requests = executor.info.num_blocks // 3  # each has three blocks
    Outcome(executor, [request_of(f"bad-{i}", GREEDY, is_bad=True) for i in range(num_requests)])
    after = Outcome(executor, good)
    for request in good:
        assert after.ids(request.id) == clean.ids(request.id)


@pytest.mark.parametrize("native", [False, True])
@pytest.mark.parametrize(
    ("weight", "factor"),
    [("mlp.up_proj", 5e4), ("self_attn.k_proj", 1e5), ("self_attn.v_proj", 5e4)],
)
def test_no_answer_comes_from_what_overflows_in_float16(
    native: bool, weight: str, factor: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not native:
        monkeypatch.setattr("penstock.engine.loading.cpu.load_library", lambda *_, **__: None)
    elif not HAS_COMPILER:
        pytest.skip("there is no C++ compiler")
    model = make_model("llama2")
    with torch.no_grad():
        model.get_submodule(f"model.layers.1.{weight}").weight.mul_(factor)
    path = save(model, tmp_path)
    # The compiled step has keys and values alone in float16.
    overflows = not native or weight != "mlp.up_proj"
    for dtype, reason in (
        (Dtype.FLOAT16, FinishReason.INVALID_LOGITS if overflows else FinishReason.LENGTH),
        (Dtype.BFLOAT16, FinishReason.LENGTH),
    ):
        executor = cpu_executor(engine_config(path, dtype=dtype), path)
        prompt = tuple(range(3, 23))
        request = Request(
            id=RequestId("a"), prompt_token_ids=prompt, sampling=GREEDY, arrival_s=0.0
        )
        assert Outcome(executor, [request]).reason("a") is reason
