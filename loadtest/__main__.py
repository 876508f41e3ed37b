"""`python -m penstock.loadtest` is `penstock bench`."""

import sys

from penstock.loadtest.bench.cli import main

sys.exit(main(sys.argv[1:]))
