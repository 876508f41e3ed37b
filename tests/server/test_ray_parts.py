"""What `penstock ray` is made of, where Ray need not be installed."""

import json
from collections.abc import Mapping
from importlib.resources import files
from pathlib import Path
from typing import Any

import pytest

from penstock.server.command_line.cli import main
from penstock.server.prompt.tokenizer import PromptEncoder
from penstock.server.ray import environment
from penstock.server.ray.prompt_key import body_digests
from penstock.server.ray.replica import LOAD, load, replicas_for_load


class Context:
    target_num_replicas = 3
    policy_state: dict[str, Any]

    def __init__(self, loads: Mapping[str, float] | None) -> None:
        self.policy_state = {}
        self.aggregated_metrics = None if loads is None else {LOAD: loads}


@pytest.fixture(scope="module")
def encoder() -> PromptEncoder:
    return PromptEncoder.load(Path(str(files("penstock.engine.hub") / "demo_model")), None)


def test_as_many_replicas_as_hold_the_load_at_three_quarters() -> None:
    assert replicas_for_load(Context({"a": 0.75, "b": 0.75}))[0] == 2
    assert replicas_for_load(Context({"a": 0.8, "b": 0.75}))[0] == 3
    assert replicas_for_load(Context({"a": 0.0, "b": 0.0}))[0] == 1
    assert replicas_for_load(Context(None))[0] == 3  # nothing is known yet


def test_the_load_is_that_of_what_is_scarcer() -> None:
    assert load(8, 0, 16, 0.1) == 0.5
    assert load(2, 0, 16, 0.9) == 0.9
    assert load(16, 8, 16, 0.5) == 1.5


def test_a_turn_of_a_chat_begins_with_the_digests_of_the_one_before(encoder: PromptEncoder) -> None:
    turns = [{"role": "user", "content": "Tell me of rivers. " * 20}]
    first = body_digests(json.dumps({"messages": turns}).encode(), encoder)
    turns += [{"role": "assistant", "content": "Long."}, {"role": "user", "content": "More " * 90}]
    second = body_digests(json.dumps({"messages": turns}).encode(), encoder)
    assert first and second[: len(first) - 1] == first[:-1] and len(second) > len(first)
    salted = body_digests(json.dumps({"messages": turns, "cache_salt": "a"}).encode(), encoder)
    assert len(salted) == len(second) and not set(salted) & set(second)


@pytest.mark.parametrize(
    "body",
    [
        b"", b"{", b"[]", b"1", b'{"prompt": 1.5}', b'{"prompt": [1e9, 1e99]}', b'{"messages": 3}',
        b'{"prompt": {"a": 1}}', b'{"prompt": [[99999999999999999999]]}', b'{"messages": [{}]}',
    ],
)  # fmt: skip
def test_a_body_without_a_prompt_that_can_be_read_has_no_digests(
    body: bytes, encoder: PromptEncoder
) -> None:
    assert body_digests(body, encoder) == []


def test_haproxy_keeps_its_connections_for_longer_than_a_drain() -> None:
    given = {"RAY_worker_niceness": "3"}
    environment.apply(environment.variables(60), given)
    assert int(given["RAY_SERVE_HAPROXY_HARD_STOP_AFTER_S"]) > 60
    assert given["RAY_worker_niceness"] == "3"  # what the operator has set stays


def test_the_command_says_what_is_wrong(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert main(["ray", "--num-replicas", "3", "--max-replicas", "2"]) == 2
    assert "--max-replicas is 2, which is less than --num-replicas=3" in capsys.readouterr().err
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert main(["ray"]) == 2
    assert "Ray is not installed; install it with: pip install 'penstock[ray]'" in (
        capsys.readouterr().err
    )
