"""How much text is tokenized: what the context can hold, and so much at one time."""

import asyncio
import contextlib
import json
import random
import threading
from dataclasses import replace
from pathlib import Path

import pytest
from tokenizers import Encoding, Tokenizer

from penstock.server.errors import InvalidRequest
from penstock.server.prompt import limits
from penstock.server.prompt import tokenizer as tokenizer_module
from penstock.server.prompt.limits import check_cut, part_that_fits, tokenized, tokenized_together
from penstock.server.prompt.model import ServedModel
from penstock.server.prompt.off_loop import LongTexts
from penstock.server.prompt.tokenizer import PromptEncoder
from penstock.server.protocol.openai import CompletionRequest
from tests.support.chatting import make_model
from tests.support.paths import ROOT

TEMPLATE = "{% for m in messages %}{{ m.content }}{% endfor %}"


@pytest.fixture
def model(tmp_path: Path) -> ServedModel:
    encoder = PromptEncoder.load(ROOT / "engine" / "hub" / "demo_model", None)
    made = make_model(tmp_path, TEMPLATE)
    return replace(made, encoder=encoder, info=replace(made.info, max_model_len=50))


@pytest.mark.parametrize("side", [None, "left", "right"])
def test_the_part_of_a_long_text_has_the_ids_that_it_has_in_the_whole(
    model: ServedModel, side: str | None
) -> None:
    letters = "abcdefghij 0123456789 .,!? \n\n  \u00e9\u4f60"
    for seed in range(4):
        chosen = random.Random(seed)
        text = "".join(chosen.choices(letters, k=3 * model.max_prompt_chars))
        part = part_that_fits(text, model, "prompt", side)
        assert model.max_prompt_chars <= len(part) < len(text)
        ids, whole = model.encoder.encode(part), model.encoder.encode(text)
        assert len(ids) > (num_kept := model.max_model_len)
        if side == "right":
            assert ids[:num_kept] == whole[:num_kept]
        else:
            assert ids[-num_kept:] == whole[-num_kept:]


def test_a_text_that_could_be_kept_is_not_cut(model: ServedModel) -> None:
    text = "ab " * (model.max_prompt_chars // 3)
    assert part_that_fits(text, model, "prompt", None) == text
    assert part_that_fits([1, 2], model, "prompt", None) == [1, 2]


def test_a_text_that_cannot_be_cut_safely_is_refused(model: ServedModel) -> None:
    with pytest.raises(InvalidRequest, match=r"prompt has .* characters"):
        part_that_fits("a" * (3 * model.max_prompt_chars), model, "prompt", None)
    num_chars = 9 * model.max_prompt_chars
    check_cut((1,), model, "prompt", num_chars=num_chars, num_kept=num_chars)
    with pytest.raises(InvalidRequest, match=r"prompt has .* characters"):
        check_cut((1,), model, "prompt", num_chars=num_chars, num_kept=num_chars - 1)


@pytest.mark.parametrize("num_kept", [None, 40])
def test_a_text_that_cannot_fit_is_tokenized_no_further_than_the_context(
    model: ServedModel, monkeypatch: pytest.MonkeyPatch, num_kept: int | None
) -> None:
    monkeypatch.setattr(limits, "_PIECE_CHARS", 100)
    lengths: list[int] = []
    encoding = tokenizer_module._encoding

    def recorded(tokenizer: Tokenizer, text: str, **options: bool) -> Encoding:
        lengths.append(len(text))
        return encoding(tokenizer, text, **options)

    monkeypatch.setattr(tokenizer_module, "_encoding", recorded)
    body = json.dumps({"prompt": "", "truncate_prompt_tokens": num_kept})
    fields = CompletionRequest.parse(body.encode())
    text = (
        "a1 b2 c3 d4 " * 80
    )  # fewer characters than the context could hold, four times its tokens
    refused = contextlib.nullcontext() if num_kept else pytest.raises(InvalidRequest, match="960")
    with refused:
        ids = tokenized(text, model.encoder.encode_prompt, fields, model, "prompt")
        assert ids[-40:] == model.encoder.encode(text)[-40:]
        lengths.pop()
    assert sum(lengths) < len(text) / 2


@pytest.mark.parametrize(("num_kept", "is_refused"), [(None, True), (10, False)])
def test_prompts_that_are_too_much_together_are_refused_before_all_are_tokenized(
    model: ServedModel, monkeypatch: pytest.MonkeyPatch, num_kept: int | None, is_refused: bool
) -> None:
    monkeypatch.setattr(limits, "MAX_TOKENS_TOGETHER", 100)
    seen: list[str | list[int]] = []

    def encode(prompt: str | list[int]) -> tuple[int, ...]:
        seen.append(prompt)
        return model.encoder.encode_prompt(prompt)

    body = json.dumps({"prompt": "", "truncate_prompt_tokens": num_kept})
    fields = CompletionRequest.parse(body.encode())
    prompts = [(f"input[{i}]", [1] * 40) for i in range(9)]
    refused = pytest.raises(InvalidRequest, match="more than 100 tokens in all of its texts")
    with refused if is_refused else contextlib.nullcontext():
        assert len(tokenized_together(prompts, encode, fields, model)) == 9
    assert len(seen) == (3 if is_refused else 9)


async def test_long_texts_together_have_no_more_characters_than_allowed() -> None:
    texts = LongTexts(max_chars=10)
    texts._threads._max_workers = 8
    running, most, lock = 0, 0, threading.Lock()
    passed = threading.Event()

    def work(num_chars: int) -> int:
        nonlocal running, most
        with lock:
            running += num_chars
            most = max(most, running)
        passed.wait(0.05)
        with lock:
            running -= num_chars
        return num_chars

    sizes = [4, 4, 4, 20, 10, 1]
    assert await asyncio.gather(*(texts.run(work, n, n) for n in sizes)) == sizes
    assert most == 20, "the one that is too long runs, alone"
    most = 0
    jobs = [asyncio.create_task(texts.run(work, n, n)) for n in (9, 8, 7)]
    await asyncio.sleep(0.01)
    jobs[0].cancel()  # its thread goes on, and so do its characters
    jobs[1].cancel()
    assert await jobs[2] == 7
    assert most == 9
