"""A file of conversations in ShareGPT's form."""

import json
from pathlib import Path

QUESTION = "What does a scheduler of a language model server do? "
ANSWER = "It decides who runs in the next step, and who has to wait. "


def sharegpt(path: Path, num: int = 12) -> Path:
    """Conversations of known lengths; the last one is longer than vLLM asks."""
    turns = [(f"{number}. {QUESTION}", ANSWER * (number % 12 + 1)) for number in range(num)]
    turns.append((QUESTION * 600, ANSWER))
    path.write_text(json.dumps([{"conversations": [{"value": q}, {"value": a}]} for q, a in turns]))
    return path
