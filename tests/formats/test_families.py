"""A tiny checkpoint of each family: long greedy answers under a scheduler that chunks, preempts and
reuses prefixes, and an answer through HTTP with the family's chat template."""

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jinja2
import pytest
import torch
import transformers

from penstock.engine.models.config import ModelConfig
from penstock.scheduler.config import SchedulerConfig
from penstock.scheduler.types import Request, RequestId, SamplingParams
from tests.formats.templates import TEMPLATES
from tests.support.paths import DEMO_MODEL
from tests.support.serving import RunningServer
from tests.support.stepping import SteppedEngine, ids_of
from tests.support.tiny_models import (
    HYBRID_FAMILIES,
    LATENT_FAMILIES,
    MORE_FAMILIES,
    engine_config,
    make_model,
    save,
)

PROMPTS = (30, 47, 61)
NUM_TOKENS = 200
# Two tokens whose logits are as close as this may change places.
TIE = 1e-4
# Blocks of 16: fewer than three sequences need, so that some are preempted.
NUM_BLOCKS = 40
IMAGE = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}


def prompts() -> list[tuple[int, ...]]:
    """The first again at the end, and one that begins as it does."""
    generator = torch.Generator().manual_seed(5)
    made = [tuple(torch.randint(3, 96, (n,), generator=generator).tolist()) for n in PROMPTS]
    return [*made, made[0], (*made[2][:40], 7, 8, 9)]


@pytest.mark.parametrize("family", [*MORE_FAMILIES, *HYBRID_FAMILIES, *LATENT_FAMILIES])
def test_greedy_answers_of_200_tokens_are_those_of_transformers(
    family: str, tmp_path: Path
) -> None:
    model = make_model(family, max_position_embeddings=512)
    path = save(model, tmp_path)
    block_bytes = 16 * ModelConfig.from_dir(path).kv_shape.bytes_per_token(4)
    has_states = family in HYBRID_FAMILIES
    config = engine_config(
        path,
        block_size=16,
        max_model_len=320,
        kv_cache_memory_bytes=None if has_states else NUM_BLOCKS * block_bytes,
        scheduler=SchedulerConfig(max_num_seqs=8, max_num_batched_tokens=24),
    )
    engine = SteppedEngine(config, num_blocks=NUM_BLOCKS if has_states else None)
    sampling = SamplingParams(max_tokens=NUM_TOKENS, temperature=0.0)
    requests = [
        Request(id=RequestId(str(i)), prompt_token_ids=ids, sampling=sampling, arrival_s=0.0)
        for i, ids in enumerate(prompts())
    ]
    together = engine.run(requests)
    again = engine.run(requests[:1])
    stats = engine.scheduler.stats()
    assert stats.preemptions_total > 0
    for request, outputs in zip([*requests, requests[0]], [*together, *again], strict=True):
        assert_greedy(model, request.prompt_token_ids, ids_of(outputs))


def assert_greedy(model: Any, prompt: tuple[int, ...], answer: list[int]) -> None:
    assert len(answer) == NUM_TOKENS
    with torch.inference_mode():
        logits = model(torch.tensor([[*prompt, *answer]])).logits[0, len(prompt) - 1 : -1]
    chosen = logits.gather(1, torch.tensor(answer)[:, None])[:, 0]
    assert (logits.amax(1) - chosen).max() < TIE


@pytest.fixture(params=TEMPLATES)
def served(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[tuple[RunningServer, Any]]:
    """A server of a tiny model with the demo model's tokenizer, and the model."""
    model = make_model(request.param, vocab_size=2048)
    path = save(model, tmp_path / request.param)
    shutil.copy(DEMO_MODEL / "tokenizer.json", path)
    settings = json.loads((DEMO_MODEL / "tokenizer_config.json").read_text())
    del settings["chat_template"]
    (path / "tokenizer_config.json").write_text(json.dumps(settings))
    (path / "chat_template.jinja").write_text(TEMPLATES[request.param])
    flags = ("--device", "cpu", "--dtype", "float32", "--language-model-only")
    server = RunningServer(str(path), *flags)
    try:
        server.wait_until_ready()
        yield server, model
    finally:
        server.stop()


def test_it_answers_through_http_with_its_own_chat_template(
    served: tuple[RunningServer, Any], request: pytest.FixtureRequest
) -> None:
    server, model = served
    name = server.get("/v1/models").json()["data"][0]["id"]
    messages = [{"role": "user", "content": "Say a word"}]
    wanted = {"max_tokens": 1, "logprobs": True, "top_logprobs": 5, "temperature": 0}
    response = server.chat(model=name, messages=messages, **wanted)
    assert response.status_code == 200, response.text
    (token,) = response.json()["choices"][0]["logprobs"]["content"]

    template = TEMPLATES[request.node.callspec.params["served"]]
    text = jinja2.Template(template, trim_blocks=True, lstrip_blocks=True).render(
        messages=messages, add_generation_prompt=True
    )
    tokenizer = transformers.AutoTokenizer.from_pretrained(DEMO_MODEL)
    ids = tokenizer(text, add_special_tokens=False, return_tensors="pt").input_ids
    assert response.json()["usage"]["prompt_tokens"] == ids.shape[1]
    with torch.inference_mode():
        expected = model(ids).logits[0, -1].log_softmax(-1).topk(5).values
    found = sorted((each["logprob"] for each in token["top_logprobs"]), reverse=True)
    assert found == pytest.approx(expected.tolist(), abs=1e-3)

    with_image = [{"role": "user", "content": [{"type": "text", "text": "What?"}, IMAGE]}]
    refused = server.chat(model=name, messages=with_image, max_tokens=1)
    assert refused.status_code == 400
    assert "--language-model-only" in refused.json()["error"]["message"]
