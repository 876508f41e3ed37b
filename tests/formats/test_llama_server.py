"""Files of llama.cpp's own converter and quantizer answer as its own server does."""

import itertools
from collections.abc import Iterator

import pytest

from tests.formats.llama_cpp import IS_INSTALLED, NOT_INSTALLED, LlamaServer, write_gguf
from tests.support.paths import DEMO_MODEL, STORIES
from tests.support.serving import RunningServer

pytestmark = pytest.mark.skipif(not IS_INSTALLED, reason=NOT_INSTALLED)

MODELS = {"demo": DEMO_MODEL, "stories260K": STORIES}
PROMPTS = ("Once upon a time", "What can you do? I can tell you a story about a small boat.")
MAX_TOKENS, NUM_TOP = 40, 10
# By how much logprobs may differ, at most and in the mean of each token's largest difference.
# llama.cpp rounds activations to 8 bits where weights are codes, beside Q4_K in groups of 256.
TOLERANCES = {"F16": (0.1, 0.02), "Q8_0": (0.6, 0.2), "Q4_K_M": (1.0, 0.4)}


@pytest.fixture(scope="module", params=itertools.product(MODELS, TOLERANCES), ids="-".join)
def servers(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[str, str, RunningServer, LlamaServer]]:
    """The kind of weights, the name of the model, and two servers of one file."""
    name, kind = request.param
    if not MODELS[name].exists():
        pytest.skip(f"{name} is not here")
    folder = tmp_path_factory.getbasetemp() / name
    folder.mkdir(exist_ok=True)
    file = write_gguf(MODELS[name], kind, folder)
    theirs = LlamaServer(file)
    ours = RunningServer(str(file), "--device", "cpu", "--dtype", "float32")
    try:
        theirs.wait_until_ready()
        ours.wait_until_ready()
        yield kind, file.stem, ours, theirs
    finally:
        theirs.stop()
        ours.stop()


@pytest.mark.parametrize("prompt", PROMPTS)
def test_both_read_a_text_as_the_same_ids(
    servers: tuple[str, str, RunningServer, LlamaServer], prompt: str
) -> None:
    _, model, ours, theirs = servers
    found = ours.post("/tokenize", {"model": model, "prompt": prompt}).json()
    assert found["tokens"] == theirs.token_ids(prompt)


@pytest.mark.parametrize("prompt", PROMPTS)
def test_the_logprobs_of_an_answer_differ_by_rounding_alone(
    servers: tuple[str, str, RunningServer, LlamaServer], prompt: str
) -> None:
    kind, model, ours, theirs = servers
    ids = theirs.token_ids(prompt)
    answer, tops = theirs.continuation(ids, MAX_TOKENS, NUM_TOP)
    response = ours.complete(
        model=model, prompt=ids + answer, max_tokens=1, prompt_logprobs=2 * NUM_TOP
    )
    found = response.json()["choices"][0]["prompt_logprobs"][len(ids) :]
    largest = [
        max(abs(logprob - of_token[str(id)]["logprob"]) for id, logprob in top.items())
        for top, of_token in zip(tops, found, strict=True)
    ]
    at_most, mean = TOLERANCES[kind]
    assert max(largest) < at_most
    assert sum(largest) / len(largest) < mean


@pytest.mark.parametrize("prompt", PROMPTS)
def test_greedy_answers_are_the_same_until_two_tokens_are_about_as_likely(
    servers: tuple[str, str, RunningServer, LlamaServer], prompt: str
) -> None:
    kind, model, ours, theirs = servers
    ids = theirs.token_ids(prompt)
    expected, tops = theirs.continuation(ids, MAX_TOKENS, NUM_TOP)
    firsts = (sorted(top.values(), reverse=True)[:2] for top in tops)
    is_clear = [first - second > TOLERANCES[kind][0] for first, second in firsts]
    num_clear = len(list(itertools.takewhile(bool, is_clear)))
    response = ours.complete(
        model=model, prompt=ids, max_tokens=MAX_TOKENS, temperature=0, return_token_ids=True
    )
    found = response.json()["choices"][0]["token_ids"]
    assert num_clear > 0
    assert found[:num_clear] == expected[:num_clear]
