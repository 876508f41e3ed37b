"""engine/client.py says what each of its names is, and importing it loads nothing that is slow."""

import re
import subprocess
import sys
from pathlib import Path

from penstock.engine import client
from tests.support.paths import DEMO_MODEL, ROOT

SLOW = ("torch", "numpy", "transformers", "llguidance", "tokenizers", "huggingface_hub")


def test_what_the_server_imports_is_there_with_a_comment_or_a_docstring() -> None:
    source = Path(client.__file__).read_text()
    imports = r"^from penstock\.engine\.client import (?:\(([^)]*)\)|([^(\n]*))$"
    found = [
        name.strip().partition(" as ")[0]
        for path in (ROOT / "server").rglob("*.py")
        for groups in re.findall(imports, path.read_text(), re.MULTILINE)
        for name in re.sub("#.*", "", "".join(groups)).split(",")
        if name.strip()
    ]
    assert len(set(found)) > 30
    for name in set(found):
        is_told = re.search(rf"\b{name}\b,?  # \w", source)
        assert is_told or getattr(client, name).__doc__, name


def test_the_command_line_imports_the_client_and_loads_nothing_slow() -> None:
    program = (
        "import sys\nimport penstock.server.command_line.cli\n"
        "assert 'penstock.engine.client' in sys.modules\n"
        f"print([name for name in {SLOW} if name in sys.modules])"
    )
    found = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert found.stdout.strip() == "[]", found.stdout + found.stderr


def test_a_server_of_a_directory_loads_neither_torch_nor_the_hubs_client() -> None:
    program = (
        "import sys\nimport penstock.server.app\n"
        "from penstock.engine.client import EngineConfig, open_model\n"
        f"open_model(EngineConfig(model={str(DEMO_MODEL)!r}))\n"
        "print([name for name in ('torch', 'huggingface_hub') if name in sys.modules])"
    )
    found = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert found.stdout.strip() == "[]", found.stdout + found.stderr
