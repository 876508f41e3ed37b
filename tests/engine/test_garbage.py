"""What is imported at a start is not collected meanwhile, nor walked later."""

import subprocess
import sys

PROGRAM = """
import gc, sys
from penstock.engine.process.garbage import importing, uncollected
runs = []
gc.callbacks.append(lambda phase, info: runs.append(info["generation"]))
with importing():
    import asyncio, email.message, http.client
assert not runs, runs
assert gc.isenabled() and gc.get_freeze_count() > 1000
gc.disable()
with uncollected():
    pass
assert not gc.isenabled()
"""


def test_imports_are_neither_interrupted_by_collections_nor_walked_by_later_ones() -> None:
    found = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True)
    assert not found.stderr


def test_a_start_imports_torch_without_collections() -> None:
    program = (
        "import gc, sys\nruns = []\n"
        "gc.callbacks.append(lambda phase, info: runs.append('torch' in sys.modules))\n"
        "from penstock.engine.loading.executor import build_executor\n"
        "from penstock.engine.process.phases import Phases\n"
        "from penstock.engine.config import EngineConfig\n"
        "try:\n    build_executor(EngineConfig(model='/nowhere'), Phases())\n"
        "except Exception as error:\n    assert 'nowhere' in str(error), error\n"
        # One may come with the error, after the imports. Without `importing` they are hundreds.
        "assert 'torch' in sys.modules and sum(runs) <= 4, sum(runs)\n"
    )
    found = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert not found.stderr
