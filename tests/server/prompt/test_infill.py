"""`suffix`: prompts to fill in the middle, where the vocabulary has the markers."""

import json
import random
import shutil
import threading
import time
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors

from penstock.engine.executors.scripted import scripted_info
from penstock.server.errors import UnsupportedParameter
from penstock.server.prompt.model import ServedModel
from penstock.server.prompt.tokenizer import GenerationDefaults, PromptEncoder
from penstock.server.protocol.openai import CompletionRequest
from tests.support.chatting import prepared
from tests.support.paths import ROOT
from tests.support.serving import RunningServer, running_server

DEMO = ROOT / "engine" / "hub" / "demo_model"
# prefix, suffix, middle, and what ends the middle
FAMILIES = [
    ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>", "<|file_sep|>"),
    ("<fim_prefix>", "<fim_suffix>", "<fim_middle>", "<file_sep>"),
    ("<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>", "<|endoftext|>"),  # noqa: RUF001
    ("▁<PRE>", "▁<SUF>", "▁<MID>", "▁<EOT>"),
]
QWEN = FAMILIES[0]


def demo_tokenizer(*names: str) -> Tokenizer:
    """The demo's, with marker tokens in it."""
    tokenizer = Tokenizer.from_file(str(DEMO / "tokenizer.json"))
    tokenizer.add_tokens([AddedToken(name, special=False, normalized=False) for name in names])
    return tokenizer


@pytest.mark.parametrize("names", FAMILIES)
def test_the_suffix_comes_before_the_middle_that_is_generated(names: tuple[str, ...]) -> None:
    tokenizer = demo_tokenizer(*names)
    prefix, suffix = "def add(a, b):\n    return ", "\n\nprint(add(1, 2))"
    encoder = PromptEncoder(tokenizer, None)
    ids = [tokenizer.token_to_id(name) for name in names]
    before, after = (tokenizer.encode(text).ids for text in (prefix, suffix))
    expected = (ids[0], *before, ids[1], *after, ids[2])
    assert encoder.encode_infill([prefix], suffix) == [expected]
    assert encoder.infill and set(ids) <= set(encoder.infill.end_ids)


def test_other_threads_run_while_a_long_file_is_encoded() -> None:
    """Those of the streams; a thread that holds Python's lock lets none run until its end."""
    encoder = PromptEncoder(demo_tokenizer(*QWEN), None)
    words = random.Random(1)
    text = " ".join(str(words.getrandbits(40)) for _ in range(15_000))
    encoding = threading.Thread(target=encoder.encode_infill, args=([text], "\n"))
    times_s = [time.monotonic()]
    encoding.start()
    while encoding.is_alive():
        time.sleep(0.001)
        times_s.append(time.monotonic())
    longest_s = max(after - before for before, after in pairwise(times_s))
    assert longest_s < (times_s[-1] - times_s[0]) / 2


def sentencepiece_like() -> Tokenizer:
    """Llama's way: a BOS, and a space before a text."""
    pieces = ["<unk>", "<s>", "▁", "a", "b", "☺", *FAMILIES[3]]
    tokenizer = Tokenizer(
        models.BPE({piece: i for i, piece in enumerate(pieces)}, [], unk_token="<unk>")
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always", split=False)
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", 1)]
    )
    tokenizer.add_special_tokens([AddedToken(name, special=True) for name in ("<s>", *FAMILIES[3])])
    return tokenizer


def test_a_suffix_goes_on_without_the_space_that_sentencepiece_puts_before_a_text() -> None:
    encoder = PromptEncoder(sentencepiece_like(), None)
    bos, space, a, b, pre, suf, mid = 1, 2, 3, 4, 6, 7, 8
    expected = (pre, space, a, suf, b, a, mid)
    assert encoder.encode_infill(["a"], "ba") == [(bos, *expected)]
    assert encoder.encode_infill(["a"], "ba", add_special_tokens=False) == [expected]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    """Scripted, with markers in its vocabulary."""
    directory: Path = tmp_path_factory.mktemp("model")
    shutil.copytree(DEMO, directory, dirs_exist_ok=True)
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps(config | {"vocab_size": 2060}))
    demo_tokenizer(*QWEN).save(str(directory / "tokenizer.json"))
    with running_server(str(directory), "--served-model-name", "penstock-demo") as running:
        yield running


def test_a_suffix_is_put_after_the_prompt_and_counted(server: RunningServer) -> None:
    tokenizer = demo_tokenizer(*QWEN)
    fields: dict[str, Any] = {"prompt": ["Once", ""], "suffix": " end", "return_token_ids": True}
    body = server.complete(**fields).json()
    prompts = [choice["prompt_token_ids"] for choice in body["choices"]]
    for ids, prefix in zip(prompts, fields["prompt"], strict=True):
        text = "".join([QWEN[0], prefix, QWEN[1], " end", QWEN[2]])
        assert ids == tokenizer.encode(text).ids
    assert body["usage"]["prompt_tokens"] == sum(map(len, prompts))


@pytest.mark.parametrize("ignore_eos", [False, True])
async def test_the_middle_ends_where_a_file_ends_unless_no_end_is_to_count(
    ignore_eos: bool,
) -> None:
    tokenizer = demo_tokenizer(*QWEN)
    model = ServedModel(
        names=("m",),
        created_s=0,
        info=scripted_info(vocab_size=2060),
        encoder=PromptEncoder(tokenizer, None),
        defaults=GenerationDefaults(),
    )
    for suffix, is_end in (("", False), (" end", not ignore_eos)):
        fields = {"model": "m", "prompt": "Once", "suffix": suffix, "ignore_eos": ignore_eos}
        parsed = CompletionRequest.parse(json.dumps(fields).encode())
        request = await prepared(parsed, model)
        stops = request.requests[0].sampling.stop_token_ids
        assert [tokenizer.token_to_id(name) in stops for name in QWEN] == [is_end] * 4


def test_a_model_without_markers_refuses_a_suffix_by_name() -> None:
    encoder = PromptEncoder(demo_tokenizer(), None)
    with pytest.raises(UnsupportedParameter, match="suffix") as caught:
        encoder.encode_infill(["a"], "b")
    assert (caught.value.param, caught.value.code) == ("suffix", "unsupported_parameter")


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"prompt": [5, 6]}, "suffix"),
        ({"echo": True}, "echo"),
        ({"truncate_prompt_tokens": 3}, "truncate_prompt_tokens"),
        ({"suffix": "a\0"}, "suffix"),
    ],
)
def test_a_field_that_cannot_be_combined_with_suffix_is_refused_by_name(
    server: RunningServer, fields: dict[str, Any], param: str
) -> None:
    response = server.complete(**{"suffix": "end", **fields})
    assert response.status_code == 400
    assert response.json()["error"]["param"] == param
