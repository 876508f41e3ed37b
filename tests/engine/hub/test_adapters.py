"""LoRA adapters by the name of a repository on the hub, which a small server stands for."""

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from penstock.engine.models.config import ModelConfig
from tests.support.adapters import LinearShapes, save_adapter
from tests.support.paths import DEMO_MODEL, ROOT
from tests.support.serving import RunningServer
from tests.support.stub_hub import StubHub, stub_hub

NAME = "someone/french"
FIND = """
import sys
from penstock.engine.config import AdapterSource, LoraConfig
from penstock.engine.hub.adapters import with_local_adapters
from penstock.scheduler.errors import PenstockError
try:
    config = LoraConfig(adapters=(AdapterSource(name="a", path=sys.argv[1]),))
    print(with_local_adapters(config).adapters[0].path)
except PenstockError as error:
    sys.exit(str(error))
"""


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[StubHub]:
    model = LinearShapes(ModelConfig.from_dir(DEMO_MODEL))
    save_adapter(model, tmp_path / "adapter", rank=8, seed=1)
    with stub_hub() as running:
        running.add(NAME, tmp_path / "adapter", **{"README.md": b"big", "optimizer.pt": b"bigger"})
        yield running


def find(hub: StubHub, home: Path, path: str, **env: str) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, "-c", FIND, path]
    variables = hub.environment(home, **env)
    return subprocess.run(
        command, cwd=ROOT, env=variables, capture_output=True, text=True, timeout=120, check=False
    )


def test_an_adapter_of_the_hub_is_downloaded_without_what_is_not_needed(
    hub: StubHub, tmp_path: Path
) -> None:
    found = find(hub, tmp_path / "home", NAME)
    assert found.returncode == 0, found.stderr
    files = sorted(path.name for path in Path(found.stdout.strip()).iterdir())
    assert files == ["adapter_config.json", "adapter_model.safetensors"]
    offline = find(hub, tmp_path / "home", NAME, HF_HUB_OFFLINE="1")
    assert offline.stdout == found.stdout


def test_what_is_no_adapter_or_not_there_is_said_in_a_sentence(
    hub: StubHub, tmp_path: Path
) -> None:
    hub.repositories["someone/model"] = {"config.json": b"{}", "adapter_config.json": b"{}"}
    error = find(hub, tmp_path / "home", "someone/model").stderr.strip()
    assert error == (
        "someone/model has no adapter_model.safetensors, so it is no LoRA adapter as PEFT saves it"
    )
    assert "has no model of that name" in find(hub, tmp_path / "home", "some/one").stderr
    assert find(hub, tmp_path / "home", "/not/here").stdout == "/not/here\n"


def test_a_server_serves_it_by_its_name(hub: StubHub, tmp_path: Path) -> None:
    server = RunningServer(
        *("--num-threads", "1", "--enable-lora", "--lora-modules", f"french={NAME}"),
        env=hub.environment(tmp_path / "home"),
    )
    try:
        server.wait_until_ready()
        cards = server.get("/v1/models").json()["data"]
        assert [card["id"] for card in cards][-1] == "french"
        assert "snapshots" in cards[-1]["root"]
        body = {"model": "french", "prompt": "Once", "max_tokens": 4, "temperature": 0}
        assert server.post("/v1/completions", body).status_code == 200
    finally:
        server.stop()
