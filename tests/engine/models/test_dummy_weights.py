"""`--load-format dummy`: a server from a config.json alone."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from penstock.engine.config import LoadFormat
from penstock.engine.files.dummy_tokenizer import dummy_tokenizer
from penstock.scheduler.errors import InvalidConfig
from penstock.server.output.detokenizer import Vocabulary
from penstock.server.prompt.tokenizer import PromptEncoder
from tests.support.serving import RunningServer
from tests.support.tiny_models import make_model

VOCAB_SIZE = 400


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("bare")
    config = make_model("qwen3").config
    config.vocab_size = VOCAB_SIZE
    config.save_pretrained(path)
    assert [file.name for file in path.iterdir()] == ["config.json"]
    return path


@pytest.fixture(scope="module")
def server(directory: Path) -> Iterator[RunningServer]:
    flags = ("--load-format", "dummy", "--device", "cpu", "--dtype", "float32")
    server = RunningServer(str(directory), *flags, "--served-model-name", "bare")
    try:
        server.wait_until_ready()
        yield server
    finally:
        server.stop()


def test_a_config_json_alone_is_served(server: RunningServer) -> None:
    fields = {"model": "bare", "prompt": "¿Qué?\n", "max_tokens": 16, "ignore_eos": True}
    answer = server.complete(**fields, return_token_ids=True, temperature=1.0).json()
    (choice,) = answer["choices"]
    assert answer["usage"]["prompt_tokens"] == len("¿Qué?\n".encode())
    assert choice["text"] == dummy_tokenizer(VOCAB_SIZE).decode(choice["token_ids"])
    assert len(choice["token_ids"]) == 16


def test_its_output_can_be_structured(server: RunningServer) -> None:
    answer = server.complete(
        model="bare", structured_outputs={"choice": ["yes", "no"]}, max_tokens=8
    )
    assert answer.json()["choices"][0]["text"] in ("yes", "no")


def test_without_dummy_weights_a_missing_tokenizer_is_an_error(directory: Path) -> None:
    with pytest.raises(InvalidConfig, match="has no tokenizer that can be read"):
        PromptEncoder.load(directory, None)
    PromptEncoder.load(directory, None, LoadFormat.DUMMY)


@pytest.mark.parametrize("vocab_size", [40, 256, VOCAB_SIZE])
def test_every_id_decodes_to_a_different_text(vocab_size: int) -> None:
    tokenizer = dummy_tokenizer(vocab_size)
    assert tokenizer.get_vocab_size() == vocab_size
    spellings = {Vocabulary(tokenizer).spelling(i) for i in range(vocab_size)}
    assert len(spellings) == vocab_size and b"" not in spellings


def test_any_text_survives_encoding_and_decoding() -> None:
    tokenizer = dummy_tokenizer(VOCAB_SIZE)
    text = "  Grüße\t<300>, 日本\x00\n"
    assert tokenizer.decode(tokenizer.encode(text).ids) == text
    assert dummy_tokenizer(40).encode(text).ids  # with too few tokens, something
