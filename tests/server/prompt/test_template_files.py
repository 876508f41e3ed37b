"""Which of a model's chat templates a conversation gets: the one that transformers takes."""

import json
from pathlib import Path
from typing import Any

import pytest
import transformers

from penstock.engine.files.json_file import read_object
from penstock.engine.hub.check import check_directory
from penstock.engine.models.errors import InvalidModel
from penstock.scheduler.errors import InvalidConfig
from penstock.server.errors import InvalidRequest
from penstock.server.prompt.prompts import render_chat
from penstock.server.prompt.tokenizer import PromptEncoder
from penstock.server.tools.chat_format import ChatFormat
from penstock.server.tools.parsers import ToolFormat
from penstock.server.tools.prompting import Message
from tests.support.chatting import ADD, request
from tests.support.gguf_files import write_gguf
from tests.support.paths import DEMO_MODEL
from tests.support.starts import write_tokenizer
from tests.support.tiny_models import make_model

TALK: list[Message] = [{"role": "user", "content": "Hi"}]
TOOLS: list[Any] = [
    {
        "type": "function",
        "function": {"name": "add", "description": "adds", "parameters": {"type": "object"}},
    }
]
FILE = "chat_template.jinja"


def template(name: str) -> str:
    return f"{name}: {{{{ messages[0].content }}}} {{{{ tools | length if tools else 0 }}}}"


def listed(*names: str) -> dict[str, Any]:
    return {"chat_template": [{"name": name, "template": template(name)} for name in names]}


def write_more(directory: Path, *names: str) -> None:
    (directory / "additional_chat_templates").mkdir()
    for name in names:
        (directory / "additional_chat_templates" / f"{name}.jinja").write_text(template(name))


@pytest.mark.parametrize("has_tools", [False, True])
@pytest.mark.parametrize(
    ("settings", "file", "more"),
    [
        ({"chat_template": template("own")}, None, ()),
        (listed("default"), None, ()),
        (listed("tool_use", "rag", "default"), None, ()),
        ({}, "the file", ()),
        ({"chat_template": template("own")}, "the file", ()),
        (listed("tool_use", "default"), "the file", ()),
        ({}, "the file", ("rag", "tool_use")),
        ({"chat_template": template("own")}, "the file", ("tool_use",)),
        (listed("tool_use"), "the file", ("rag",)),
    ],
)
def test_a_conversation_gets_the_template_that_transformers_takes(
    tmp_path: Path,
    settings: dict[str, Any],
    file: str | None,
    more: tuple[str, ...],
    has_tools: bool,
) -> None:
    write_tokenizer(tmp_path, **settings)
    if file is not None:
        (tmp_path / FILE).write_text(template(file))
    if more:
        write_more(tmp_path, *more)
    tools = TOOLS if has_tools else None
    oracle = transformers.AutoTokenizer.from_pretrained(tmp_path)
    expected = oracle.apply_chat_template([*map(dict, TALK)], tools=tools, tokenize=False)
    encoder = PromptEncoder.load(tmp_path, None)
    found = encoder.chat_template(has_tools=has_tools).render(TALK, tools=tools)
    assert found == expected


def test_a_request_with_tools_is_rendered_by_the_template_for_them(tmp_path: Path) -> None:
    encoder = PromptEncoder.load(write_tokenizer(tmp_path, **listed("default", "tool_use")), None)

    def rendered(**fields: Any) -> str:
        chat = request(**fields)
        return render_chat(chat, encoder.chat_template(has_tools=bool(chat.usable_tools)))[0]

    assert rendered() == "default: Hi 0"
    assert rendered(tools=[ADD]) == "tool_use: Hi 1"
    assert rendered(tools=[ADD], tool_choice="none") == "default: Hi 0"


def test_calls_are_told_from_the_template_for_tools_and_thoughts_from_the_other(
    tmp_path: Path,
) -> None:
    settings = listed("default", "tool_use")
    settings["chat_template"][0]["template"] += "<think>"
    settings["chat_template"][1]["template"] += "<tool_call>"
    encoder = PromptEncoder.load(write_tokenizer(tmp_path, **settings), None)
    sources = encoder.template_source, encoder.tool_template_source
    found = ChatFormat.detect(sources[0], None, None, tool_template=sources[1])
    assert found.tools is ToolFormat.HERMES and found.reasoning is not None
    alone = ChatFormat.detect(sources[0], None, None)
    assert alone.tools is ToolFormat.JSON


