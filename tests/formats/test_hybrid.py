"""Conversations with a tiny model of gated delta nets, through HTTP."""

import json
import os
import shutil
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from penstock.server.output.reasoning import ReasoningFormat
from penstock.server.tools.chat_format import ChatFormat
from penstock.server.tools.parsers import ToolFormat
from tests.formats.templates import TEMPLATES
from tests.support.paths import DEMO_MODEL
from tests.support.serving import RunningServer
from tests.support.tiny_models import make_model, save

TEMPLATE = TEMPLATES["qwen3_5_wrapped"]
# With blocks of 16: the rest of the last, and the block that a template's opening may be in.
MOST_LOST = 32


@pytest.fixture(scope="module")
def hybrid(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return saved(tmp_path_factory.mktemp("model"))


def saved(path: Path, **sizes: int) -> Path:
    model = make_model("qwen3_5_wrapped", vocab_size=2048, max_position_embeddings=4096, **sizes)
    save(model, path)
    shutil.copy(DEMO_MODEL / "tokenizer.json", path)
    settings = json.loads((DEMO_MODEL / "tokenizer_config.json").read_text())
    (path / "tokenizer_config.json").write_text(json.dumps({**settings, "chat_template": TEMPLATE}))
    return path


def started(path: Path, *flags: str) -> RunningServer:
    own = ("--device", "cpu", "--dtype", "float32", "--served-model-name", "hybrid")
    return RunningServer(str(path), *own, "--language-model-only", *flags)


@pytest.fixture(scope="module")
def server(hybrid: Path) -> Iterator[RunningServer]:
    running = started(hybrid)
    try:
        running.wait_until_ready()
        yield running
    finally:
        running.stop()


@pytest.mark.parametrize("num_words", [40, 400])
def test_the_second_turn_computes_its_new_tokens_however_long_the_first_was(
    server: RunningServer, num_words: int
) -> None:
    messages = [{"role": "user", "content": f"{num_words} " + "a house by the sea, " * num_words}]
    wanted = {"model": "hybrid", "max_tokens": 20, "temperature": 0}
    first = server.chat(messages=messages, **wanted).json()
    message = first["choices"][0]["message"]
    assert message["reasoning_content"] and not message["content"]
    # The thoughts of the first answer are not in the second prompt.
    messages += [{"role": "assistant", "content": "No."}, {"role": "user", "content": "Why?"}]
    second = server.chat(messages=messages, **wanted).json()
    cached = second["usage"]["prompt_tokens_details"]["cached_tokens"]
    assert first["usage"]["prompt_tokens"] - MOST_LOST <= cached
    assert second["usage"]["prompt_tokens"] - cached <= MOST_LOST + 40
    third = server.chat(messages=messages, **wanted).json()
    assert third["choices"][0]["message"] == second["choices"][0]["message"]


def check_turns(
    current: RunningServer, between: Callable[[RunningServer], RunningServer]
) -> RunningServer:
    """A conversation of six turns computes what is new at each, whatever happens between two. Its
    answers are those that another prompt cache gives: none. Returns the last server."""
    question = "a house by the sea, and what became of it in the winter after, " * 12
    messages = [{"role": "user", "content": question}]
    wanted = {"model": "hybrid", "max_tokens": 24, "temperature": 0}
    num_before = 0
    for turn in range(6):
        answer = current.chat(messages=messages, **wanted).json()
        usage = answer["usage"]
        cached = usage["prompt_tokens_details"]["cached_tokens"]
        assert cached >= num_before - MOST_LOST
        apart = current.chat(messages=messages, cache_salt=f"turn {turn}", **wanted).json()
        assert apart["choices"][0]["message"] == answer["choices"][0]["message"]
        assert apart["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
        num_before = usage["prompt_tokens"]
        messages += [
            {"role": "assistant", "content": f"It was number {turn}."},
            {"role": "user", "content": "And then, after that winter?"},
        ]
        current = between(current)
    return current


def test_six_turns_compute_what_is_new_though_the_engine_is_killed_between_them(
    hybrid: Path,
) -> None:
    def kill_engine(current: RunningServer) -> RunningServer:
        server = current.process.pid
        children = Path(f"/proc/{server}/task/{server}/children").read_text().split()
        [engine] = [
            int(child)
            for child in children
            if b"penstock.engine.ipc.process" in Path(f"/proc/{child}/cmdline").read_bytes()
        ]
        os.kill(engine, signal.SIGKILL)
        current.wait_until_ready()
        return current

    running = started(hybrid, "--max-engine-restarts", "10")
    try:
        running.wait_until_ready()
        check_turns(running, kill_engine)
        assert running.metric('engine_restarts_total{cause="killed"}') >= 5
    finally:
        running.stop()


def test_six_turns_compute_what_is_new_though_each_has_a_server_of_its_own(tmp_path: Path) -> None:
    # So large that to compute a prompt takes far longer than to read its blocks.
    hybrid = saved(tmp_path / "model", hidden_size=512, intermediate_size=2048)
    flags = ("--kv-offload-dir", str(tmp_path / "blocks"))
    servers = [started(hybrid, *flags)]
    servers[0].wait_until_ready()

    def replace(current: RunningServer) -> RunningServer:
        current.process.send_signal(signal.SIGTERM)
        assert current.exit_code()[0] == 0
        servers.append(started(hybrid, *flags))
        servers[-1].wait_until_ready()
        return servers[-1]

    try:
        last = check_turns(servers[0], replace)
        assert not last.metric("kv_offload_damaged_blocks_total")
    finally:
        servers[-1].stop()


def test_states_are_in_the_ledger_and_in_the_metrics(server: RunningServer) -> None:
    assert "recurrent states of" in server.log()
    assert server.metric('recurrent_states{state="used"}') == 0
    assert server.metric('recurrent_states{state="idle"}') > 0


def test_calls_and_thoughts_are_told_from_its_template() -> None:
    found = ChatFormat.detect(TEMPLATE, None, None)
    assert found.tools is ToolFormat.QWEN3_CODER
    assert found.reasoning is not None and found.reasoning.markers.opening == "<think>"
    assert isinstance(found.reasoning, ReasoningFormat)
