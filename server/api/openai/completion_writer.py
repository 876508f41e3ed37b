"""The answers of `/v1/completions`."""

from collections.abc import Sequence
from itertools import chain
from typing import Any, ClassVar

import msgspec

from penstock.server.api.openai.writer import OpenAIWriter, encode
from penstock.server.output.delta import LogprobEntry, OutputDelta
from penstock.server.output.logprobs import EchoedToken, EchoedTokens, finite


class CompletionWriter(OpenAIWriter):
    object = "text_completion"
    chunk_object = "text_completion"
    ends_with_text = True
    opening = None
    closing: ClassVar = {"text": "", "logprobs": None}
    around_text = b'"text":', b""

    def _choice(self, delta: OutputDelta) -> dict[str, Any]:
        choice = {
            "index": delta.choice,
            "text": delta.text,
            "logprobs": None,
            **self._ending(delta),
            "prompt_logprobs": None,
            "prompt_token_ids": None,
            "token_ids": None,
        }
        if self._fields.num_logprobs is not None:
            choice["logprobs"] = self._logprobs(delta.logprobs, delta.echoed)
        return choice | self._delta_extras(delta, is_first=True)

    def _delta_extras(self, delta: OutputDelta, is_first: bool) -> dict[str, Any]:
        if not self._prompt_ids:
            return {}
        prompt = {"prompt_token_ids": self._prompt_ids[delta.choice]} if is_first else {}
        return prompt | {"token_ids": delta.token_ids}

    def _add_prompt_logprobs(self, body: dict[str, Any], prompts: list[msgspec.Raw]) -> None:
        for choice in body["choices"]:
            choice["prompt_logprobs"] = prompts[choice["index"] // self._n]

    def _logprobs(
        self, entries: list[LogprobEntry], echoed: EchoedTokens | None = None
    ) -> dict[str, Any]:
        """Those of the prompt, if it is echoed, and of the answer as one list."""
        if echoed is None:
            return self._columns(entries)
        written: dict[str, list[bytes]] = {}
        for tokens in chain[Sequence[LogprobEntry | EchoedToken]](echoed.slices(), [entries]):
            for name, column in self._columns(tokens).items():
                written.setdefault(name, []).append(encode(column))
        return {name: self._long_lists.add(parts) for name, parts in written.items()}

    def _columns(self, tokens: Sequence[LogprobEntry | EchoedToken]) -> dict[str, list[Any]]:
        return {
            "text_offset": [token.offset for token in tokens],
            "token_logprobs": [
                finite(token.logprobs.logprob) if token.logprobs else None for token in tokens
            ],
            "tokens": [self._token_name(token.token_id) for token in tokens],
            "top_logprobs": [self._top(token) for token in tokens],
        }

    def _part_events(self, delta: OutputDelta) -> bytes:
        raise AssertionError("a completion is plain text")

    def _top(self, token: LogprobEntry | EchoedToken) -> dict[str, float] | None:
        """The best tokens, and the token itself besides, as at OpenAI."""
        if token.logprobs is None:
            return None
        best = token.logprobs.top[: self._fields.num_logprobs]
        top: dict[str, float] = {}
        for token_id, logprob in (*best, (token.token_id, token.logprobs.logprob)):
            # Halves of characters may be spelled alike: the best one stays, as clients that take
            # the maximum expect.
            top.setdefault(self._token_name(token_id), finite(logprob))
        return top
