"""Models of the hub: what is downloaded, in which order, and the sentence for each refusal."""

import hashlib
import json
import random
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from penstock.engine.hub.model_files import DownloadProgress
from tests.support.paths import DEMO_MODEL, ROOT
from tests.support.serving import wait_until
from tests.support.stub_hub import StubHub, stub_hub
from tests.support.tiny_models import make_model, save

# The settings of huggingface_hub are read when it is imported, so each download is a process.
_SCRIPT = """
import logging, sys
logging.basicConfig(level="INFO", format="%(message)s")
from penstock.engine.hub import hub
from penstock.scheduler.errors import PenstockError
try:
    files = hub.open_model(sys.argv[1])
    if files.download:
        logging.info("download: %s", files.download.what)
        files.download.run()
        logging.info("%s", files.download.state().text)
except PenstockError as error:
    sys.exit(f"refused: {error}")
print(files.directory)
"""
NAME = "someone/something"
WEIGHTS = "model.safetensors"
# Three times what huggingface_hub reads at once. Nothing here reads them as weights.
LARGE = random.Random(0).randbytes(30 << 20)


@dataclass
class Download:
    code: int
    directory: Path
    log: str


@pytest.fixture
def hub() -> Iterator[StubHub]:
    with stub_hub() as running:
        running.add(NAME, DEMO_MODEL)
        yield running


def start(hub: StubHub, home: Path, name: str = NAME, **env: str) -> "subprocess.Popen[str]":
    return subprocess.Popen(
        [sys.executable, "-c", _SCRIPT, name],
        cwd=ROOT,
        env=hub.environment(home, **env),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def download(hub: StubHub, home: Path, name: str = NAME, **env: str) -> Download:
    with start(hub, home, name, **env) as process:
        out, log = process.communicate(timeout=120)
    assert "Traceback" not in log
    return Download(process.returncode, Path(out.strip()), log)


def refusal(hub: StubHub, home: Path, name: str = NAME, **env: str) -> str:
    refused = download(hub, home, name, **env)
    assert refused.code == 1
    return refused.log.rpartition("refused: ")[2].strip()


def shard(hub: StubHub, directory: Path) -> list[str]:
    """Serves a model of several shards; returns their names."""
    save(make_model("llama2"), directory, max_shard_size="100KB")
    (directory / "tokenizer.json").write_bytes((DEMO_MODEL / "tokenizer.json").read_bytes())
    hub.add(NAME, directory)
    return sorted(path.name for path in directory.glob("*.safetensors"))


def test_a_model_is_downloaded_whole_and_used_from_the_cache_then(
    hub: StubHub, tmp_path: Path
) -> None:
    first = download(hub, tmp_path)
    assert first.code == 0
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json", WEIGHTS):
        assert (first.directory / name).read_bytes() == (DEMO_MODEL / name).read_bytes()
    hub.requests.clear()
    second = download(hub, tmp_path)
    assert (second.directory, hub.fetched) == (first.directory, [])
    assert second.log == ""


def test_what_decides_comes_first_then_the_tokenizer_then_the_weights(
    hub: StubHub, tmp_path: Path
) -> None:
    names = shard(hub, tmp_path / "model")
    assert download(hub, tmp_path / "home").code == 0
    fetched = hub.fetched
    decisive = {"config.json", "generation_config.json", "model.safetensors.index.json"}
    assert set(fetched[:3]) == decisive
    assert fetched[3] == "tokenizer.json"
    assert set(fetched[4:]) == set(names)


def test_only_files_that_are_read_are_downloaded(hub: StubHub, tmp_path: Path) -> None:
    read = {"1_Pooling/config.json", "preprocessor_config.json", "processor_config.json"}
    others = {
        "consolidated.safetensors": b"x" * 100,
        "pytorch_model.bin": b"x",
        "README.md": b"x",
        "training.json": b"{}",
        "onnx/model.onnx": b"x",
        "onnx/config.json": b"{}",
        "tokenizer.model": b"x",
        **{name: json.dumps({name: 1}).encode() for name in read},  # one is fetched of the same
    }
    hub.repositories[NAME] |= others
    assert download(hub, tmp_path).code == 0
    assert set(hub.fetched) & set(others) == read


def test_a_tokenizer_that_must_be_converted_comes_with_all_its_files(
    hub: StubHub, tmp_path: Path
) -> None:
    files = hub.repositories[NAME]
    del files["tokenizer.json"]
    slow = {"vocab.json": b"1", "merges.txt": b"2", "special_tokens_map.json": b"3"}
    files |= slow
    assert download(hub, tmp_path).code == 0
    assert set(slow) <= set(hub.fetched)


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({"architectures": ["FalconForCausalLM"]}, "FalconForCausalLM"),
        ({"quantization_config": {"quant_method": "hqq"}}, "the format HQQ"),
        ({"hidden_size": "wide"}, "'hidden_size' must be a positive integer"),
    ],
)
def test_an_unsupported_model_is_refused_before_its_weights_are_downloaded(
    hub: StubHub, tmp_path: Path, change: dict[str, object], expected: str
) -> None:
    config = json.loads(hub.repositories[NAME]["config.json"])
    hub.repositories[NAME]["config.json"] = json.dumps(config | change).encode()
    assert expected in refusal(hub, tmp_path)
    assert set(hub.fetched) <= {"config.json", "generation_config.json"}


