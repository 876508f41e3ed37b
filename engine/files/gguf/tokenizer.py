"""The tokenizer in a GGUF file's metadata, as a tokenizer.json.

Byte-level BPE (`gpt2`) keeps its merges in the file, and so does Gemma 4's (`gemma4`), which is
otherwise as SentencePiece's BPE (`llama`). That has a score for each token instead: of two
neighbours, those are merged whose union has the highest, and merges in that order are the same. All
give the ids of the tokenizer that was converted, except that GGUF has no place for some details of
Hugging Face's: whether a space is put before a text that follows a special token (llama.cpp does
so, as Llama 2), and whether special tokens take spaces beside them, which is known of Phi-3's.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
)
from tokenizers.normalizers import Normalizer
from tokenizers.pre_tokenizers import PreTokenizer

from penstock.engine.errors import InvalidModel
from penstock.engine.files.gguf.file import GgufFile, open_gguf
from penstock.engine.files.gguf.tokens import (
    CONTROL,
    NORMAL,
    PREFIX,
    UNKNOWN,
    UNUSED,
    USER_DEFINED,
    Tokens,
)

_SENTENCE_PIECE = ("llama", "gemma4")  # with scores of tokens, or with merges
_SPACE = "\u2581"  # what SentencePiece writes for a space
_NEVER_STRIP = ("<unk>", "<s>", "<|endoftext|>")
# More than any token of SentencePiece has: pairs of parts are as many.
_MAX_MERGED_CHARS = 256

_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"
# The gap is for digits: how many together.
_WORDS = _CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|%s| ?[^\s\p{L}\p{N}]+[\r\n]*|" + _SPACES
_THREE_DIGITS = r"\p{N}{1,3}"
_LLAMA3 = _WORDS % _THREE_DIGITS
_QWEN2 = _WORDS % r"\p{N}"
_QWEN35 = (
    rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}\p{{M}}]+|\p{{N}}"
    rf"| ?[^\s\p{{L}}\p{{M}}\p{{N}}]+[\r\n]*|{_SPACES}"
)
_SEED = rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}| ?[^\s\p{{L}}\p{{N}}]+|{_SPACES}"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
# The gaps are for contractions after a word, twice, and for digits.
_CASED = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+%s|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*%s|%s"
    r"| ?[^\s\p{L}\p{N}]+[\r\n/]*|" + _SPACES
)
_TEKKEN = _CASED % ("", "", r"\p{N}")
_GPT4O = _CASED % (f"{_CONTRACTIONS}?", f"{_CONTRACTIONS}?", _THREE_DIGITS)
# Chinese characters are words of their own.
_KIMI = r"\p{Han}+|" + _GPT4O.replace(r"\p{M}]", r"\p{M}&&[^\p{Han}]]").replace(r"\n/]", r"\n]")
_CHINESE = "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+"  # and Japanese letters
_YOUTU = (
    "[\uac00-\ud7a3\u3131-\u318e]+|[\uff01\u2026\u201c\u201d\u2018\u2019\u2014\uff1a\uff1b\uff0c"
    rf"\u3001-\u303f\ufe30-\ufe4f]+|[\u3105-\u312f]+|{_CHINESE}",
    _CASED % (f"{_CONTRACTIONS}?", f"{_CONTRACTIONS}?", r"\p{N}"),
)
# Its letters are those with a case in the Unicode of its day, but for some.
_DEEPSEEK = (
    r"[\r\n]",
    r"\s?[\p{Lu}\p{Ll}\p{Lt}&&[^\u0560-\u0588\u10c7-\u10ff\u1c80-\u1c8a\u2d00-\u2d2d\ua78f-\uab6f"
    "\U00010570-\U000105bc\U00010d50-\U00010d85\U00016e40-\U0001df2a]]+",
    "\\s?[!-/:-~\uff01-\uff0f\uff1a-\uff5e\u2018-\u201f\u3000-\u3002]+",
    r"\s+$",
    "[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff]+",
    r"\p{N}",
)
# Digits first, then letters of Chinese and Japanese, then the rest.
_DEEPSEEK3 = (
    _THREE_DIGITS,
    _CHINESE,
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
    r"| ?[\p{P}\p{S}]+[\r\n]*|" + _SPACES,
)


def split(*regexes: str) -> PreTokenizer:
    """Splits a text into words, by one after the other, and these into the letters of bytes."""
    splits = [pre_tokenizers.Split(Regex(regex), "isolated") for regex in regexes]
    return pre_tokenizers.Sequence([*splits, _BYTES])


_BYTES = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
_GPT2 = pre_tokenizers.ByteLevel(add_prefix_space=False)
_DIGITS = pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), _GPT2])


@dataclass(frozen=True, slots=True)
class Words:
    """ignores_merges: a word that is a token is that token, whatever the merges make of it.
    adds_bos: where the file does not say whether."""

    rules: PreTokenizer
    normalizer: Normalizer | None = None
    ignores_merges: bool = False
    adds_bos: bool = False


_LLAMA3_BPE = Words(split(_LLAMA3), ignores_merges=True, adds_bos=True)
_TEKKEN_BPE = Words(split(_TEKKEN), ignores_merges=True, adds_bos=True)
# Source: llama.cpp's names for the tokenizers of models; the rules are those models' own.
WORDS = {
    **dict.fromkeys(("llama-bpe", "llama3", "llama-v3", "falcon3"), _LLAMA3_BPE),
    **dict.fromkeys(("dbrx", "smaug-bpe"), Words(split(_LLAMA3))),
    "glm4": Words(split(_LLAMA3), ignores_merges=True),
    # The second is Mistral's newer name, for which llama.cpp has the words of Llama 3.
    **dict.fromkeys(("tekken", "pixtral"), _TEKKEN_BPE),
    "qwen2": Words(split(_QWEN2), normalizer=normalizers.NFC()),
    "deepseek-r1-qwen": Words(split(_QWEN2)),
    "qwen35": Words(split(_QWEN35), normalizer=normalizers.NFC()),
    "gpt-4o": Words(split(_GPT4O)),
    "deepseek-llm": Words(split(*_DEEPSEEK)),  # V2 too
    **dict.fromkeys(("deepseek-v3", "joyai-llm"), Words(split(*_DEEPSEEK3))),
    "kimi-k2": Words(split(_KIMI), ignores_merges=True),
    "youtu": Words(split(*_YOUTU), ignores_merges=True),
    "seed-coder": Words(split(_SEED)),
    **dict.fromkeys(("smollm", "starcoder", "refact", "minerva-7b"), Words(_DIGITS)),
    **dict.fromkeys(("gpt-2", "exaone4"), Words(_GPT2)),
}


def read_tokenizer(path: Path) -> str:
    """As a tokenizer.json. Raises InvalidModel."""
    gguf = open_gguf(path)
    tokens = Tokens(gguf.path, gguf.metadata)
    return tokenizer_json(tokens, _checked_rules(tokens))


def tokenizer_json(tokens: Tokens, rules: Words | None) -> str:
    """rules: None for SentencePiece."""
    tokenizer = _sentence_piece(tokens) if rules is None else _byte_level(tokens, rules)
    # Phi-3's take the spaces after them; its template has a line's end there.
    strips = rules is None and tokens.metadata.get("general.architecture") == "phi3"
    # These are found in a text before anything else. In one call, as each makes their index anew.
    tokenizer.add_tokens(
        [
            AddedToken(
                token,
                normalized=False,
                special=kind != USER_DEFINED,
                rstrip=strips and token not in _NEVER_STRIP,
            )
            for token, kind in zip(tokens.texts, tokens.kinds, strict=True)
            if token and kind in (UNKNOWN, CONTROL, USER_DEFINED)
        ]
    )
    return tokenizer.to_str()


def check_tokenizer(gguf: GgufFile, vocab_size: int) -> None:
    """Raises InvalidModel where it is of an unknown kind, or not this model's."""
    tokens = Tokens(gguf.path, gguf.metadata)
    _checked_rules(tokens)
    if len(tokens.texts) > vocab_size:
        raise InvalidModel(
            f"{gguf.path} has a tokenizer of {len(tokens.texts)} tokens, and its model only "
            f"{vocab_size}; convert the model again",
            brief="its tokenizer has more tokens than its model",
        )


