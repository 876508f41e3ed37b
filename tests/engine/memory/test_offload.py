"""What models --kv-offload-dir and --kv-events-config are for."""

from pathlib import Path
from typing import Any

import pytest

from penstock.engine.config import KVEventsConfig
from penstock.scheduler.errors import InvalidConfig
from tests.support.executors import cpu_executor
from tests.support.tiny_models import engine_config, make_model, save


@pytest.fixture(scope="module")
def recurrent(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(make_model("qwen3_5"), tmp_path_factory.mktemp("recurrent"))


@pytest.mark.parametrize(
    ("flag", "changes"),
    [
        ("--kv-offload-dir", {"kv_offload_dir": "blocks"}),
        ("--kv-events-config", {"kv_events": KVEventsConfig()}),
    ],
)
def test_a_model_with_recurrent_states_refuses_files_and_events_of_blocks_by_their_flags(
    recurrent: Path,
    flag: str,
    changes: dict[str, Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    config = engine_config(recurrent, **changes)
    with pytest.raises(InvalidConfig, match=f"{flag} .*recurrent state.*leave the flag out"):
        cpu_executor(config, recurrent)
    assert not list(tmp_path.iterdir())
