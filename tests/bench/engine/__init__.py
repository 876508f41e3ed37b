"""Times kernels and steps against what the hardware can do: `python -m tests.bench.engine PART`.

`__main__` lists the parts. Each prints its results as one JSON object per line, and
`python -m tests.bench.gpu.suite` runs the parts for a GPU one after another.
"""
