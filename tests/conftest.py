"""What every test needs: threads that do not fight over the cores, and examples that repeat."""

import os

# Before torch is imported anywhere: two spinning threads on busy cores slow everything tenfold.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

from hypothesis import settings

settings.register_profile("penstock", deadline=None, derandomize=True, print_blob=True)
settings.load_profile("penstock")