def _checked_rules(tokens: Tokens) -> Words | None:
    """Returns how words are split; None for SentencePiece. Raises InvalidModel for others."""
    path = tokens.path
    if not tokens.texts:
        raise InvalidModel(
            f"{path} has no tokenizer; convert the model again", brief="no tokenizer"
        )
    model, name = tokens.get("model", str), tokens.get("pre", str)
    if model in _SENTENCE_PIECE:
        return None
    if model != "gpt2":
        raise InvalidModel(
            f"{path} has a tokenizer of the kind {model!r:.40}, which is not supported; supported "
            "are 'gpt2' (byte-level BPE), 'llama' (SentencePiece's BPE) and 'gemma4': use the "
            "version of the model in safetensors",
            brief=f"the tokenizer {model!r:.40} is not supported",
        )
    architecture = tokens.metadata.get("general.architecture")
    if name in (None, "default") and architecture in ("qwen2", "qwen3"):
        name = "qwen2"  # files from before llama.cpp wrote it
    if name not in WORDS:
        raise InvalidModel(
            f"{path} has {PREFIX}pre {name!r:.40}, a way to split text into words that is not "
            f"supported; supported are {', '.join(WORDS)}: use the version of the model in "
            "safetensors, or convert it again with a newer llama.cpp",
            brief=f"the tokenizer's words, {name!r:.40}, are not supported",
        )
    if not tokens.values("merges", str):
        raise tokens.wrong("merges", "pairs of tokens")
    return WORDS[name]


