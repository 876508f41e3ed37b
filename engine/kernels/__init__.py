"""Triton kernels of a step, one idea a file. `penstock.engine.attention.paged` has the other two.

Each is tested against plain torch: by Triton's interpreter where there is no GPU, on the device
where there is one; and all are compiled for the GPUs that we name, which needs none.
"""
