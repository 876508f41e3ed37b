"""The types that `--dtype` and `--kv-cache-dtype` name, as torch has them."""

import torch

from penstock.engine.config import Dtype, KVCacheDtype

# All but auto.
TORCH_DTYPES = {
    Dtype.FLOAT32: torch.float32,
    Dtype.FLOAT: torch.float32,
    Dtype.BFLOAT16: torch.bfloat16,
    Dtype.FLOAT16: torch.float16,
    Dtype.HALF: torch.float16,
}
_KV_DTYPES = {KVCacheDtype.INT8: torch.int8, KVCacheDtype.FP8: torch.float8_e4m3fn}


def kv_dtype(wanted: KVCacheDtype, dtype: torch.dtype) -> torch.dtype:
    """The type of the elements in the KV cache. dtype: of the model."""
    return _KV_DTYPES.get(wanted, dtype)
