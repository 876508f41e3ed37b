"""How much text is tokenized: what the context can hold, and so much at one time."""

import asyncio
import random
import threading
from dataclasses import replace
from pathlib import Path

import pytest

from penstock.server.errors import InvalidRequest
from penstock.server.prompt.limits import check_cut, end_that_fits
from penstock.server.prompt.model import ServedModel
from penstock.server.prompt.off_loop import LongTexts
from penstock.server.prompt.tokenizer import PromptEncoder
from tests.support.chatting import make_model
from tests.support.paths import ROOT

TEMPLATE = "{% for m in messages %}{{ m.content }}{% endfor %}"


@pytest.fixture
def model(tmp_path: Path) -> ServedModel:
    encoder = PromptEncoder.load(ROOT / "engine" / "demo_model", None)
    made = make_model(tmp_path, TEMPLATE)
    return replace(made, encoder=encoder, info=replace(made.info, max_model_len=50))


def test_the_end_of_a_long_text_has_the_ids_that_it_has_in_the_whole(model: ServedModel) -> None:
    letters = "abcdefghij 0123456789 .,!? \n\n  \u00e9\u4f60"
    for seed in range(4):
        chosen = random.Random(seed)
        text = "".join(chosen.choices(letters, k=3 * model.max_prompt_chars))
        end = end_that_fits(text, model, "prompt")
        assert model.max_prompt_chars <= len(end) < len(text)
        ids, whole = model.encoder.encode(end), model.encoder.encode(text)
        assert len(ids) > model.max_model_len
        assert ids[-model.max_model_len :] == whole[-model.max_model_len :]


def test_a_text_that_could_be_kept_is_not_cut(model: ServedModel) -> None:
    text = "ab " * (model.max_prompt_chars // 3)
    assert end_that_fits(text, model, "prompt") == text
    assert end_that_fits([1, 2], model, "prompt") == [1, 2]


def test_a_text_that_cannot_be_cut_safely_is_refused(model: ServedModel) -> None:
    with pytest.raises(InvalidRequest, match=r"prompt has .* characters"):
        end_that_fits("a" * (3 * model.max_prompt_chars), model, "prompt")
    num_chars = 9 * model.max_prompt_chars
    check_cut((1,), model, "prompt", num_chars=num_chars, num_kept=num_chars)
    with pytest.raises(InvalidRequest, match=r"prompt has .* characters"):
        check_cut((1,), model, "prompt", num_chars=num_chars, num_kept=num_chars - 1)


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
