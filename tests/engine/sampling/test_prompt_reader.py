"""Prompt logprobs and embeddings of real models: as in transformers, and bit for bit equal
however the prompt is run."""

import math
import random
import struct
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor

from penstock.engine.config import Dtype, SpeculativeConfig
from penstock.engine.sampling.prompt_reader import PromptReader
from penstock.engine.step.model_input import build_model_input
from penstock.scheduler.config import SchedulerConfig
from penstock.scheduler.prompt_logprobs import PackedLogprobs
from penstock.scheduler.types import (
    Pooling,
    PromptOutput,
    PromptOutputRequest,
    Request,
    RequestId,
    SamplingParams,
    SlotAssignment,
)
from tests.support.compiler import needs_compiler
from tests.support.paths import DEMO_MODEL, STORIES
from tests.support.stepping import SteppedEngine, ids_of
from tests.support.stories import needs_stories
from tests.support.tiny_models import (
    BLOCK_SIZE,
    FAMILIES,
    GREEDY,
    Harness,
    engine_config,
    make_batch,
    make_model,
    save,
)

TOLERANCE = 1e-4
# A draft model's blocks would take some of the pool's memory.
NO_DRAFTS = SpeculativeConfig(num_speculative_tokens=0)


def request_of(
    prompt: list[int],
    *,
    num_prompt_logprobs: int | None = 3,
    pooling: Pooling | None = None,
    max_tokens: int = 0,
    num_logprobs: int | None = None,
) -> Request:
    return Request(
        id=RequestId("a"),
        prompt_token_ids=tuple(prompt),
        sampling=SamplingParams(
            max_tokens=max_tokens,
            temperature=0.0,
            num_logprobs=num_logprobs,
            num_prompt_logprobs=num_prompt_logprobs,
        ),
        arrival_s=0.0,
        pooling=pooling,
    )


def prompt_outputs(engine: SteppedEngine, requests: list[Request]) -> list[PromptOutput]:
    outputs = [answer[0].prompt for answer in engine.run(requests)]
    assert None not in outputs
    return [output for output in outputs if output]


def embedding(output: PromptOutput) -> Tensor:
    assert output.embedding
    return torch.tensor(struct.unpack(f"<{len(output.embedding) // 4}f", output.embedding))


def prompts(vocab_size: int, lengths: list[int], seed: int = 1) -> list[list[int]]:
    draw = random.Random(seed)
    return [[draw.randrange(3, vocab_size) for _ in range(length)] for length in lengths]


