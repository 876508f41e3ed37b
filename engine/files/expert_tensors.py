"""One expert's tensors, of checkpoints that have those of all experts of a layer in one.

Elsewhere each has its own: `mlp.experts.3.gate_proj.weight`. Newer files have
`mlp.experts.gate_up_proj` (experts, rows of gate and then of up, columns), and `down_proj` as well.
gpt-oss, which has biases (`gate_up_proj_bias`, `down_proj_bias`), has columns before rows, and gate
and up take turns; its codes of 4 bits (`gate_up_proj_blocks`, `gate_up_proj_scales`) have rows
first again.
"""

import re
from collections.abc import Callable, Container
from typing import NamedTuple

from torch import Tensor

_EXPERT_NAME = re.compile(
    r"(?P<experts>.*\.experts)\.(?P<index>\d+)\.(?P<part>gate|up|down)_proj\.(?P<kind>\w+)"
)
# Ends of a stack's name, by what a tensor of one expert is called.
_ENDS = {"weight": "", "bias": "_bias", "blocks": "_blocks", "scales": "_scales"}


class Stack(NamedTuple):
    """name: of the tensor of all experts. take: one expert's part of it; a view. Raises IndexError
    where the stack has no such expert."""

    name: str
    take: Callable[[Tensor], Tensor]


def stack_of(name: str, names: Container[str]) -> Stack | None:
    """name: of one expert's tensor. names: what the checkpoint has. None for other tensors."""
    found = _EXPERT_NAME.fullmatch(name)
    if found is None or found["kind"] not in _ENDS:
        return None
    index, part, kind = int(found["index"]), found["part"], found["kind"]
    stacked = f"{found['experts']}.{'down' if part == 'down' else 'gate_up'}_proj{_ENDS[kind]}"
    if stacked not in names:
        return None
    take_turns = f"{found['experts']}.gate_up_proj_bias" in names

    def take(stack: Tensor) -> Tensor:
        expert = stack[index]
        if take_turns and kind == "weight":
            expert = expert.t()
        if kind == "blocks":
            expert = expert.flatten(1)
        if part == "down":
            return expert
        if take_turns:
            return expert[(1 if part == "up" else 0) :: 2]
        half = len(expert) // 2
        return expert[half:] if part == "up" else expert[:half]

    return Stack(stacked, take)
