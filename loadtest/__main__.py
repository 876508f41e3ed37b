"""`python -m loadtest` is `penstock bench`."""

import sys

from loadtest.cli import main

sys.exit(main(sys.argv[1:]))