def _merges(tokens: Tokens) -> Iterator[tuple[str, str]]:
    for merge in tokens.values("merges", str):
        left, separator, right = merge.partition(" ")
        if not (left and separator and right):
            raise tokens.wrong("merges", "pairs of tokens")
        yield left, right


def _byte_level(tokens: Tokens, rules: Words) -> Tokenizer:
    merges = list(_merges(tokens))
    model = models.BPE(_vocabulary(tokens), merges, ignore_merges=rules.ignores_merges)
    tokenizer = Tokenizer(model)
    if rules.normalizer is not None:
        tokenizer.normalizer = rules.normalizer
    tokenizer.pre_tokenizer = rules.rules
    tokenizer.decoder = decoders.ByteLevel()
    _add_ends(tokenizer, tokens, adds_bos=rules.adds_bos)
    return tokenizer


def _sentence_piece(tokens: Tokens) -> Tokenizer:
    has_scores = tokens.get("model", str) == "llama"
    adds_space = tokens.get("add_space_prefix", bool, default=has_scores)
    unknown, vocabulary = tokens.id_of("unknown"), _vocabulary(tokens)
    merges = _merges_by_score(tokens, vocabulary) if has_scores else _merges(tokens)
    tokenizer = Tokenizer(
        models.BPE(
            vocabulary,
            list(merges),
            unk_token=None if unknown is None else tokens.texts[unknown],
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    prepend = [normalizers.Prepend(_SPACE)] * adds_space
    tokenizer.normalizer = normalizers.Sequence([*prepend, normalizers.Replace(" ", _SPACE)])
    spaces, strip = decoders.Replace(_SPACE, " "), [decoders.Strip(" ", 1, 0)] * adds_space
    tokenizer.decoder = decoders.Sequence(
        [spaces, decoders.ByteFallback(), decoders.Fuse(), *strip]
    )
    _add_ends(tokenizer, tokens, adds_bos=True)
    return tokenizer


def _merges_by_score(tokens: Tokens, vocabulary: dict[str, int]) -> Iterator[tuple[str, str]]:
    """The best first; of those that make the same token, that with the better parts."""
    scores = tokens.values("scores", float)
    if len(scores) != len(tokens.texts):
        raise tokens.wrong("scores", f"a list of {len(tokens.texts)} numbers")
    merged = [
        (-scores[token_id], token_id, text)
        for text, token_id in vocabulary.items()
        if tokens.kinds[token_id] == NORMAL and 1 < len(text) <= _MAX_MERGED_CHARS
    ]
    for _, _, text in sorted(merged):
        parts = [(text[:cut], text[cut:]) for cut in range(1, len(text))]
        known = [pair for pair in parts if pair[0] in vocabulary and pair[1] in vocabulary]
        yield from sorted(known, key=lambda pair: (vocabulary[pair[0]], vocabulary[pair[1]]))


def _add_ends(tokenizer: Tokenizer, tokens: Tokens, *, adds_bos: bool) -> None:
    """Puts the tokens of a text's begin and end around it, where the file says so."""
    bos = tokens.id_of("bos") if tokens.get("add_bos_token", bool, default=adds_bos) else None
    eos = tokens.id_of("eos") if tokens.get("add_eos_token", bool, default=False) else None
    # A name is the token's text, but for what a template reads in another way.
    names = {
        each: f"token {each}" if {":", "$"} & set(tokens.texts[each]) else tokens.texts[each]
        for each in (bos, eos)
        if each is not None
    }
    before, after = ([] if each is None else [names[each]] for each in (bos, eos))
    if names:
        tokenizer.post_processor = processors.TemplateProcessing(
            single=[*before, "$A", *after],
            pair=[*before, "$A", *after, *(f"{each}:1" for each in (*before, "$B", *after))],
            special_tokens=[
                {"id": name, "ids": [each], "tokens": [tokens.texts[each]]}
                for each, name in names.items()
            ],
        )


def _vocabulary(tokens: Tokens) -> dict[str, int]:
    """The ids of texts: where tokens have the same, the first."""
    vocabulary: dict[str, int] = {}
    for token_id, (text, kind) in enumerate(zip(tokens.texts, tokens.kinds, strict=True)):
        if kind != UNUSED:
            vocabulary.setdefault(text, token_id)
    return vocabulary
