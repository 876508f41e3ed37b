"""The commands of a conversation."""

import json
from pathlib import Path

import pytest

from penstock.loadtest.chat.conversation import COMMANDS, HELP, BadCommand, Conversation, Leave


def talked(system: str | None = None) -> Conversation:
    conversation = Conversation(system)
    conversation.ask("Hi")
    conversation.answer("Hello")
    return conversation


def test_clear_keeps_the_system_prompt_alone() -> None:
    conversation = talked("Be kind.")
    conversation.command("/clear")
    assert conversation.messages == [{"role": "system", "content": "Be kind."}]


def test_the_system_prompt_is_shown_set_and_removed() -> None:
    conversation = talked()
    assert conversation.command("/system") == "there is no system prompt"
    assert conversation.command("/system Be brief.") == "system prompt: Be brief."
    assert conversation.messages[0] == {"role": "system", "content": "Be brief."}
    assert conversation.command("/system -") == "there is no system prompt"
    assert [each["role"] for each in conversation.messages] == ["user", "assistant"]


def test_save_writes_the_messages_of_a_request_and_no_file_twice(tmp_path: Path) -> None:
    file = tmp_path / "a chat.json"
    conversation = talked("Be kind.")
    assert conversation.command(f"/save {file}") == f"saved 3 messages to {file}"
    assert json.loads(file.read_text(encoding="utf-8")) == conversation.messages
    with pytest.raises(BadCommand, match="exists already"):
        conversation.command(f"/save {file}")
    with pytest.raises(BadCommand, match="name a file"):
        conversation.command("/save")


def test_an_answer_without_text_takes_its_question_back() -> None:
    conversation = talked()
    conversation.ask("Again")
    conversation.answer("")
    assert len(conversation.messages) == 2


@pytest.mark.parametrize("name", ["/quit", "/exit", "/bye"])
def test_these_leave(name: str) -> None:
    with pytest.raises(Leave):
        talked().command(name)


def test_an_unknown_command_names_help_which_names_every_command() -> None:
    with pytest.raises(BadCommand, match="there is no command /hlep; /help lists them"):
        talked().command("/hlep")
    assert talked().command("/help") == HELP
    assert all(name in HELP for name in COMMANDS if name != "/help")
