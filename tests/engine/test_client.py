"""engine/client.py: every name in `__all__` exists, and importing it loads nothing that is slow."""

import subprocess
import sys

from penstock.engine import client

SLOW = ("torch", "numpy", "transformers", "llguidance", "tokenizers", "huggingface_hub")


def test_every_name_in_all_exists() -> None:
    assert [name for name in client.__all__ if not hasattr(client, name)] == []
    assert len(set(client.__all__)) == len(client.__all__)


def test_the_command_line_imports_the_client_and_loads_nothing_slow() -> None:
    program = (
        "import sys\nimport penstock.server.command_line.cli\n"
        "assert 'penstock.engine.client' in sys.modules\n"
        f"print([name for name in {SLOW} if name in sys.modules])"
    )
    found = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert found.stdout.strip() == "[]", found.stdout + found.stderr


def test_the_whole_server_loads_no_torch() -> None:
    program = "import sys\nimport penstock.server.app\nprint('torch' in sys.modules)"
    found = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert found.stdout.strip() == "False", found.stdout + found.stderr
