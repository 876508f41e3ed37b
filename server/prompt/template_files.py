"""The chat templates among a model's files, by name: most models have one, "default", and some have
another for conversations with tools, "tool_use", and more for other purposes.

Which files count, and which template is taken, is as `transformers.apply_chat_template` decides.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from penstock.engine.client import read_model_object
from penstock.scheduler.errors import InvalidConfig

DEFAULT, WITH_TOOLS = "default", "tool_use"
_FILE, _MORE_FILES = "chat_template.jinja", "additional_chat_templates"


@dataclass(frozen=True, slots=True)
class TemplateSource:
    """text: Jinja. where: the file that has it, for error messages."""

    text: str
    where: Path


def template_sources(
    directory: Path, settings: dict[str, Any], override: Path | None
) -> dict[str, TemplateSource]:
    """Empty for a model without any. Raises PenstockError. directory: or a GGUF file. settings: of
    tokenizer_config.json. override: a file that is used in place of all."""
    if override is not None:
        return {DEFAULT: _read(override)}
    found = {path.stem: _read(path) for path in sorted((directory / _MORE_FILES).glob("*.jinja"))}
    if (directory / _FILE).is_file():
        return found | {DEFAULT: _read(directory / _FILE)}
    return _of_settings(directory, settings) | found


def _read(file: Path) -> TemplateSource:
    try:
        return TemplateSource(file.read_text(encoding="utf-8"), file)
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidConfig(f"the chat template {file} cannot be read: {error}") from error


def _of_settings(directory: Path, settings: dict[str, Any]) -> dict[str, TemplateSource]:
    """Those that are strings in JSON."""
    path, given = directory / "tokenizer_config.json", settings.get("chat_template")
    if given is None:  # older models of text and images have it beside their other settings
        path = directory / "chat_template.json"
        given = read_model_object(path).get("chat_template")
    if given is None:
        return {}
    several = given if isinstance(given, list) else [{"name": DEFAULT, "template": given}]
    texts = {}
    for each in several:
        name, text = (each.get("name"), each.get("template")) if isinstance(each, dict) else (0, 0)
        if not (isinstance(name, str) and isinstance(text, str)):
            raise InvalidConfig(
                f"{path}: 'chat_template' must be a string, or a list of objects with a 'name' and "
                f"a 'template', not {given!r:.80}"
            )
        texts[name] = TemplateSource(text, path)
    return texts
