"""Incremental detokenization: never half a character, and never the beginning of a stop string.

`Vocabulary` knows the text of each id, a `TextDecoder` joins these texts, and a `StopScanner`
searches the result for stop strings.

Why not the `DecodeStream` of tokenizers: it raises "Invalid prefix encountered" when a byte that
belongs to no character follows a complete one, and costs 1.5 us per token. Why not two offsets into
a sliding `decode`, as usual: that is two decodes per token, and differs from the full decode after
such a byte. A table with the text of each id is exact for the two kinds of decoder that language
models have.
"""

import codecs
import json
import re
from collections.abc import Callable, Collection, Iterable, Mapping
from functools import lru_cache, partial
from typing import Any

from tokenizers import Tokenizer

from penstock.scheduler.errors import InvalidConfig

REPLACEMENT = "\N{REPLACEMENT CHARACTER}"


class FallbackDecoder(codecs.IncrementalDecoder):
    """Sentencepiece's byte fallback: tokenizers decodes a run of bytes as a whole, at its end. One
    invalid byte turns every byte of its run into U+FFFD, complete characters too."""

    def __init__(self) -> None:
        super().__init__()
        self._data = bytearray()

    def decode(self, data: Any, final: bool = False) -> str:
        self._data += data
        if not final:
            return ""
        try:
            return self._data.decode()
        except UnicodeDecodeError:
            return REPLACEMENT * len(self._data)
        finally:
            self._data = bytearray()


_MAX_REMEMBERED = 64  # texts that tokens contain


def _ids_containing(pieces: Mapping[int, str | bytes], text: str) -> tuple[int, ...]:
    return tuple(i for i, piece in pieces.items() if isinstance(piece, str) and text in piece)


class Vocabulary:
    """The text that each id of a tokenizer adds.

    pieces: id -> text, or bytes that may be part of a character. Ids that add nothing (special
    tokens, padding of the model's vocabulary) are missing. num_stripped: how many spaces are
    dropped at the beginning of a text.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        """Raises InvalidConfig unless the decoder is byte-level or sentencepiece's."""
        parts = _decoder_parts(tokenizer)
        kinds = [part["type"] for part in parts]
        self.num_stripped = 0
        self.make_decoder: Callable[[], codecs.IncrementalDecoder] = FallbackDecoder
        if kinds == ["ByteLevel"]:
            # It returns each character as soon as it is complete.
            self.make_decoder = partial(codecs.getincrementaldecoder("utf-8"), "replace")
            spell: Callable[[str], str | bytes] = _spell_byte_level
        elif set(kinds) <= {"Replace", "ByteFallback", "Fuse", "Strip"} and _is_fused(kinds):
            spell = _sentencepiece_speller(parts)
            self.num_stripped = sum(part["start"] for part in parts if part["type"] == "Strip")
        else:
            raise InvalidConfig(
                f"this tokenizer's decoder is {' + '.join(kinds) or 'missing'}; penstock supports "
                "byte-level BPE and sentencepiece tokenizers"
            )
        added = tokenizer.get_added_tokens_decoder()
        self._special = {i: token.content for i, token in added.items() if token.special}
        self.pieces: dict[int, str | bytes] = {}
        for token, token_id in tokenizer.get_vocab(with_added_tokens=True).items():
            piece = spell(token)
            if piece and token_id not in self._special:
                self.pieces[token_id] = piece
        self._containing = lru_cache(_MAX_REMEMBERED)(partial(_ids_containing, self.pieces))
        # With special tokens, for skip_special_tokens: false.
        self.all_pieces: dict[int, str | bytes] = {**self.pieces, **self._special}

    def spelling(self, token_id: int) -> bytes:
        """The bytes of a single token, for logprobs; of a special token, its name."""
        piece = self.pieces.get(token_id) or self._special.get(token_id, "")
        return piece if isinstance(piece, bytes) else piece.encode()

    def is_special(self, token_id: int) -> bool:
        return token_id in self._special

    def special_among(self, texts: Collection[str]) -> dict[int, str]:
        """The special tokens whose text is one of these: id -> text."""
        return {i: text for i, text in self._special.items() if text in texts}

    def ids_containing(self, text: str) -> tuple[int, ...]:
        """Of the tokens whose text contains it. The last few texts are remembered."""
        return self._containing(text)

    def text_of(self, token_ids: Iterable[int], *, shows_special: bool = False) -> str:
        """The text of all ids, which begin a text."""
        decoder = TextDecoder(self, is_whole=True, shows_special=shows_special)
        return "".join([*map(decoder.feed, token_ids), decoder.end()])


