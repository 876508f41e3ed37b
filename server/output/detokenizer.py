"""Ids to text as they come: never half a character, and never what may be the start of a stop.

Three small machines, each fed a little at a time: `Vocabulary` knows what an id adds, a
`TextDecoder` joins that to text, a `StopScanner` watches the text for stop strings.

Why not tokenizers' own `DecodeStream`: it raises "Invalid prefix encountered" when a byte that
belongs to no character follows a whole one, and costs 1.5 us a token. Why not the usual two offsets
into a sliding `decode`: that is two decodes a token, and differs from the full decode after such a
byte. A table of what each id adds is exact for the two kinds of decoder that language models have.
"""

import codecs
import json
from collections.abc import Collection, Iterable, Mapping
from functools import lru_cache
from typing import Any, Protocol

from tokenizers import Tokenizer

from penstock.scheduler.errors import InvalidConfig

REPLACEMENT = "\N{REPLACEMENT CHARACTER}"


class ByteRun(Protocol):
    """Bytes that do not yet make whole characters."""

    def feed(self, data: bytes) -> str: ...

    def end(self) -> str:
        """No more bytes follow: what is left, with U+FFFD for what makes no character."""
        ...


class Utf8Run:
    """Byte-level BPE: gives each character as soon as it is whole."""

    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def feed(self, data: bytes) -> str:
        return self._decoder.decode(data)

    def end(self) -> str:
        return self._decoder.decode(b"", final=True)


class FallbackRun:
    """Sentencepiece's byte fallback: tokenizers decides a run as a whole, so nothing comes early.

    One byte that fits nowhere turns every byte of its run into U+FFFD, whole characters too.
    """

    def __init__(self) -> None:
        self._data = bytearray()

    def feed(self, data: bytes) -> str:
        self._data += data
        return ""

    def end(self) -> str:
        try:
            return self._data.decode()
        except UnicodeDecodeError:
            return REPLACEMENT * len(self._data)
        finally:
            self._data = bytearray()


class Vocabulary:
    """What each id of a tokenizer adds to the text.

    pieces: text, or bytes that may be part of a character. An id that adds nothing (a special
    token, or padding of the model's vocabulary) is not in it. num_stripped: spaces that fall away
    at the beginning of a text.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        """Raises InvalidConfig for a decoder that is neither byte-level nor sentencepiece's."""
        parts = _decoder_parts(tokenizer)
        kinds = [part["type"] for part in parts]
        self.num_stripped = 0
        self.new_run: type[Utf8Run] | type[FallbackRun] = FallbackRun
        if kinds == ["ByteLevel"]:
            self.new_run = Utf8Run
            spell = _spell_byte_level
        elif set(kinds) <= {"Replace", "ByteFallback", "Fuse", "Strip"} and _is_fused(kinds):
            spell = _sentencepiece_speller(parts)
            self.num_stripped = sum(part["start"] for part in parts if part["type"] == "Strip")
        else:
            raise InvalidConfig(
                f"this tokenizer's decoder is {' + '.join(kinds) or 'missing'}; penstock serves "
                "byte-level BPE and sentencepiece tokenizers"
            )
        added = tokenizer.get_added_tokens_decoder()
        self._special = {i: token.content for i, token in added.items() if token.special}
        self.pieces: dict[int, str | bytes] = {}
        for token, token_id in tokenizer.get_vocab(with_added_tokens=True).items():
            piece = spell(token)
            if piece and token_id not in self._special:
                self.pieces[token_id] = piece
        # For clients that want to see the special tokens too.
        self.all_pieces: dict[int, str | bytes] = {**self.pieces, **self._special}

    def spelling(self, token_id: int) -> bytes:
        """The bytes of one token by itself, for logprobs; a special token's name."""
        piece = self.pieces.get(token_id) or self._special.get(token_id, "")
        return piece if isinstance(piece, bytes) else piece.encode()

    def special_among(self, texts: Collection[str]) -> dict[int, str]:
        """Those special tokens that spell one of the texts."""
        return {i: text for i, text in self._special.items() if text in texts}

    def text_of(self, token_ids: Iterable[int], *, shows_special: bool = False) -> str:
        """The text of all ids, as one of its own."""
        decoder = TextDecoder(self, is_whole=True, shows_special=shows_special)
        return "".join([*map(decoder.feed, token_ids), decoder.end()])


def _decoder_parts(tokenizer: Tokenizer) -> list[dict[str, Any]]:
    if tokenizer.decoder is None:
        return []
    spec: dict[str, Any] = json.loads(tokenizer.decoder.__getstate__())
    return spec["decoders"] if spec["type"] == "Sequence" else [spec]


def _is_fused(kinds: list[str]) -> bool:
    """Whether a Strip strips the whole text, and not every token."""
    return "Strip" not in kinds or "Fuse" in kinds[: kinds.index("Strip")]


@lru_cache(maxsize=1)
def _byte_alphabet() -> dict[int, str]:
    """GPT-2's bytes in disguise: code point of the stand-in -> the byte as a latin-1 character.

    Source: Radford et al. 2019, `bytes_to_unicode`.
    """
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = [byte for byte in range(256) if byte not in printable]
    stand_ins = {byte: byte for byte in printable} | {b: 256 + i for i, b in enumerate(others)}
    return {code_point: chr(byte) for byte, code_point in stand_ins.items()}


