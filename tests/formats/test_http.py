"""The demo model in every format, through HTTP: its logprobs are those of transformers."""

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import transformers

from tests.support.paths import DEMO_MODEL
from tests.support.quantized_checkpoints import FORMATS, save_quantized
from tests.support.serving import RunningServer

PROMPT = "Once upon a time"
# Of a log probability, in float32.
TOLERANCE = 1e-4


@pytest.fixture(params=FORMATS)
def served(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[tuple[RunningServer, Path]]:
    """A server of the demo model in a format, and the directory of a plain one with its values."""
    model = transformers.AutoModelForCausalLM.from_pretrained(DEMO_MODEL, dtype=torch.float32)
    directory, plain = tmp_path / "demo", tmp_path / "plain"
    save_quantized(model, directory, FORMATS[request.param]).save_pretrained(plain)
    for file in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(DEMO_MODEL / file, directory)
        shutil.copy(DEMO_MODEL / file, plain)
    server = RunningServer(str(directory), "--device", "cpu", "--dtype", "float32")
    try:
        server.wait_until_ready()
        yield server, plain
    finally:
        server.stop()


def test_a_quantized_model_answers(served: tuple[RunningServer, Path]) -> None:
    server, plain = served
    name = str(plain.with_name("demo"))
    response = server.complete(model=name, prompt=PROMPT, max_tokens=1, logprobs=5, temperature=0)
    assert response.status_code == 200, response.text
    (top,) = response.json()["choices"][0]["logprobs"]["top_logprobs"]

    model = transformers.AutoModelForCausalLM.from_pretrained(plain, dtype=torch.float32)
    ids = transformers.AutoTokenizer.from_pretrained(plain)(PROMPT, return_tensors="pt").input_ids
    with torch.inference_mode():
        expected = model(ids).logits[0, -1].log_softmax(-1).topk(5).values
    assert sorted(top.values(), reverse=True) == pytest.approx(expected.tolist(), abs=TOLERANCE)

    answer = server.complete(model=name, prompt=PROMPT, max_tokens=16)
    assert answer.json()["usage"]["completion_tokens"] == 16
