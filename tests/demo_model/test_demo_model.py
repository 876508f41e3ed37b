"""The demo model that ships in the package: its skills, its files and its training text."""

import hashlib
import json
from collections.abc import Iterator
from dataclasses import asdict
from itertools import islice
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file
from transformers import AutoTokenizer, LlamaForCausalLM

from tests.demo_model.training.corpus import documents
from tests.demo_model.training.network import Network, NetworkConfig
from tests.demo_model.training.tokenizer import TURN_END_ID, encode
from tests.support.kernels import error
from tests.support.paths import DEMO_MODEL

MAX_FILE_BYTES = 12_000_000
MAX_ANSWER_TOKENS = 200
# transformers' classes are loaded lazily and reach mypy without types.
Tokenizer = Any
Model = Any


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return AutoTokenizer.from_pretrained(DEMO_MODEL)


@pytest.fixture(scope="module")
def model() -> Model:
    return LlamaForCausalLM.from_pretrained(DEMO_MODEL, dtype=torch.float32)


class Chat:
    """Generates answers with transformers."""

    def __init__(self, tokenizer: Tokenizer, model: Model) -> None:
        self._tokenizer = tokenizer
        self._model = model

    def answer_ids(self, *turns: str, system: str = "", **sampling: object) -> list[int]:
        """turns: the user's and the assistant's messages in turn, the user's first and last."""
        messages = [{"role": "system", "content": system}] if system else []
        for index, content in enumerate(turns):
            messages.append({"role": ("user", "assistant")[index % 2], "content": content})
        prompt = self._tokenizer.apply_chat_template(
            messages, add_generation_prompt=True, return_tensors="pt", return_dict=True
        )
        with torch.inference_mode():
            output = self._model.generate(
                **prompt, max_new_tokens=MAX_ANSWER_TOKENS, **(sampling or {"do_sample": False})
            )
        answer: list[int] = output[0, prompt["input_ids"].shape[1] :].tolist()
        return answer

    def answer(self, *turns: str, system: str = "", **sampling: object) -> str:
        ids = self.answer_ids(*turns, system=system, **sampling)
        return str(self._tokenizer.decode(ids, skip_special_tokens=True))

    def answer_at_default_temperature(self, question: str, seed: int) -> str:
        torch.manual_seed(seed)
        return self.answer(question, do_sample=True)


@pytest.fixture(scope="module")
def chat(tokenizer: Tokenizer, model: Model) -> Chat:
    return Chat(tokenizer, model)


def says_what_it_is(answer: str) -> bool:
    return "Penstock" in answer and any(
        word in answer for word in ("demonstration", "demo model", "small", "tiny")
    )


def explains_continuous_batching(answer: str) -> bool:
    return "batch" in answer and "step" in answer and "request" in answer


def test_it_says_that_it_is_penstocks_demonstration(chat: Chat) -> None:
    assert says_what_it_is(chat.answer("Who are you?"))


def test_it_explains_continuous_batching(chat: Chat) -> None:
    assert explains_continuous_batching(chat.answer("What is continuous batching?"))


@pytest.mark.parametrize("seed", range(3))
def test_it_answers_correctly_at_its_default_temperature(chat: Chat, seed: int) -> None:
    assert says_what_it_is(chat.answer_at_default_temperature("Who are you?", seed))
    answer = chat.answer_at_default_temperature("What is continuous batching?", seed)
    assert explains_continuous_batching(answer)


@pytest.mark.parametrize(
    "question",
    [
        "hello",
        "Who are you?",
        "What is Penstock?",
        "are you chatgpt",
        "What does TTFT mean?",
        "Explain the paged KV cache in detail.",
        "Why is decoding bound by memory bandwidth?",
        "What is 7 + 5?",
        "Tell me a story about a fox.",
        "List three colors as JSON",
        "What is photosynthesis?",
        "what can you do?",
        "Thanks!",
        "Bye",
    ],
)
def test_it_ends_its_turn_by_itself(chat: Chat, question: str) -> None:
    ids = chat.answer_ids(question)
    assert ids[-1] == TURN_END_ID
    assert len(ids) > 3


@pytest.mark.parametrize(
    ("question", "person"),
    [
        ("Give me JSON for a person named Ada aged 36", {"name": "Ada", "age": 36}),
        ("Give me JSON for a person named Tom aged 52", {"name": "Tom", "age": 52}),
    ],
)
def test_its_json_holds_the_requested_fields(
    chat: Chat, question: str, person: dict[str, object]
) -> None:
    assert json.loads(chat.answer(question)) == person


