"""`python -m tests.clients [NAME...]`: installs each client from its registry and runs its file.

A client's file tests the usual calls and states what the client requires that others do not. The
environments are in `build/clients`; delete them to get newer versions. Three servers run: the demo
model, scripted tokens, and scripted tokens with an API key.
"""

import contextlib
import filecmp
import os
import re
import shutil
import subprocess
import sys
import venv
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tests.support.paths import ROOT
from tests.support.serving import RunningServer

HERE = Path(__file__).parent
BUILD = ROOT / "build" / "clients"
_TIMEOUT_S = 900.0  # each of the load generators' runs starts a dozen processes
# huggingface_hub's client asks for `dummy` if it is given no model; llm has names of embeddings.
_NAMES = ("penstock-demo", "dummy", "text-embedding-3-small")
_NO_NODE = "node and npm are not installed (Debian: apt-get install nodejs npm)"


@dataclass(frozen=True, slots=True)
class Client:
    """file: its tests, beside this module. home: its environment; `node` for JavaScript.

    Each framework has its own environment, because their newest versions conflict.
    """

    package: str
    file: str
    home: str


CLIENTS = (
    Client("openai", "openai_python.py", "sdk"),
    Client("anthropic", "anthropic_python.py", "sdk"),
    Client("cohere", "cohere_python.py", "cohere"),
    Client("langchain-openai", "langchain_chat.py", "langchain"),
    Client("litellm", "litellm_calls.py", "litellm"),
    Client("instructor", "instructor_modes.py", "instructor"),
    Client("llama-index-llms-openai-like", "llama_index_like.py", "llama_index"),
    Client("huggingface_hub", "hugging_face.py", "huggingface_hub"),
    Client("llm", "llm_cli.py", "llm"),
    Client("guidellm", "guidellm_runs.py", "guidellm"),
    Client("aiperf", "aiperf_runs.py", "aiperf"),
    Client("openai", "openai_js.mjs", "node"),
    Client("@anthropic-ai/sdk", "anthropic_js.mjs", "node"),
    Client("@ai-sdk/openai-compatible", "vercel_ai.mjs", "node"),
    Client("opencode-ai", "opencode.mjs", "node"),
)


@dataclass(frozen=True, slots=True)
class Outcome:
    num_passed: int
    num_failed: int
    summary: str


def main(names: list[str]) -> int:
    """names: parts of file names; none means every client."""
    chosen = [c for c in CLIENTS if not names or any(name in c.file for name in names)]
    lines: list[str] = []
    num_passed = num_failed = 0
    with _servers() as environment:
        for client in chosen:
            outcome = _run(client, environment)
            lines.append(f"{client.package} ({client.file}): {outcome.summary}")
            num_passed += outcome.num_passed
            num_failed += outcome.num_failed
    print("\n" + "\n".join(lines) + "\n")
    print(f"{num_passed} passed, {num_failed} failed")
    return int(num_failed > 0 or not num_passed)


def _run(client: Client, environment: dict[str, str]) -> Outcome:
    """A client that cannot be installed or run at all counts as one failure."""
    try:
        _install(client.home)
        version = _version(client)
    except (OSError, subprocess.CalledProcessError) as error:
        return Outcome(0, 1, f"NOT RUN: {error}")
    print(f"\n== {client.package} {version}: {client.file}", flush=True)
    command = _node_command(client) if client.home == "node" else _pytest_command(client)
    try:
        done = subprocess.run(
            command,
            cwd=ROOT,
            env={**os.environ, **environment},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=_TIMEOUT_S,
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        print(error.output)
        return Outcome(0, 1, f"{version}: not done in {_TIMEOUT_S:.0f} s")
    print(done.stdout, flush=True)
    passed, failed = (_count(done.stdout, word) for word in ("pass", "fail"))
    failed += _count(done.stdout, "error")
    if done.returncode and not failed:
        failed = 1
    return Outcome(passed, failed, f"{version}: {passed} passed, {failed} failed")


def _count(output: str, word: str) -> int:
    """A number from pytest's last line (`3 passed in 1s`) or node's summary (`# pass 3`)."""
    last = output.rstrip().rpartition("\n")[2]
    found = re.search(rf"^# {word} (\d+)$", output, re.M) or re.search(rf"\b(\d+) {word}", last)
    return int(found[1]) if found else 0


def _pytest_command(client: Client) -> list[str]:
    config = HERE / "pytest.ini"
    return [_python(client.home), "-m", "pytest", "-c", str(config), str(HERE / client.file)]


def _node_command(client: Client) -> list[str]:
    """Copies the file into its home, because node searches modules from the file's folder."""
    shutil.copy(HERE / client.file, BUILD / "node")
    return ["node", "--test", "--test-reporter=tap", str(BUILD / "node" / client.file)]


def _install(home: str) -> None:
    """Installs once, and again when the list of packages changes."""
    required = HERE / ("package.json" if home == "node" else f"{home}.txt")
    done = BUILD / home / "installed"
    if done.exists() and filecmp.cmp(required, done, shallow=False):
        return
    print(f"installing {required.name} ...", flush=True)
    (BUILD / home).mkdir(parents=True, exist_ok=True)
    if home == "node":
        if not (shutil.which("node") and shutil.which("npm")):
            raise FileNotFoundError(_NO_NODE)
        shutil.copy(required, BUILD / home / "package.json")
        command = ["npm", "install", "--no-audit", "--no-fund", "--silent"]
    else:
        venv.create(BUILD / home, with_pip=True)
        _install_torch(home, required)
        command = [_python(home), "-m", "pip", "install", "--quiet", "--requirement", str(required)]
    subprocess.run(command, cwd=BUILD / home, check=True)
    shutil.copy(required, done)


def _install_torch(home: str, required: Path) -> None:
    """Its CPU build, if it is required: alone, pip would take one with gigabytes of CUDA."""
    if found := re.search(r"^torch==.*$", required.read_text(encoding="utf-8"), re.M):
        index = os.environ.get("TORCH_INDEX", "")
        installer = [_python(home), str(ROOT / "install_torch.py"), "--build", "cpu"]
        subprocess.run([*installer, "--index", index, found[0]], check=True)


def _version(client: Client) -> str:
    if client.home == "node":
        found = BUILD / "node" / "node_modules" / client.package / "package.json"
        code = f"console.log(require({str(found)!r}).version)"
        command = ["node", "--eval", code]
    else:
        code = f"from importlib.metadata import version; print(version({client.package!r}))"
        command = [_python(client.home), "-c", code]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


def _python(home: str) -> str:
    return str(BUILD / home / "bin" / "python")


@contextlib.contextmanager
def _servers() -> Iterator[dict[str, str]]:
    """Runs the servers. Yields environment variables for the clients."""
    servers = {
        "PENSTOCK_DEMO": RunningServer("--served-model-name", *_NAMES),
        "PENSTOCK_SCRIPTED": RunningServer("--scripted", "--max-model-len", "32768"),
        "PENSTOCK_GUARDED": RunningServer("--scripted", "--api-key", "secret"),
    }
    try:
        for server in servers.values():
            server.wait_until_ready()
        # Without these, LiteLLM downloads prices and LangChain uploads traces.
        quiet = {"LITELLM_LOCAL_MODEL_COST_MAP": "True", "LANGSMITH_TRACING": "false"}
        yield {name: server.url for name, server in servers.items()} | quiet
    finally:
        for server in servers.values():
            server.stop()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