def _decoder_parts(tokenizer: Tokenizer) -> list[dict[str, Any]]:
    if tokenizer.decoder is None:
        return []
    spec: dict[str, Any] = json.loads(tokenizer.decoder.__getstate__())
    return spec["decoders"] if spec["type"] == "Sequence" else [spec]


def _is_fused(kinds: list[str]) -> bool:
    """Whether a Strip applies to the whole text, and not to every token."""
    return "Strip" not in kinds or "Fuse" in kinds[: kinds.index("Strip")]


@lru_cache(maxsize=1)
def _byte_alphabet() -> dict[int, str]:
    """GPT-2's characters for bytes: code point -> the byte as a latin-1 character. Source: Radford
    et al. 2019, `bytes_to_unicode`."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = [byte for byte in range(256) if byte not in printable]
    code_points = {byte: byte for byte in printable} | {b: 256 + i for i, b in enumerate(others)}
    return {code_point: chr(byte) for byte, code_point in code_points.items()}


def _spell_byte_level(token: str) -> str | bytes:
    alphabet = _byte_alphabet()
    if not all(ord(char) in alphabet for char in token):
        return token  # an added token, spelled literally
    return _text_if_complete(token.translate(alphabet).encode("latin-1"))


def _text_if_complete(data: bytes) -> str | bytes:
    try:
        return data.decode()
    except UnicodeDecodeError:
        return data


_BYTE = re.compile(r"<0x([\dA-Fa-f]{2})>", re.ASCII)


def _sentencepiece_speller(parts: list[dict[str, Any]]) -> Callable[[str], str | bytes]:
    replacements = [
        (part["pattern"]["String"], part["content"]) for part in parts if part["type"] == "Replace"
    ]
    has_bytes = any(part["type"] == "ByteFallback" for part in parts)

    def spell(token: str) -> str | bytes:
        if has_bytes and (byte := _BYTE.fullmatch(token)):
            return bytes.fromhex(byte[1])
        for old, new in replacements:
            token = token.replace(old, new)
        return token

    return spell


class TextDecoder:
    """Decodes the ids of one answer: the returned texts joined are the tokenizer's decode of all.

    is_whole: the ids begin a text, whose first space may be dropped; else they continue a text.
    token_start: where the text of the last id begins, in characters.
    """

    def __init__(
        self,
        vocabulary: Vocabulary,
        *,
        is_whole: bool,
        shows_special: bool = False,
        shown: Mapping[int, str] | None = None,
    ) -> None:
        """shown: special tokens to include, id -> text, if not all of them are."""
        self._shown = shown or {}
        self._pieces = vocabulary.all_pieces if shows_special else vocabulary.pieces
        self._bytes = vocabulary.make_decoder()
        self._is_in_run = False
        self._num_to_strip = vocabulary.num_stripped if is_whole else 0
        self._num_chars = 0
        self.token_start = 0

    def feed(self, token_id: int) -> str:
        """The text that is certain now; empty if the id only adds a part of a character."""
        self.token_start = self._num_chars
        piece = self._pieces.get(token_id) or self._shown.get(token_id)
        if piece is None:
            return ""
        if isinstance(piece, bytes):
            self._is_in_run = True
            text = self._bytes.decode(piece)
        elif self._is_in_run:
            self._is_in_run = False
            rest = self._bytes.decode(b"", final=True)
            self.token_start += len(rest)
            text = rest + piece
        else:
            text = piece
        if self._num_to_strip and text:
            text = self._strip(text)
        self._num_chars += len(text)
        return text

    def end(self) -> str:
        text = self._bytes.decode(b"", final=True)
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
    """For each length k: the length of the longest proper prefix that ends the first k."""
    table = [0] * (len(pattern) + 1)
    k = 0
    for i in range(1, len(pattern)):
        while k and pattern[i] != pattern[k]:
            k = table[k]
        k += pattern[i] == pattern[k]
        table[i + 1] = k
    return table


class StopScanner:
    """Passes text on until a stop string is complete; holds back what may become one.

    The first stop string to be complete ends the text, the longest one if several end together; so
    the result does not depend on how the text was divided. Each character is examined once.
    """

    def __init__(self, stops: StopStrings, *, includes_stop: bool) -> None:
        self._stops = stops
        self._includes_stop = includes_stop
        self._matched = [0] * len(stops.strings)  # of each, how many characters the text ends with
        self._held = ""
        self.stop: str | None = None  # the stop string that ended the text

    def feed(self, text: str) -> str:
        """The text that may be sent. Not to be called after a stop string."""
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
        """The answer has ended: the text that was held back."""
        held, self._held = self._held, ""
        return held

    def _advance(self, char: str) -> int:
        """Reads one character; the length of the longest stop string that it completes, or 0."""
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