def test_modelopts_own_file_is_read_before_the_weights_are_downloaded(
    hub: StubHub, tmp_path: Path
) -> None:
    settings = {"quantization": {"quant_algo": "MIXED_PRECISION"}}
    hub.repositories[NAME]["hf_quant_config.json"] = json.dumps(settings).encode()
    assert "the format ModelOpt 'MIXED_PRECISION'" in refusal(hub, tmp_path)
    assert WEIGHTS not in hub.fetched


def test_a_repository_that_lacks_a_shard_is_refused(hub: StubHub, tmp_path: Path) -> None:
    names = shard(hub, tmp_path / "model")
    del hub.repositories[NAME][names[1]]
    assert f"lacks {names[1]}" in refusal(hub, tmp_path / "home")
    assert not set(names) & set(hub.fetched)


def test_a_connection_that_is_cut_is_continued(hub: StubHub, tmp_path: Path) -> None:
    hub.repositories[NAME][WEIGHTS] = LARGE
    hub.cuts[WEIGHTS] = [len(LARGE) // 2, len(LARGE) // 2]
    done = download(hub, tmp_path)
    assert done.code == 0
    assert (done.directory / WEIGHTS).read_bytes() == LARGE
    ranges = [given for _, path, given in hub.requests if path == WEIGHTS and given]
    assert len(ranges) == 2


@pytest.mark.parametrize("is_damaged", [False, True])
def test_a_download_that_was_killed_is_continued_by_the_next_process(
    hub: StubHub, tmp_path: Path, *, is_damaged: bool
) -> None:
    hub.repositories[NAME][WEIGHTS] = LARGE
    gate = hub.gates[WEIGHTS] = threading.Event()
    first = start(hub, tmp_path)
    try:
        blobs = tmp_path / "hub" / "models--someone--something" / "blobs"
        part = blobs / f"{hashlib.sha256(LARGE).hexdigest()}.incomplete"
        wait_until(lambda: part.exists() and part.stat().st_size > 0)
    finally:
        first.kill()
        first.communicate()
    num_bytes = part.stat().st_size
    if is_damaged:
        part.write_bytes(b"\0" * num_bytes)
    gate.set()
    hub.requests.clear()
    second = download(hub, tmp_path)
    assert second.code == 0
    assert (second.directory / WEIGHTS).read_bytes() == LARGE
    gets = [given for kind, path, given in hub.requests if (kind, path) == ("GET", WEIGHTS)]
    assert gets == [f"bytes={num_bytes}-", *([None] if is_damaged else [])]
    assert ("was damaged" in second.log) == is_damaged
    assert not list(blobs.glob("*.incomplete"))


def test_a_download_says_what_it_will_fetch_and_how_far_it_is(hub: StubHub, tmp_path: Path) -> None:
    total = f"{len(hub.repositories[NAME][WEIGHTS]) / 1e6:.1f}"
    log = download(hub, tmp_path).log
    begin, end = log.splitlines()
    assert begin == f"download: {total} MB in 1 file to {tmp_path / 'hub'}"
    assert re.fullmatch(rf"{total} of {total} MB, [\d.]+ \wB/s, 0 s left", end)


def test_what_an_earlier_download_left_counts_but_not_for_the_rate() -> None:
    progress = DownloadProgress(16_400_000_000)
    progress.begin()
    progress.add(1_200_000_000, is_new=False)
    state = progress.state()
    assert (state.num_done, state.total) == (1_200_000_000, 16_400_000_000)
    assert state.text == "1.2 of 16.4 GB"
    progress.add(10_000_000)
    assert re.fullmatch(r"1\.2 of 16\.4 GB, [\d.]+ [MG]B/s, .+ left", progress.state().text)


def test_too_little_disk_space_is_found_before_the_download(hub: StubHub, tmp_path: Path) -> None:
    hub.sizes[WEIGHTS] = 10**18
    message = refusal(hub, tmp_path)
    assert "1000000000.0 GB more on the disk" in message and "set HF_HOME" in message
    assert WEIGHTS not in hub.fetched


def test_without_a_network_what_was_downloaded_is_served(hub: StubHub, tmp_path: Path) -> None:
    first = download(hub, tmp_path)
    for env in ({"HF_ENDPOINT": "http://127.0.0.1:9"}, {"HF_HUB_OFFLINE": "1"}):
        again = download(hub, tmp_path, **env)
        assert (again.code, again.directory) == (0, first.directory)
    hub.refusals[NAME] = (503, "")
    again = download(hub, tmp_path)
    assert (again.code, again.directory) == (0, first.directory)
    assert "answered with status 503" in again.log


def test_an_incomplete_download_is_not_served_without_a_network(
    hub: StubHub, tmp_path: Path
) -> None:
    first = download(hub, tmp_path)
    (first.directory / WEIGHTS).unlink()
    message = refusal(hub, tmp_path, HF_HUB_OFFLINE="1")
    assert "HF_HUB_OFFLINE is set" in message and "has no weights" in message


@pytest.mark.parametrize(
    ("env", "expected"),
    [
        ({"HF_HUB_OFFLINE": "1"}, "HF_HUB_OFFLINE is set, and no complete download"),
        ({"HF_ENDPOINT": "http://127.0.0.1:9"}, "http://127.0.0.1:9 could not be reached"),
    ],
)
def test_no_network_is_one_sentence(
    hub: StubHub, tmp_path: Path, env: dict[str, str], expected: str
) -> None:
    message = refusal(hub, tmp_path, **env)
    assert expected in message and NAME in message and "\n" not in message


@pytest.mark.parametrize(
    ("refused", "token", "expected"),
    [
        ((401, "RepoNotFound"), "", "has no model of that name; check the spelling, or set HF_TOK"),
        ((404, "RepoNotFound"), "hf_x", "the token that is set (HF_TOKEN or `hf auth login`) may"),
        ((403, ""), "hf_x", "answered with status 403; check HF_TOKEN"),
        ((503, ""), "", "answered with status 503; try again later"),
    ],
)
def test_a_refusal_of_the_hub_is_one_sentence(
    hub: StubHub, tmp_path: Path, refused: tuple[int, str], token: str, expected: str
) -> None:
    hub.refusals[NAME] = refused
    message = refusal(hub, tmp_path, HF_TOKEN=token)
    assert expected in message and NAME in message and "\n" not in message


def test_a_gated_model_says_where_to_accept_its_terms(hub: StubHub, tmp_path: Path) -> None:
    hub.gated.add(NAME)
    message = refusal(hub, tmp_path)
    assert f"{NAME} is gated: accept its terms on {hub.url}/{NAME}" in message
    assert "\n" not in message


def test_a_name_that_is_no_id_is_refused(hub: StubHub, tmp_path: Path) -> None:
    assert "check the path" in refusal(hub, tmp_path, "no/such/model")
    assert hub.requests == []


def test_a_cache_that_cannot_be_written_is_named(hub: StubHub, tmp_path: Path) -> None:
    (tmp_path / "hub").write_text("a file where the cache should be")
    message = refusal(hub, tmp_path)
    assert str(tmp_path / "hub") in message and "\n" not in message
