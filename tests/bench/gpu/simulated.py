"""`python -m tests.bench.gpu.simulated KIND RUNG`: a process that ends as one on a GPU may.

`--simulate RUNG=KIND` of the suite runs it in place of the rung, or of the part, of that name.
"""

import json
import os
import signal
import sys
import time

KINDS = ("pass", "hang", "late", "refusal", "abort", "wrong")
# Longer than a rung may take at a patience of 0.1, and less than twice as long.
_LATE_S = 3.5


def main(kind: str, name: str) -> int:
    environment = {"PENSTOCK_PDL": os.environ.get("PENSTOCK_PDL"), "flags": sys.argv[3:]}
    row = {"part": "probe", "rung": name, "is_right": kind != "wrong", "simulated": environment}
    if kind == "late":
        time.sleep(_LATE_S)
    if kind in ("pass", "late", "wrong"):
        print(json.dumps(row), flush=True)
        return 0
    if kind == "hang":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        print(f"process {os.getpid()} is waiting for the device", file=sys.stderr, flush=True)
        time.sleep(3600)
    if kind == "refusal":
        message = "CUDA error: operation not permitted when stream is capturing"
        print(f"torch.AcceleratorError: {message}", file=sys.stderr, flush=True)
        return 1
    print("CUDA error: an illegal memory access was encountered", file=sys.stderr, flush=True)
    os.abort()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], sys.argv[2]))
