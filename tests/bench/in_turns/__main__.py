"""`python -m tests.bench.in_turns`."""

import sys

from tests.bench.in_turns.command import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
