"""`penstock models`: what is in the hub's cache and in directories, and what can be served."""

import json
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.gguf_files import write_gguf
from tests.support.paths import DEMO_MODEL, ROOT
from tests.support.stub_hub import StubHub, stub_hub
from tests.support.tiny_models import make_model

NAME = "someone/something"


@pytest.fixture
def hub() -> Iterator[StubHub]:
    with stub_hub() as running:
        running.add(NAME, DEMO_MODEL)
        yield running


def penstock(hub: StubHub, home: Path, *arguments: str) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, "-m", "penstock", *arguments]
    env = hub.environment(home)
    return subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=120)


def download(hub: StubHub, home: Path, name: str) -> None:
    script = (
        "import sys; from penstock.engine.hub.hub import open_model\n"
        "files = open_model(sys.argv[1]); files.download and files.download.run()"
    )
    command = [sys.executable, "-c", script, name]
    subprocess.run(command, cwd=ROOT, env=hub.environment(home), check=False, capture_output=True)


def test_the_cache_is_listed_with_sizes_families_and_what_cannot_be_served(
    hub: StubHub, tmp_path: Path
) -> None:
    config = json.loads((DEMO_MODEL / "config.json").read_text())
    config |= {"architectures": ["FalconForCausalLM"], "model_type": "falcon"}
    hub.add("other/falcon", DEMO_MODEL, **{"config.json": json.dumps(config).encode()})
    config |= {"architectures": ["MixtralForCausalLM"], "model_type": "mixtral"}
    hub.add("other/mixture", DEMO_MODEL, **{"config.json": json.dumps(config).encode()})
    for name in (NAME, "other/falcon", "other/mixture"):
        download(hub, tmp_path, name)
    listed = penstock(hub, tmp_path, "models")
    assert (listed.returncode, listed.stderr) == (0, "")
    header, falcon, mixture, served = listed.stdout.splitlines()
    assert header.split() == ["MODEL", "SIZE", "FAMILY", "CAN", "BE", "SERVED"]
    assert mixture.split()[0] == "other/mixture" and "mixtral" in mixture
    assert mixture.endswith("yes, slowly: by the class of transformers")
    assert falcon.endswith("no: FalconForCausalLM is not supported")
    sizes = [len(hub.repositories[NAME][name]) for name in set(hub.fetched)]
    assert served.split() == [NAME, f"{sum(sizes) / 1e6:.1f}", "MB", "llama", "yes"]


def test_directories_are_listed_beside_the_cache(hub: StubHub, tmp_path: Path) -> None:
    shutil.copytree(DEMO_MODEL, tmp_path / "models" / "demo")
    (tmp_path / "models" / "quantized").mkdir()
    (tmp_path / "models" / "quantized" / "q4.gguf").write_bytes(b"GGUF" * 1000)
    write_gguf(tmp_path / "models" / "quantized" / "q8.gguf", make_model("qwen3"), num_parts=2)
    bad = shutil.copytree(DEMO_MODEL, tmp_path / "models" / "bad")
    (bad / "generation_config.json").write_text('{"temperature": "0.7"}')
    listed = penstock(hub, tmp_path, "models", "--json", str(tmp_path / "models"))
    models = {Path(each["model"]).name: each for each in json.loads(listed.stdout)}
    assert set(models) == {"demo", "q4.gguf", "q8-00001-of-00002.gguf", "bad"}
    assert models["demo"]["can_be_served"] and models["demo"]["problem"] is None
    assert models["demo"]["family"] == "llama"
    assert models["q4.gguf"]["size_bytes"] == 4000
    assert models["q4.gguf"]["family"] is None
    assert models["q4.gguf"]["problem"].startswith("GGUF with version")
    split = models["q8-00001-of-00002.gguf"]
    assert (split["family"], split["problem"]) == ("qwen3", None)
    parts = (tmp_path / "models" / "quantized").glob("q8-*")
    assert split["size_bytes"] == sum(part.stat().st_size for part in parts)
    assert models["bad"]["problem"].startswith("generation_config.json: 'temperature' must be")


def test_names_cannot_command_the_terminal(hub: StubHub, tmp_path: Path) -> None:
    shutil.copytree(DEMO_MODEL, tmp_path / "models" / "\x1b[2J")
    listed = penstock(hub, tmp_path, "models", str(tmp_path / "models"))
    assert r"\x1b[2J" in listed.stdout and "\x1b" not in listed.stdout


def test_gguf_files_of_the_cache_are_listed_as_they_are_served(
    hub: StubHub, tmp_path: Path
) -> None:
    path = write_gguf(tmp_path / "m-F32.gguf", make_model("qwen2"))
    hub.repositories["other/some-GGUF"] = {"F32/m-F32.gguf": path.read_bytes()}
    download(hub, tmp_path, "other/some-GGUF:F32")
    [model] = json.loads(penstock(hub, tmp_path, "models", "--json").stdout)
    assert (model["model"], model["family"]) == ("other/some-GGUF/F32/m-F32.gguf", "qwen2")
    assert model["can_be_served"] and model["size_bytes"] == path.stat().st_size


def test_the_reason_is_that_of_the_start(hub: StubHub, tmp_path: Path) -> None:
    directory = tmp_path / "model"
    directory.mkdir()
    shutil.copy(DEMO_MODEL / "config.json", directory)
    problem = json.loads(penstock(hub, tmp_path, "models", "--json", str(directory)).stdout)
    assert problem[0]["problem"] == "no weights"
    assert "has no weights" in penstock(hub, tmp_path, "serve", str(directory)).stderr


def test_an_incomplete_download_is_listed_as_such(hub: StubHub, tmp_path: Path) -> None:
    download(hub, tmp_path, NAME)
    [weights] = tmp_path.glob("hub/*/snapshots/*/model.safetensors")
    blob = weights.resolve()
    weights.unlink()
    blob.rename(blob.with_name(f"{blob.name}.incomplete"))
    [model] = json.loads(penstock(hub, tmp_path, "models", "--json").stdout)
    assert (model["can_be_served"], model["family"]) == (False, "llama")
    assert model["problem"] == "its download is not complete; penstock serve continues it"


def test_a_cache_that_is_not_a_directory_is_one_sentence(hub: StubHub, tmp_path: Path) -> None:
    (tmp_path / "hub").write_text("a file where the cache should be")
    listed = penstock(hub, tmp_path, "models")
    assert listed.returncode == 2 and listed.stderr.count("\n") == 1
    assert f"{tmp_path / 'hub'}, is not a directory; set HF_HOME" in listed.stderr


def test_an_empty_cache_and_a_missing_directory_are_said(hub: StubHub, tmp_path: Path) -> None:
    empty = penstock(hub, tmp_path, "models")
    assert empty.returncode == 0 and "there are no models" in empty.stdout
    assert penstock(hub, tmp_path, "models", "--json").stdout == "[]\n"
    missing = penstock(hub, tmp_path, "models", str(tmp_path / "nowhere"))
    assert missing.returncode == 2 and missing.stderr.count("\n") == 1
