"""Triton kernels of a step, one subject a file; those of attention are in `attention.paged`.

They know tensors, and neither models nor requests. Each is tested against plain torch, in Triton's
interpreter if there is no GPU; and all are compiled for the supported GPUs, which needs none.
"""
