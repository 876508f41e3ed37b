"""The demo model's tokenizer: byte-level BPE, three special tokens, a ChatML-like chat template.

Every byte is a token, so every text round-trips; each digit is a token of its own, so that
the model can learn sums.
"""

import json
from collections.abc import Iterable
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from tests.demo_model.training.corpus import Document

END_OF_TEXT = "<|endoftext|>"
TURN_START = "<|im_start|>"
TURN_END = "<|im_end|>"
SPECIAL_TOKENS = (END_OF_TEXT, TURN_START, TURN_END)
END_OF_TEXT_ID, TURN_START_ID, TURN_END_ID = range(len(SPECIAL_TOKENS))

# "developer" is OpenAI's newer name of the system role.
CHAT_TEMPLATE = (
    "{%- for message in messages -%}"
    "{%- set role = 'system' if message['role'] == 'developer' else message['role'] -%}"
    "{{ '<|im_start|>' + role + '\\n' + message['content'] + '<|im_end|>\\n' }}"
    "{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{ '<|im_start|>assistant\\n' }}{%- endif -%}"
)


def train_tokenizer(documents: Iterable[Document], vocab_size: int) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts(documents), trainer)
    return tokenizer


def texts(documents: Iterable[Document]) -> Iterable[str]:
    for document in documents:
        if document.text:
            yield document.text
        for message in document.messages:
            yield f"{message.role}\n{message.content}"


def encode(tokenizer: Tokenizer, document: Document) -> tuple[list[int], list[bool]]:
    """A document's token ids, and for each whether the model is to generate it.

    The ids are those of the chat template's output. The model generates plain texts and the
    assistant's turns with their end token.
    """
    ids: list[int] = tokenizer.encode(document.text).ids
    generated = [True] * len(ids)
    for message in document.messages:
        head = [TURN_START_ID, *tokenizer.encode(f"{message.role}\n").ids]
        body = [*tokenizer.encode(message.content).ids, TURN_END_ID]
        tail = tokenizer.encode("\n").ids
        is_generated = message.role == "assistant"
        ids += head + body + tail
        generated += [False] * len(head) + [is_generated] * len(body) + [False] * len(tail)
    return [*ids, END_OF_TEXT_ID], [*generated, True]


def save_tokenizer(tokenizer: Tokenizer, folder: Path, max_positions: int) -> None:
    """Writes the files that transformers' AutoTokenizer reads."""
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": max_positions,
        "bos_token": None,
        "eos_token": TURN_END,
        "pad_token": END_OF_TEXT,
        "additional_special_tokens": [TURN_START],
        "clean_up_tokenization_spaces": False,
        "chat_template": CHAT_TEMPLATE,
    }
    text = json.dumps(settings, indent=2) + "\n"
    (folder / "tokenizer_config.json").write_text(text, encoding="utf-8")
