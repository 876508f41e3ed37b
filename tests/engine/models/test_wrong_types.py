"""Keys of a wrong type in a model's JSON files: refused at the start, by file and key."""

import json
from pathlib import Path

import pytest

from penstock.engine.models.config import ModelConfig
from penstock.engine.models.errors import InvalidModel
from penstock.scheduler.errors import InvalidConfig
from penstock.server.prompt.tokenizer import GenerationDefaults
from tests.support.paths import DEMO_MODEL


@pytest.mark.parametrize(
    ("file", "key", "value"),
    [
        ("generation_config.json", "eos_token_id", "2"),
        ("generation_config.json", "eos_token_id", [2, None]),
        ("config.json", "eos_token_id", True),
        ("config.json", "architectures", "LlamaForCausalLM"),
        ("config.json", "architectures", [7]),
    ],
)
def test_the_engine_refuses_it(tmp_path: Path, file: str, key: str, value: object) -> None:
    config = json.loads((DEMO_MODEL / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config))
    content = config if file == "config.json" else {}
    (tmp_path / file).write_text(json.dumps(content | {key: value}))
    with pytest.raises(InvalidModel, match=f"{file}: '{key}'"):
        ModelConfig.from_dir(tmp_path)


@pytest.mark.parametrize(
    ("key", "value"), [("temperature", "0.7"), ("top_k", 1.5), ("top_p", True)]
)
def test_the_server_refuses_it(tmp_path: Path, key: str, value: object) -> None:
    (tmp_path / "generation_config.json").write_text(json.dumps({key: value}))
    with pytest.raises(InvalidConfig, match=f"generation_config.json: '{key}'"):
        GenerationDefaults.load(tmp_path)
