"""The key by which a router compares requests: digests of a prompt, or of a conversation."""

import json
import struct
from collections.abc import Sequence
from typing import Any

from penstock.scheduler.errors import PenstockError
from penstock.scheduler.routing import prefix_digests
from penstock.server.prompt.prompts import render_chat
from penstock.server.prompt.timed_template import TemplateTooSlow
from penstock.server.prompt.tokenizer import ChatTemplate, PromptEncoder
from penstock.server.protocol.chat import ChatCompletionRequest

# Tokenizing blocks the router for so long at most: some 10 ms. What follows is not compared.
_MAX_CHARS = 64 << 10
_MAX_TEMPLATE_S = 0.02


def conversation_digests(conversation: str) -> list[bytes]:
    """One, which is equal for all requests of a conversation that has an id."""
    return prefix_digests([0] * 64, salt=f"conversation {conversation}")


def body_digests(body: bytes, encoder: PromptEncoder) -> list[bytes]:
    """None for a body that has no prompt, or that the replica will refuse."""
    try:
        fields = json.loads(body)
        token_ids = _token_ids(fields, encoder)
        return prefix_digests(token_ids, salt=str(fields.get("cache_salt") or ""))
    # Fields may have any type here. What is wrong with them, the replica says.
    except (AttributeError, LookupError, TypeError, ValueError, ArithmeticError, struct.error):
        return []
    except (PenstockError, TemplateTooSlow):
        return []


def _token_ids(fields: dict[str, Any], encoder: PromptEncoder) -> Sequence[int]:
    """Raises what a malformed body raises."""
    if "messages" in fields:
        chat = ChatCompletionRequest.model_validate(fields)
        template = encoder.chat_template(has_tools=bool(chat.usable_tools))
        if not isinstance(template, ChatTemplate):
            return ()
        text, _ = render_chat(chat, template, _MAX_TEMPLATE_S)
        return encoder.encode(text[:_MAX_CHARS], add_special_tokens=False)
    prompt = fields.get("prompt") or ()
    if isinstance(prompt, list) and prompt and not isinstance(prompt[0], int):
        prompt = prompt[0]  # of several, the first
    if isinstance(prompt, str):
        return encoder.encode(prompt[:_MAX_CHARS])
    return prompt