def assert_close(ours: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(ours, expected, atol=TOLERANCE, rtol=TOLERANCE)


def assert_scored(entries: PackedLogprobs | None, logits: Tensor, prompt: list[int]) -> None:
    """logits: (tokens, vocab_size), transformers' for the whole prompt."""
    assert entries is not None
    expected = logits[:-1].log_softmax(-1)
    own = expected.gather(1, torch.tensor(prompt[1:])[:, None])
    assert_close(torch.tensor([entry.logprob for entry in entries]), own[:, 0])
    top = torch.tensor([[logprob for _, logprob in entry.top] for entry in entries])
    assert_close(top, expected.topk(top.shape[1]).values)
    top_ids = torch.tensor([[token_id for token_id, _ in entry.top] for entry in entries])
    assert_close(expected.gather(1, top_ids), top)
    # If two are almost equally likely, either may rank higher.
    ranks = torch.tensor([entry.rank for entry in entries])
    assert ((expected > own + TOLERANCE).sum(-1) + 1 <= ranks).all()
    assert (ranks <= (expected > own - TOLERANCE).sum(-1) + 1).all()


@pytest.mark.parametrize("name", FAMILIES)
def test_logprobs_and_all_poolings_are_those_of_transformers(name: str, tmp_path: Path) -> None:
    model = make_model(name)
    path = save(model, tmp_path)
    budget = SchedulerConfig(max_num_seqs=8, max_num_batched_tokens=30)
    engine = SteppedEngine(engine_config(path, scheduler=budget))
    for prompt in prompts(96, [70, 5]):
        with torch.inference_mode():
            oracle = model(torch.tensor([prompt]), output_hidden_states=True)
        states = oracle.hidden_states[-1][0]
        last, mean, first = prompt_outputs(
            engine, [request_of(prompt, pooling=pooling) for pooling in Pooling]
        )
        for output in (last, mean, first):
            assert_scored(output.logprobs, oracle.logits[0], prompt)
        assert_close(embedding(last), states[-1])
        assert_close(embedding(mean), states.mean(0))
        assert_close(embedding(first), states[0])
        assert engine.executor.info.hidden_size == len(states[-1])


@pytest.mark.parametrize("is_native", [False, pytest.param(True, marks=needs_compiler)])
@pytest.mark.parametrize("name", ["llama3.2_tied", "mistral_window", "qwen3"])
def test_states_of_any_rows_are_transformers_and_give_the_logits_of_a_step(
    name: str, is_native: bool, tmp_path: Path
) -> None:
    model = make_model(name)
    (prompt,) = prompts(96, [60])
    made = Harness(save(model, tmp_path), native=is_native)
    made.token_table[0, :60] = torch.tensor(prompt)
    (logits,) = made.run([(0, 0, 60)])
    step = build_model_input(
        make_batch((0,), (0,), (60,)), made.token_table, made.block_tables, BLOCK_SIZE
    )
    rows = torch.tensor([59, 3, 3, 20])
    with torch.inference_mode():
        states = made.model.states(step, made.pool, rows)
        expected = model(torch.tensor([prompt]), output_hidden_states=True).hidden_states[-1]
        assert_close(states, expected[0, rows])
        again = made.model.logits(states)
    if is_native:
        assert torch.equal(again, logits[rows])
    assert_close(again, logits[rows])


@needs_stories
def test_trained_weights_give_the_logprobs_of_transformers() -> None:
    model = transformers.AutoModelForCausalLM.from_pretrained(STORIES, dtype=torch.float32)
    (prompt,) = prompts(512, [200])
    with torch.inference_mode():
        logits = model(torch.tensor([prompt])).logits[0]
    (output,) = prompt_outputs(SteppedEngine(engine_config(STORIES)), [request_of(prompt)])
    assert_scored(output.logprobs, logits, prompt)


def small_engine(
    path: Path, dtype: Dtype, num_seqs: int, budget: int, **changes: Any
) -> SteppedEngine:
    scheduler = SchedulerConfig(max_num_seqs=num_seqs, max_num_batched_tokens=budget)
    settings = {"dtype": dtype, "block_size": 16, "max_model_len": 128, "scheduler": scheduler}
    return SteppedEngine(engine_config(path, **(settings | changes)))


@needs_compiler
@pytest.mark.parametrize(
    "dtype", [pytest.param(Dtype.FLOAT32, marks=pytest.mark.slow), Dtype.BFLOAT16]
)
@pytest.mark.parametrize("name", ["demo", "mistral_window", "qwen3", "llama_biases"])
def test_every_bit_is_the_same_alone_in_a_batch_and_in_chunks(
    name: str, dtype: Dtype, tmp_path: Path
) -> None:
    path = DEMO_MODEL if name == "demo" else save(make_model(name), tmp_path)
    engine = small_engine(path, dtype, 1, 256)
    vocab_size = engine.executor.info.vocab_size
    requests = [
        request_of(prompt, pooling=list(Pooling)[i % 2], max_tokens=i % 3 * 20)
        for i, prompt in enumerate(prompts(vocab_size, [80, 3, 41, 1, 64, 17, 77, 30]))
    ]
    alone = prompt_outputs(engine, requests)
    assert prompt_outputs(small_engine(path, dtype, 8, 256), requests) == alone
    assert prompt_outputs(small_engine(path, dtype, 7, 7), requests) == alone
    assert prompt_outputs(small_engine(path, dtype, 8, 64, num_threads=2), requests) == alone


@needs_compiler
def test_every_bit_is_the_same_after_a_preemption_in_the_middle_of_the_prompt() -> None:
    early, late, prompt = prompts(500, [17, 17, 80])
    request = request_of(prompt, pooling=Pooling.MEAN)
    alone = prompt_outputs(small_engine(DEMO_MODEL, Dtype.FLOAT32, 1, 256), [request])
    pool_bytes = 11 * 16 * 2 * 4 * 2 * 64 * 4  # eleven blocks of the demo model
    memory = {"kv_cache_memory_bytes": pool_bytes, "speculative": NO_DRAFTS}
    crowded = small_engine(DEMO_MODEL, Dtype.FLOAT32, 3, 3, **memory)
    decodes = [request_of(p, num_prompt_logprobs=None, max_tokens=100) for p in (early, late)]
    *_, outputs = crowded.run([*decodes, request])
    assert outputs[0].finish and outputs[0].finish.num_preemptions > 0
    assert [output.prompt for output in outputs] == alone


@needs_compiler
@pytest.mark.parametrize("dtype", [Dtype.FLOAT32, Dtype.BFLOAT16])
def test_a_token_has_the_same_logprob_when_sampled_and_in_a_prompt(dtype: Dtype) -> None:
    engine = small_engine(DEMO_MODEL, dtype, 4, 256)
    for prompt in prompts(500, [1, 20]):
        (outputs,) = engine.run(
            [request_of(prompt, max_tokens=30, num_logprobs=4, num_prompt_logprobs=4)]
        )
        sampled = [entry for output in outputs for entry in output.logprobs or []]
        (again,) = prompt_outputs(
            engine, [request_of(prompt + ids_of(outputs), num_prompt_logprobs=4)]
        )
        entries = (again.logprobs or [])[len(prompt) - 1 :]
        assert [entry.logprob for entry in entries] == [entry.logprob for entry in sampled]
        assert [entry.top for entry in entries] == [entry.top for entry in sampled]
        assert all(entry.rank == 1 for entry in entries)


@needs_compiler
def test_prompt_outputs_do_not_change_the_generated_tokens() -> None:
    engine = small_engine(DEMO_MODEL, Dtype.FLOAT32, 4, 256)
    (prompt,) = prompts(500, [40])
    plain = request_of(prompt, num_prompt_logprobs=None, max_tokens=40)
    with_outputs = request_of(prompt, pooling=Pooling.MEAN, max_tokens=40)
    answers = [ids_of(outputs) for outputs in engine.run([plain, with_outputs, plain])]
    assert answers[0] == answers[1] == answers[2]


def read(reader: PromptReader, states: Tensor, prompt: list[int], num_top: int) -> PromptOutput:
    assignment = SlotAssignment(
        0,
        tuple(prompt),
        len(prompt),
        ((),),
        GREEDY,
        seed=0,
        prompt_request=PromptOutputRequest(num_top, Pooling.MEAN),
    )
    reader.assign(assignment)
    batch = make_batch((0,), (0,), (len(prompt),), samples=(False,))
    (output,) = reader.read(reader.parts(batch, [0, len(prompt)]), states, torch.tensor([prompt]))
    assert output
    return output


def test_the_rank_is_one_more_than_the_ids_that_are_more_likely() -> None:
    logits = torch.tensor([[0.0, 0.0, 1.0, -1.0]]).repeat(5, 1)
    reader = PromptReader(4, lambda states: states.clone())
    output = read(reader, logits, [0, 0, 1, 2, 3], num_top=9)
    entries = output.logprobs
    assert entries is not None
    assert [entry.rank for entry in entries] == [2, 2, 1, 4]
    assert all(len(entry.top) == 4 for entry in entries)
    assert math.fsum(math.exp(p) for _, p in entries[:1][0].top) == pytest.approx(1.0)


def test_at_most_32_mib_of_logits_are_computed_at_a_time() -> None:
    vocab_size, sizes = 2**20, []

    def to_logits(states: Tensor) -> Tensor:
        sizes.append(len(states))
        return torch.zeros(len(states), vocab_size)

    output = read(PromptReader(vocab_size, to_logits), torch.zeros(20, 2), list(range(20)), 1)
    assert sizes == [8, 8, 3]
    assert len(output.logprobs or []) == 19


def test_a_mean_is_summed_in_float64() -> None:
    states = torch.full((20_000, 1), 0.1).to(torch.bfloat16)
    states[0] = 3e4
    reader = PromptReader(4, lambda some: torch.zeros(len(some), 4))
    output = read(reader, states, [1] * len(states), num_top=0)
    assert embedding(output).item() == pytest.approx(states.double().mean().item(), rel=1e-7)
