"""The draft that ships with the demo model, and the script that distilled it."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from penstock.engine.models.config import ModelConfig
from penstock.scheduler.types import SamplingParams
from tests.demo_model.training import distil
from tests.demo_model.training.answers import Agreement, Answer, agreement, drawn_by, own_answers
from tests.demo_model.training.corpus import Document, Message
from tests.demo_model.training.distil import DRAFT, WAYS, Teacher, divergence
from tests.demo_model.training.network import Network, NetworkConfig
from tests.support.paths import DEMO_MODEL, STORIES
from tests.support.stories import needs_stories

MAX_FILE_BYTES = 1_000_000
QUESTIONS = (
    "Who are you?",
    "What is continuous batching?",
    "Explain the paged KV cache in detail.",
    "What does TTFT mean?",
    "Why is decoding bound by memory bandwidth?",
    "Tell me a story about a fox.",
    "What is 7 + 5?",
    "List three colors as JSON",
)


def shipped_draft() -> Network:
    config = json.loads((DRAFT / "config.json").read_text(encoding="utf-8"))
    draft = Network(
        NetworkConfig(
            vocab_size=config["vocab_size"],
            hidden_size=config["hidden_size"],
            intermediate_size=config["intermediate_size"],
            num_layers=config["num_hidden_layers"],
            num_heads=config["num_attention_heads"],
            num_kv_heads=config["num_key_value_heads"],
            head_dim=config["head_dim"],
            max_positions=config["max_position_embeddings"],
        )
    )
    draft.load_state_dict(load_file(DRAFT / "model.safetensors"))
    return draft


def test_it_is_one_small_file_of_bfloat16_with_the_models_vocabulary() -> None:
    assert (DRAFT / "model.safetensors").stat().st_size < MAX_FILE_BYTES
    tensors = load_file(DRAFT / "model.safetensors")
    assert {tensor.dtype for tensor in tensors.values()} == {torch.bfloat16}
    draft, model = ModelConfig.from_dir(DRAFT), ModelConfig.from_dir(DEMO_MODEL)
    assert draft.vocab_size == model.vocab_size
    assert draft.max_model_len == model.max_model_len
    assert draft.eos_token_ids == model.eos_token_ids


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    tokenizer = Teacher(DEMO_MODEL).tokenizer
    return [
        tokenizer.apply_chat_template(
            [{"role": "user", "content": question}], add_generation_prompt=True, return_dict=False
        )
        for question in QUESTIONS
    ]


# What was measured is in draft/training.json, on other prompts.
@pytest.mark.parametrize(
    ("way", "floor", "least_tokens_per_step"),
    [("greedy", 0.65, 2.2), ("temperature 1", 0.5, 1.7)],
)
def test_it_says_much_of_what_the_model_says(
    prompts: list[list[int]], way: str, floor: float, least_tokens_per_step: float
) -> None:
    stops = Teacher(DEMO_MODEL).stop_ids
    answers = own_answers(DEMO_MODEL, prompts, replace(WAYS[way], stop_token_ids=stops))
    found = agreement(shipped_draft(), answers, num_drafts=4)
    assert found.num_tokens > 100
    assert found.share > floor
    assert found.tokens_per_step > least_tokens_per_step


def test_the_record_of_its_making_ships_with_it() -> None:
    record = json.loads((DRAFT / "training.json").read_text(encoding="utf-8"))
    assert record["config"]["train"]["seed"] == 0
    assert set(record["agreement"]) == set(WAYS)
    assert record["parameters"] == shipped_draft().num_parameters


def test_steps_are_counted_as_drafts_are_accepted() -> None:
    """A draft that always says 7, for an answer that is 5 7 7 7 9 7 5."""

    def draft(token_ids: torch.Tensor) -> torch.Tensor:
        logits = torch.zeros(*token_ids.shape, 64)
        logits[..., 7] = 9.0
        return logits

    answer = Answer([1, 2], [5, 7, 7, 7, 9, 7, 5], SamplingParams(max_tokens=9, temperature=0.0))
    drawn, likeliest = drawn_by(draft, answer)
    assert drawn.tolist() == likeliest.tolist() == [7] * 7
    # 5 | 7 7 7 | 9 | 7 5 with two drafts, where the third 7 and the second 5 are the model's own.
    assert agreement(draft, [answer], 2) == Agreement(4 / 7, 4 / 7, 6 / 3, 7)


def test_the_draws_are_those_of_the_engine(prompts: list[list[int]]) -> None:
    """The model itself, as its own draft, says all but what rounding changes."""
    teacher = Teacher(DEMO_MODEL)
    answers = own_answers(DEMO_MODEL, prompts, WAYS["temperature 1"])
    assert agreement(teacher.logits, answers, 4).share > 0.9


def test_the_divergence_is_that_of_torch_and_the_mean_of_all_tokens() -> None:
    one, other = torch.tensor([[0.0, 0.0, 2.0]]), torch.tensor([[0.0, 1.0, 0.5]])
    assert divergence(one + 3, one).item() == pytest.approx(0, abs=1e-6)
    expected = torch.distributions.kl_divergence(
        torch.distributions.Categorical(logits=one[0]),
        torch.distributions.Categorical(logits=other[0]),
    ).item()
    found = divergence(torch.cat((other, one)), torch.cat((one, one)))
    assert found.item() == pytest.approx(expected / 2)


def test_what_the_model_is_to_say_are_the_assistants_turns_with_their_ends() -> None:
    teacher = Teacher(DEMO_MODEL)
    said = ("Hello!", "2 + 2 = 4.")
    messages = (
        Message("system", "Be kind."),
        Message("user", "hi"),
        Message("assistant", said[0]),
        Message("user", "What is 2 + 2?"),
        Message("assistant", said[1]),
    )
    ids, is_said = teacher.ids_of(Document(messages=messages))
    assert len(ids) == len(is_said)
    chosen = [token_id for token_id, is_one in zip(ids, is_said, strict=True) if is_one]
    assert teacher.tokenizer.decode(chosen) == "".join(f"{each}<|im_end|>\n" for each in said)
    assert (
        teacher.prompt_of(Document(messages=messages))
        == ids[: len(ids) - is_said[::-1].index(False)]
    )
    text_ids, of_text = teacher.ids_of(Document(text="Once upon a time, there was a small fox."))
    assert of_text == [place >= 8 for place in range(len(text_ids))]


def _distilled(folder: Path, *flags: str) -> bytes:
    sizes = ("--steps", "4", "--tokens-per-step", "512", "--answers", "4", "--held-out", "2")
    distil.main([*sizes, "--hidden-size", "64", "--out", str(folder), *flags])
    return (folder / "model.safetensors").read_bytes()


@pytest.mark.slow
def test_a_seed_gives_the_same_draft(tmp_path: Path) -> None:
    first = _distilled(tmp_path / "first")
    assert _distilled(tmp_path / "again") == first
    assert _distilled(tmp_path / "other", "--seed", "1") != first


@pytest.mark.slow
@needs_stories
def test_any_model_can_have_a_draft(tmp_path: Path) -> None:
    text = tmp_path / "text.jsonl"
    lines = [
        {"text": f"Once upon a time, there were {number} little cats."} for number in range(25)
    ]
    text.write_text("\n".join(map(json.dumps, lines)))
    flags = ("--model", str(STORIES), "--text", str(text), "--layers", "2")
    assert _distilled(tmp_path / "draft", *flags)
    config = ModelConfig.from_dir(tmp_path / "draft")
    assert config.vocab_size == ModelConfig.from_dir(STORIES).vocab_size
    assert len(config.layers) == 2


def test_a_model_needs_text_to_be_distilled_with(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        distil.main(["--model", str(tmp_path)])
    assert "--model needs --text" in capsys.readouterr().err
