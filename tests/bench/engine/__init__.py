"""Times kernels and steps against what the hardware can do: `python -m tests.bench.engine PART`.

`__main__` says which parts there are. Each prints one JSON object a line for what it measured, and
`python -m tests.bench.gpu.suite` runs those of a GPU one after the other.
"""