def _spell_byte_level(token: str) -> str | bytes:
    alphabet = _byte_alphabet()
    if not all(ord(char) in alphabet for char in token):
        return token  # added to the vocabulary as it is
    return _text_if_whole(token.translate(alphabet).encode("latin-1"))


def _text_if_whole(data: bytes) -> str | bytes:
    try:
        return data.decode()
    except UnicodeDecodeError:
        return data


class Speller(Protocol):
    def __call__(self, token: str) -> str | bytes: ...


def _sentencepiece_speller(parts: list[dict[str, Any]]) -> Speller:
    replacements = [
        (part["pattern"]["String"], part["content"]) for part in parts if part["type"] == "Replace"
    ]
    has_bytes = any(part["type"] == "ByteFallback" for part in parts)

    def spell(token: str) -> str | bytes:
        if has_bytes and len(token) == 6 and token.startswith("<0x") and token.endswith(">"):
            return bytes([int(token[3:5], 16)])
        for old, new in replacements:
            token = token.replace(old, new)
        return token

    return spell


class TextDecoder:
    """One answer's ids to text: the parts joined are the tokenizer's decode of all ids.

    is_whole: the ids are a text of their own, so its first space may fall away; else they go on
    from a text that came before. token_start: where the text of the last id begins, in characters.
    """

    def __init__(
        self,
        vocabulary: Vocabulary,
        *,
        is_whole: bool,
        shows_special: bool = False,
        shown: Mapping[int, str] | None = None,
    ) -> None:
        """shown: special tokens to show, id -> text, where not all of them are."""
        self._shown = shown or {}
        self._pieces = vocabulary.all_pieces if shows_special else vocabulary.pieces
        self._run: ByteRun = vocabulary.new_run()
        self._is_in_run = False
        self._num_to_strip = vocabulary.num_stripped if is_whole else 0
        self._num_chars = 0
        self.token_start = 0

    def feed(self, token_id: int) -> str:
        """The text that is certain now; empty where the id only adds a part of a character."""
        self.token_start = self._num_chars
        piece = self._pieces.get(token_id) or self._shown.get(token_id)
        if piece is None:
            return ""
        if isinstance(piece, bytes):
            self._is_in_run = True
            text = self._run.feed(piece)
        elif self._is_in_run:
            self._is_in_run = False
            rest = self._run.end()
            self.token_start += len(rest)
            text = rest + piece
        else:
            text = piece
        if self._num_to_strip and text:
            text = self._strip(text)
        self._num_chars += len(text)
        return text

    def end(self) -> str:
        text = self._run.end()
        return self._strip(text) if self._num_to_strip else text

    def _strip(self, text: str) -> str:
        while self._num_to_strip and text:
            if text[0] != " ":
                self._num_to_strip = 0
            else:
                self._num_to_strip -= 1
                text = text[1:]
        return text


class StopStrings:
    """A request's stop strings, with their failure tables. Source: Knuth, Morris, Pratt 1977."""

    def __init__(self, strings: Iterable[str]) -> None:
        self.strings = tuple(strings)
        self.tables = tuple(_failure_table(string) for string in self.strings)
        self.first_chars = frozenset(string[0] for string in self.strings)


def _failure_table(pattern: str) -> list[int]:
    """For each length k: the longest proper prefix that ends the first k characters."""
    table = [0] * (len(pattern) + 1)
    k = 0
    for i in range(1, len(pattern)):
        while k and pattern[i] != pattern[k]:
            k = table[k]
        k += pattern[i] == pattern[k]
        table[i + 1] = k
    return table


class StopScanner:
    """Lets text through until a stop string is complete; keeps back what may become one.

    The first to be complete ends the text, and of those that end together the longest; so the
    result does not depend on how the text was cut into parts. Each character is looked at once.
    """

    def __init__(self, stops: StopStrings, *, includes_stop: bool) -> None:
        self._stops = stops
        self._includes_stop = includes_stop
        self._matched = [0] * len(stops.strings)  # characters of each that the text ends with
        self._held = ""
        self.stop: str | None = None  # the stop string that ended the text

    @property
    def has_stopped(self) -> bool:
        return self.stop is not None

    def feed(self, text: str) -> str:
        """The text that may be sent. After a stop string nothing more comes."""
        if not self._held and self._stops.first_chars.isdisjoint(text):
            return text
        text, start = self._held + text, len(self._held)
        for i in range(start, len(text)):
            if num_stop := self._advance(text[i]):
                self.stop, self._held = text[i + 1 - num_stop : i + 1], ""
                return text[: i + 1 if self._includes_stop else i + 1 - num_stop]
        num_held = max(self._matched)
        self._held = text[len(text) - num_held :]
        return text[: len(text) - num_held]

    def end(self) -> str:
        """No more text comes: what was kept back."""
        held, self._held = self._held, ""
        return held

    def _advance(self, char: str) -> int:
        """Takes one character in; the length of the longest stop string complete with it, or 0."""
        longest = 0
        for i, string in enumerate(self._stops.strings):
            table = self._stops.tables[i]
            k = self._matched[i]
            while k and string[k] != char:
                k = table[k]
            k += string[k] == char
            self._matched[i] = k
            if k == len(string):
                longest = max(longest, k)
        return longest