def test_a_request_may_name_one_of_the_models_templates(tmp_path: Path) -> None:
    encoder = PromptEncoder.load(write_tokenizer(tmp_path, **listed("default", "rag")), None)
    assert encoder.chat_template("rag").render(TALK, tools=[]) == "rag: Hi 0"
    assert encoder.chat_template("{{ 1 }}").render(TALK) == "1"


def test_a_model_whose_templates_are_all_for_something_else_takes_no_plain_conversations(
    tmp_path: Path,
) -> None:
    encoder = PromptEncoder.load(write_tokenizer(tmp_path, **listed("rag", "tool_use")), None)
    with pytest.raises(InvalidRequest, match="no chat template but those named rag, tool_use"):
        encoder.chat_template()
    assert encoder.chat_template(has_tools=True).render(TALK, tools=[1]) == "tool_use: Hi 1"


def test_a_flag_takes_the_place_of_all(tmp_path: Path) -> None:
    override = tmp_path / "mine.jinja"
    override.write_text(template("mine"))
    encoder = PromptEncoder.load(write_tokenizer(tmp_path, **listed("tool_use")), override)
    for has_tools in (False, True):
        assert encoder.chat_template(has_tools=has_tools).render(TALK, tools=[]) == "mine: Hi 0"


def test_a_gguf_file_has_several_by_name_too(tmp_path: Path) -> None:
    key = "tokenizer.chat_template"
    several = {
        key: template("default"),
        f"{key}.tool_use": template("tool_use"),
        f"{key}s": ["tool_use"],
    }
    path = write_gguf(
        tmp_path / "m.gguf", make_model("llama2"), tokenizer=DEMO_MODEL, metadata=several
    )
    encoder = PromptEncoder.load(path, None)
    assert encoder.chat_template().render(TALK, tools=[]) == "default: Hi 0"
    assert encoder.chat_template(has_tools=True).render(TALK, tools=[]) == "tool_use: Hi 0"
    one = write_gguf(tmp_path / "1.gguf", make_model("llama2"), metadata={key: template("own")})
    assert read_object(one / "tokenizer_config.json")["chat_template"] == template("own")


@pytest.mark.parametrize(
    "source",
    [
        "{% for m in messages %}{{ m",
        "{{ " + "(" * 5_000 + "1" + ")" * 5_000 + " }}",
        "{% for a in b %}" * 30 + "{% endfor %}" * 30,
        "{% if a %}" * 2_000 + "{% endif %}" * 2_000,
        "{{ " + "9" * 5_000 + " }}",
        "{{ a" + ".b" * 5_000 + " }}",
        "{% set a = 1 | nothing %}",
        "{% endfor %}",
    ],
    ids=lambda source: source[:16],
)
def test_one_that_is_not_valid_is_a_sentence_with_its_file(tmp_path: Path, source: str) -> None:
    write_tokenizer(tmp_path)
    (tmp_path / FILE).write_text(source)
    with pytest.raises(InvalidConfig) as refused:
        PromptEncoder.load(tmp_path, None)
    message = str(refused.value)
    assert f"the chat template in {tmp_path / FILE} is not valid: " in message
    assert "\n" not in message and len(message) < 1_000


def test_one_that_is_no_file_or_no_text_is_named(tmp_path: Path) -> None:
    write_tokenizer(tmp_path)
    write_more(tmp_path, "tool_use")
    file = tmp_path / "additional_chat_templates" / "tool_use.jinja"
    file.write_bytes(b"\xff\xfe")
    with pytest.raises(InvalidConfig, match=f"{file} cannot be read"):
        PromptEncoder.load(tmp_path, None)
    file.unlink()
    file.symlink_to("nowhere")
    for name in ("config.json", "model.safetensors"):
        (tmp_path / name).symlink_to(DEMO_MODEL / name)
    with pytest.raises(InvalidModel, match=f"{file} is a link to nowhere"):
        check_directory(tmp_path)


@pytest.mark.parametrize("given", [["a"], [{"name": "default"}], [{"name": 7, "template": ""}], 7])
def test_settings_of_another_form_are_named_by_their_file(tmp_path: Path, given: object) -> None:
    write_tokenizer(tmp_path)
    (tmp_path / "chat_template.json").write_text(json.dumps({"chat_template": given}))
    with pytest.raises(InvalidConfig, match=r"chat_template\.json: 'chat_template' must be"):
        PromptEncoder.load(tmp_path, None)