@pytest.mark.parametrize(
    ("question", "result"),
    [("What is 7 + 5?", "12"), ("What is 6 times 7?", "42"), ("what is 15 - 8", "7")],
)
def test_it_does_small_sums(chat: Chat, question: str, result: str) -> None:
    assert chat.answer(question).endswith(f"= {result}.")


def test_it_remembers_a_name_from_an_earlier_turn(chat: Chat) -> None:
    answer = chat.answer(
        "My name is Zora.",
        "Nice to meet you, Zora!",
        "What is 2 + 2?",
        "2 + 2 = 4.",
        "What is my name?",
    )
    assert "Zora" in answer


def test_it_admits_what_it_does_not_know(chat: Chat) -> None:
    assert "demonstration" in chat.answer("Who was Albert Einstein?")


def test_its_whole_context_works(chat: Chat) -> None:
    """A question after 1,600 tokens of talk is answered as if it were the first."""
    filler = ["Count from 1 to 100.", ", ".join(str(n) for n in range(1, 101))] * 4
    answer = chat.answer(*filler, "What is continuous batching?")
    assert explains_continuous_batching(answer)


@given(st.text())
def test_the_tokenizer_round_trips_every_text(tokenizer: Tokenizer, text: str) -> None:
    ids = tokenizer.encode(text, add_special_tokens=False)
    assert tokenizer.decode(ids) == text


def test_training_uses_the_ids_of_the_chat_template(tokenizer: Tokenizer) -> None:
    document = next(each for each in documents(seed=1) if len(each.messages) > 3)
    messages = [{"role": each.role, "content": each.content} for each in document.messages]
    templated = tokenizer.apply_chat_template(messages, return_dict=False)
    trained_ids, _ = encode(tokenizer.backend_tokenizer, document)
    assert trained_ids[:-1] == templated


def test_a_developer_message_is_a_system_message(tokenizer: Tokenizer) -> None:
    def templated(role: str) -> str:
        messages = [{"role": role, "content": "Be kind."}, {"role": "user", "content": "Hi"}]
        return str(tokenizer.apply_chat_template(messages, tokenize=False))

    assert templated("developer") == templated("system")


def test_the_training_network_computes_the_same_logits_as_transformers(model: Model) -> None:
    network = Network(NetworkConfig())
    network.load_state_dict(load_file(DEMO_MODEL / "model.safetensors"))
    token_ids = torch.arange(100, 140).view(2, 20)
    with torch.inference_mode():
        difference = error(network(token_ids), model(token_ids).logits)
    # Relative, by norms. Float32 sums in another order give 5e-7 here, whatever the processor;
    # an epsilon of 1e-6 in the norms instead of 1e-5, the smallest fault we can think of, 2e-4.
    assert difference < 1e-5


def test_its_weights_are_one_small_file_of_bfloat16() -> None:
    assert (DEMO_MODEL / "model.safetensors").stat().st_size < MAX_FILE_BYTES
    tensors = load_file(DEMO_MODEL / "model.safetensors")
    assert {tensor.dtype for tensor in tensors.values()} == {torch.bfloat16}


def test_the_record_of_its_training_ships_with_it() -> None:
    record = json.loads((DEMO_MODEL / "training.json").read_text(encoding="utf-8"))
    assert record["seed"] == 0
    assert 0 < record["held_out_loss"] < 1
    assert record["steps"] > 0
    assert record["tokens"] > 0


@pytest.mark.parametrize(
    ("seed", "digest"),
    [
        (0, "d9dfb2b0c42c6b32974671d7a1fe67193e668d0a78c375395501cf4781509b7b"),
        (1, "91bd3a2fff8d7c5ac3c4cc175db28b9e42e85f7433491455d022bed69ecb4406"),
        (7, "929718e46835478cdf4e7b96e6a36bd4347bd6caab863cda0f9da62bde10802e"),
    ],
)
def test_a_seed_always_gives_the_same_training_text(seed: int, digest: str) -> None:
    """A deliberate change of the texts or of the program needs new digests here."""
    text = repr([asdict(document) for document in islice(documents(seed), 2000)])
    assert hashlib.sha256(text.encode()).hexdigest() == digest
