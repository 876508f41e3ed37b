"""The check at each start: two short sequences in chunks, beside each other, must have the logits
that the class's own attention has for each as a whole.

It finds what the class keeps of earlier tokens besides keys and values: the state of a recurrence
or a convolution, keys shared between layers, tables of blocks. The computing is in float32,
whatever the weights' type, so that rounding does not hide or feign a difference.
"""

from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map

from penstock.engine.memory.pool.kv_pool import KVPool
from penstock.engine.models.fallback.attention import PAGED
from penstock.engine.models.fallback.model import TransformersModel
from penstock.engine.models.fallback.source import UnsupportedClass, calling
from penstock.engine.step.model_input import build_model_input
from penstock.scheduler.types import ScheduledBatch

# Each step has so many tokens of the first sequence, and of the second.
_STEPS = ((7, 0), (1, 9), (1, 1), (16, 1), (0, 6), (2, 1), (1, 1), (1, 3))
_BLOCK_SIZE = 8
# Bounds the error of a token's logits, relative to how much they vary. Float32 gives some 1e-6.
_TOLERANCE = 1e-3
_HALVES = (torch.bfloat16, torch.float16)


def check_model(model: TransformersModel, vocab_size: int, max_model_len: int) -> None:
    """Raises UnsupportedClass."""
    generator = torch.Generator().manual_seed(0)
    lengths = [min(sum(counts), max_model_len) for counts in zip(*_STEPS, strict=True)]
    prompts = [torch.randint(vocab_size, (each,), generator=generator) for each in lengths]
    network = model.network
    experts = network.config._experts_implementation
    network.set_experts_implementation("eager")  # others may not have float32
    with calling(model.architecture), _InFloat32():  # type: ignore[no-untyped-call]
        paged = _in_chunks(model, prompts)
        whole = [_whole(network, prompt) for prompt in prompts]
    network.set_experts_implementation(experts)
    for found, expected in zip(paged, whole, strict=True):
        wrong = (found - expected).norm(dim=1)
        varies = (expected - expected.mean(1, keepdim=True)).norm(dim=1)
        if not bool((wrong <= _TOLERANCE * varies).all()):
            row = int((wrong / varies).nan_to_num(torch.inf).argmax())
            raise UnsupportedClass(
                model.architecture,
                "in chunks, over paged keys and values, its logits are not those of the whole "
                f"prompt (they differ by {float(wrong[row] / varies[row]):.1g} of their spread at "
                f"position {row}): it keeps more of earlier tokens than the keys and values of "
                "its layers",
            )


def _whole(network: Any, prompt: Tensor) -> Tensor:
    """The class's logits of all tokens, by its own attention."""
    network.set_attn_implementation("eager")
    ids = prompt[None].to(network.device)
    logits: Tensor = network(input_ids=ids, use_cache=False).logits[0]
    network.set_attn_implementation(PAGED)
    return logits.float().cpu()


def _in_chunks(model: TransformersModel, prompts: list[Tensor]) -> list[Tensor]:
    blocks_each = max(-(-len(prompt) // _BLOCK_SIZE) for prompt in prompts)
    # Neither sequence's blocks are next to each other.
    tables = torch.arange(2 * blocks_each, dtype=torch.int32).view(-1, 2).T.flip(1)
    device = model.network.device
    pool = KVPool(model.kv_shape, 2 * blocks_each, _BLOCK_SIZE, torch.float32, device)
    tokens = pad_sequence(prompts, batch_first=True)
    done = [0, 0]
    logits: list[list[Tensor]] = [[], []]
    for counts in _STEPS:
        own = [min(counts[i], len(prompt) - done[i]) for i, prompt in enumerate(prompts)]
        slots = tuple(i for i, count in enumerate(own) if count)
        if not slots:
            continue
        batch = ScheduledBatch(
            step=0,
            assignments=(),
            table_updates=(),
            copies=(),
            slots=slots,
            starts=tuple(done[i] for i in slots),
            num_tokens=tuple(own[i] for i in slots),
            samples=(True,) * len(slots),
            num_decodes=0,
        )
        step = build_model_input(batch, tokens, tables, _BLOCK_SIZE)
        states = model.states(step, pool, torch.arange(len(step.token_ids)))
        parts = torch.split(model.logits(states), list(batch.num_tokens))
        for i, part in zip(slots, parts, strict=True):
            logits[i].append(part)
            done[i] += own[i]
    return [torch.cat(each) for each in logits]


class _InFloat32(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """All operations inside are computed in float32 where they would be in half of it. Weights are
    widened for each operation, and stay as they are."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*tree_map(_widened, args), **tree_map(_widened, kwargs or {}))


def _widened(value: Any) -> Any:
    if isinstance(value, Tensor) and value.dtype in _HALVES:
        return value.float()
    return torch.float32 if value in _HALVES else value
