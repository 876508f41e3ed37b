"""What ranks that have a part of every layer add up."""

import torch
from torch import Tensor

from penstock.engine.ranks.group import Group


def summed(group: Group | None, tensor: Tensor) -> Tensor:
    """The sum of what all ranks have; in float32, where that of a type is not known to a group."""
    if group is None:
        return tensor
    wide = tensor.float() if tensor.dtype is torch.float16 else tensor
    group.all_reduce(wide)
    return wide.to(tensor.dtype)
