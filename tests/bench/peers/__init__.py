"""The other servers that Penstock is compared with on a CPU: their installation, models for them
to serve, and the comparison.

`python -m tests.bench.peers --help`. Their environments are in `build/peers`, apart from each other
and from Penstock's.
"""
