"""GGUF files of the hub: which are downloaded, and what is refused before."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.engine.models.test_hub import download, refusal
from tests.support.gguf_files import write_gguf
from tests.support.paths import DEMO_MODEL
from tests.support.stub_hub import StubHub, stub_hub
from tests.support.tiny_models import make_model

NAME = "someone/something-GGUF"


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    directory = tmp_path_factory.mktemp("files")
    model = make_model("llama3.1_rope", num_hidden_layers=1, vocab_size=2048)
    write_gguf(directory / "m-F32.gguf", model, tokenizer=DEMO_MODEL)
    write_gguf(directory / "m-Q8_0.gguf", model, tokenizer=DEMO_MODEL, num_parts=2)
    metadata = {"general.architecture": "gemma2"}
    write_gguf(directory / "other-Q4_0.gguf", model, metadata=metadata)
    return {path.name: path.read_bytes() for path in directory.iterdir()} | {"README.md": b""}


@pytest.fixture
def hub(files: dict[str, bytes]) -> Iterator[StubHub]:
    with stub_hub() as running:
        running.repositories[NAME] = dict(files)
        yield running


def test_only_the_file_that_is_named_is_downloaded(hub: StubHub, tmp_path: Path) -> None:
    done = download(hub, tmp_path, f"{NAME}:f32")
    assert done.code == 0, done.log
    assert done.directory.name == "m-F32.gguf"
    assert done.directory.read_bytes() == hub.repositories[NAME]["m-F32.gguf"]
    assert set(hub.fetched) == {"m-F32.gguf"}
    hub.requests.clear()
    again = download(hub, tmp_path, f"{NAME}/m-F32.gguf")
    assert again.directory == done.directory and hub.fetched == []
    offline = download(hub, tmp_path, f"{NAME}:F32", HF_HUB_OFFLINE="1")
    assert offline.directory == done.directory


def test_all_parts_of_a_split_file_are_downloaded(hub: StubHub, tmp_path: Path) -> None:
    done = download(hub, tmp_path, f"{NAME}:Q8_0")
    names = ["m-Q8_0-00001-of-00002.gguf", "m-Q8_0-00002-of-00002.gguf"]
    assert done.directory.name == names[0]
    assert all(done.directory.with_name(name).exists() for name in names)
    assert set(hub.fetched) == set(names)
    del hub.repositories[NAME]
    assert download(hub, tmp_path, NAME).directory == done.directory  # the only one in the cache


def test_what_cannot_be_served_is_refused_by_its_header(hub: StubHub, tmp_path: Path) -> None:
    message = refusal(hub, tmp_path, f"{NAME}:Q4_0")
    assert message.startswith(f"{NAME}/other-Q4_0.gguf has the architecture 'gemma2'")
    assert not list(tmp_path.glob("hub/**/*.gguf"))
    hub.repositories[NAME]["other-Q4_0.gguf"] = b"<html>not found</html>"
    assert "other-Q4_0.gguf is not a GGUF file" in refusal(hub, tmp_path, f"{NAME}:Q4_0")


def test_one_of_several_must_be_named(hub: StubHub, tmp_path: Path) -> None:
    message = refusal(hub, tmp_path, NAME)
    assert message.startswith(f"{NAME} has 3 GGUF models; name one of its files, as in {NAME}/m-F3")
    assert hub.fetched == []
    assert "has no GGUF model 'Q6_K'" in refusal(hub, tmp_path, f"{NAME}:Q6_K")


def test_a_repository_without_the_file_says_so(hub: StubHub, tmp_path: Path) -> None:
    hub.add("someone/something", DEMO_MODEL)
    assert "has no GGUF model 'Q4_0'" in refusal(hub, tmp_path, "someone/something:Q4_0")
