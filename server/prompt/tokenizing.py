"""One text to token ids, by the tokenizers library, whose failures become errors of the request."""

import asyncio

from tokenizers import Encoding, Tokenizer

from penstock.server.errors import InvalidRequest


def ids_of(tokenizer: Tokenizer, text: str, *, add_special_tokens: bool) -> tuple[int, ...]:
    """Raises InvalidRequest for a text that the tokenizer gives up on.

    No other thread runs while the ids become Python's: 25 ms for 2^18 of them.
    """
    return tuple(_encoding(tokenizer, text, add_special_tokens=add_special_tokens).ids)


def count_of(tokenizer: Tokenizer, text: str) -> int:
    """Without special tokens around it. Raises as `ids_of` does."""
    return len(_encoding(tokenizer, text, add_special_tokens=False))


def _encoding(tokenizer: Tokenizer, text: str, *, add_special_tokens: bool) -> Encoding:
    """Raises InvalidRequest for a text that the tokenizer gives up on.

    Its regex engine gives up on millions of spaces, for example with Llama 3's rules, and the
    library then panics: that is a BaseException, which is no Exception.
    """
    try:
        # It releases the interpreter lock: with `encode` all streams would wait for a long text.
        encodings = tokenizer.encode_batch_fast([text], add_special_tokens=add_special_tokens)
    except (asyncio.CancelledError, KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:
        raise InvalidRequest(
            f"this model's tokenizer cannot read the text: {str(error)[:200]}; break up very long "
            "runs of spaces or of other characters"
        ) from error
    return encodings[0]
