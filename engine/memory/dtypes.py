"""The types that `--dtype` names, as torch has them."""

import torch

from penstock.engine.config import Dtype

# All but auto.
TORCH_DTYPES = {
    Dtype.FLOAT32: torch.float32,
    Dtype.FLOAT: torch.float32,
    Dtype.BFLOAT16: torch.bfloat16,
    Dtype.FLOAT16: torch.float16,
    Dtype.HALF: torch.float16,
}
