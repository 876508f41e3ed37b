"""Conversations with a tiny model of gated delta nets, through HTTP."""

import json
import shutil
from collections.abc import Iterator

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
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    model = make_model("qwen3_5_wrapped", vocab_size=2048, max_position_embeddings=4096)
    path = save(model, tmp_path_factory.mktemp("model"))
    shutil.copy(DEMO_MODEL / "tokenizer.json", path)
    settings = json.loads((DEMO_MODEL / "tokenizer_config.json").read_text())
    (path / "tokenizer_config.json").write_text(json.dumps({**settings, "chat_template": TEMPLATE}))
    flags = ("--device", "cpu", "--dtype", "float32", "--served-model-name", "hybrid")
    running = RunningServer(str(path), *flags, "--language-model-only")
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


def test_states_are_in_the_ledger_and_in_the_metrics(server: RunningServer) -> None:
    assert "recurrent states of" in server.log()
    assert server.metric('recurrent_states{state="used"}') == 0
    assert server.metric('recurrent_states{state="idle"}') > 0


def test_calls_and_thoughts_are_told_from_its_template() -> None:
    found = ChatFormat.detect(TEMPLATE, None, None)
    assert found.tools is ToolFormat.QWEN3_CODER
    assert found.reasoning is not None and found.reasoning.markers.opening == "<think>"
    assert isinstance(found.reasoning, ReasoningFormat)
