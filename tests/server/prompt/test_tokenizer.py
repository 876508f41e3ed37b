"""Prompts to ids: the same ids as transformers would give, and its chat templates' own words."""

import json
import os
import subprocess
from pathlib import Path

import pytest
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers

from penstock.scheduler.errors import InvalidConfig
from penstock.server.errors import InvalidRequest
from penstock.server.prompt import sandboxed_template
from penstock.server.prompt.tokenizer import ChatTemplate, GenerationDefaults, PromptEncoder
from tests.support.paths import ROOT

STORIES = ROOT.parent / "shared" / "models" / "stories260K"
DEMO = ROOT / "engine" / "hub" / "demo_model"
TEXTS = ["", "Once upon a time", "  two  spaces ", "naïve 😀 你好", "<s>x</s>", "a\n\nb"]
TALK = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": 'Is <1> & "2" fine?'},
    {"role": "assistant", "content": "Yes."},
    {"role": "user", "content": "Why?"},
]


@pytest.mark.parametrize("directory", [STORIES, DEMO], ids=lambda path: path.name)
def test_texts_get_the_ids_that_transformers_gives(directory: Path) -> None:
    if not (directory / "tokenizer.json").exists():
        pytest.skip(f"{directory.name} is not there")
    transformers = pytest.importorskip("transformers")
    oracle = transformers.AutoTokenizer.from_pretrained(directory)
    encoder = PromptEncoder.load(directory, None)
    for text in TEXTS:
        assert list(encoder.encode(text)) == oracle(text)["input_ids"]


def encoded_talk(encoder: PromptEncoder) -> tuple[int, ...]:
    return encoder.encode(encoder.chat_template().render(list(TALK)), add_special_tokens=False)


def test_conversations_get_the_ids_that_transformers_gives() -> None:
    transformers = pytest.importorskip("transformers")
    oracle = transformers.AutoTokenizer.from_pretrained(DEMO)
    ids = encoded_talk(PromptEncoder.load(DEMO, None))
    text = oracle.apply_chat_template(TALK, tokenize=False, add_generation_prompt=True)
    assert list(ids) == oracle(text, add_special_tokens=False)["input_ids"]


def test_a_model_without_a_template_takes_no_conversations(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequest, match="--chat-template"):
        encoded_talk(PromptEncoder.load(_model(tmp_path), None))


def test_a_template_from_a_file_takes_the_place_of_the_models_own(tmp_path: Path) -> None:
    override = tmp_path / "mine.jinja"
    override.write_text("{{ messages[0].content }}")
    directory = _model(tmp_path, chat_template="{{ 'own' }}")
    assert len(encoded_talk(PromptEncoder.load(directory, None))) == len("own")
    overridden = encoded_talk(PromptEncoder.load(directory, override))
    assert len(overridden) == len("Be brief.")


def test_a_template_may_be_one_of_several_by_name(tmp_path: Path) -> None:
    several = [{"name": "tool_use", "template": "no"}, {"name": "default", "template": "yes"}]
    directory = _model(tmp_path, chat_template=several)
    assert len(encoded_talk(PromptEncoder.load(directory, None))) == len("yes")


def test_a_template_may_be_in_the_file_that_models_with_images_have(tmp_path: Path) -> None:
    directory = _model(tmp_path)
    (directory / "chat_template.json").write_text('{"chat_template": "beside"}')
    assert len(encoded_talk(PromptEncoder.load(directory, None))) == len("beside")


def test_a_template_sees_special_tokens_and_writes_json_as_it_is() -> None:
    template = ChatTemplate(
        "{{ bos_token }}{{ messages[1].content | tojson }}", {"bos_token": "<s>"}
    )
    assert template.render(list(TALK)) == '<s>"Is <1> & \\"2\\" fine?"'


def test_a_templates_refusal_is_quoted_in_the_error() -> None:
    template = ChatTemplate("{{ raise_exception('roles must alternate') }}", {})
    with pytest.raises(InvalidRequest, match="roles must alternate"):
        template.render(list(TALK))


def test_a_template_cannot_reach_into_python() -> None:
    template = ChatTemplate("{{ messages.__class__.__mro__[1].__subclasses__() }}", {})
    with pytest.raises(InvalidRequest):
        template.render(list(TALK))


def test_a_template_that_is_not_valid_is_a_mistake_of_the_operator() -> None:
    with pytest.raises(InvalidConfig, match="chat template"):
        ChatTemplate("{% if %}", {})


def test_a_directory_without_a_tokenizer_is_named(tmp_path: Path) -> None:
    with pytest.raises(InvalidConfig, match="tokenizer"):
        PromptEncoder.load(tmp_path, None)


def test_a_tokenizers_own_truncation_is_turned_off(tmp_path: Path) -> None:
    directory = _model(tmp_path)
    tokenizer = Tokenizer.from_file(str(directory / "tokenizer.json"))
    tokenizer.enable_truncation(3)
    tokenizer.save(str(directory / "tokenizer.json"))
    assert len(PromptEncoder.load(directory, None).encode("abcdefgh")) == 8


def test_generation_defaults_come_from_their_file_or_are_absent(tmp_path: Path) -> None:
    assert GenerationDefaults.load(tmp_path) == GenerationDefaults()
    values = {"temperature": 0.6, "top_k": 20, "eos_token_id": 2}
    (tmp_path / "generation_config.json").write_text(json.dumps(values))
    assert GenerationDefaults.load(tmp_path) == GenerationDefaults(temperature=0.6, top_k=20)


def _model(directory: Path, **settings: object) -> Path:
    """A directory with a tokenizer of single bytes."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {char: i for i, char in enumerate(alphabet)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(directory / "tokenizer.json"))
    (directory / "tokenizer_config.json").write_text(json.dumps(settings))
    return directory


def test_a_clients_template_is_rendered_without_the_servers_environment(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    given: dict[str, str] = {}

    def run(*_: object, env: dict[str, str], **__: object) -> object:
        given.update(env)
        return subprocess.CompletedProcess([], 0, stdout=b'{"text": "done"}')

    monkeypatch.setattr(subprocess, "run", run)
    monkeypatch.setenv("PENSTOCK_API_KEY", "secret")
    assert sandboxed_template.render("{{ x }}", {"x": 1}) == "done"
    assert given["PATH"] == os.environ["PATH"] and "secret" not in given.values()


# Llama 3's, from its tokenizer.json.
LLAMA_3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def test_a_text_that_the_tokenizer_gives_up_on_is_the_requests_error() -> None:
    """With these rules, 12 MiB of spaces make it panic."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(LLAMA_3), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    encoder = PromptEncoder(tokenizer, None)
    with pytest.raises(InvalidRequest, match="break up very long runs of spaces"):
        encoder.encode(" " * (12 << 20))
    assert encoder.encode("a b")
