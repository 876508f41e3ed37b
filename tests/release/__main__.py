"""Builds the sdist and from it the wheel, installs the wheel into a fresh environment for each
Python, and asks a server there one question.

    python -m tests.release [PYTHON ...]        by default this Python alone

A Python of this one's version gets links to what is installed here of the dependencies that the
wheel declares, and of nothing else, so that one that is not declared is missing. Another Python
installs them from the package index, torch by install_torch.py.
"""

import os
import shutil
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Iterator
from importlib.metadata import Distribution, distribution
from pathlib import Path
from zipfile import ZipFile

import httpx
from packaging.requirements import Requirement

from tests.support.paths import DEMO_MODEL, ROOT
from tests.support.serving import free_port

_START_TIMEOUT_S = 180.0
_PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]


def main(pythons: list[str]) -> int:
    with tempfile.TemporaryDirectory(prefix="penstock-release-") as directory:
        wheel = _build(Path(directory))
        for number, python in enumerate(pythons or [sys.executable]):
            environment = Path(directory, str(number))
            _say(f"{python}: installing {wheel.name}")
            _install(python, environment, wheel)
            _say(f"{python}: serving")
            _check(environment / "bin" / "penstock", Path(directory))
            _say(f"{python}: {_output(environment / 'bin' / 'python', '--version')} answers")
            shutil.rmtree(environment)
    return 0


def _build(directory: Path) -> Path:
    """The wheel, built from the sdist, so that both are known to be whole."""
    command = [sys.executable, "-m", "build", "--outdir", str(directory), str(ROOT)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    version = _PROJECT["version"]
    assert (directory / f"penstock-{version}.tar.gz").is_file()
    wheel = directory / f"penstock-{version}-py3-none-any.whl"
    with ZipFile(wheel) as files:  # a start without the draft model would go unnoticed
        names = {Path(name).name for name in files.namelist() if "/demo_model/draft/" in name}
    assert names == {path.name for path in (DEMO_MODEL / "draft").iterdir()}, names
    return wheel


def _install(python: str, environment: Path, wheel: Path) -> None:
    _run(python, "-m", "venv", str(environment))
    inside = str(environment / "bin" / "python")
    if _version_of(inside) == _version_of(sys.executable):
        packages = next(environment.glob("lib/python*/site-packages"))
        seen: set[str] = set()
        for dependency in _PROJECT["dependencies"]:
            for found in _needed_by(Requirement(dependency), seen):
                _link(found, packages)
    else:
        [torch] = [name for name in _PROJECT["dependencies"] if name.startswith("torch==")]
        index = os.environ.get("TORCH_INDEX", "")
        _run(inside, str(ROOT / "install_torch.py"), "--index", index, torch)
    _run(inside, "-m", "pip", "install", "--quiet", str(wheel))


def _needed_by(requirement: Requirement, seen: set[str]) -> Iterator[Distribution]:
    """What satisfies it here, and what that needs in turn."""
    if requirement.marker and not requirement.marker.evaluate({"extra": ""}):
        return
    found = distribution(requirement.name)
    if found.name not in seen:
        seen.add(found.name)
        yield found
        for text in found.requires or ():
            yield from _needed_by(Requirement(text), seen)


def _link(found: Distribution, packages: Path) -> None:
    """Links what the distribution has put into site-packages."""
    names = {file.parts[0] for file in found.files or () if file.parts[0] not in ("..", "bin")}
    for name in names - {"__pycache__"}:
        if not (packages / name).exists():
            (packages / name).symlink_to(Path(str(found.locate_file(name))))


def _check(penstock: Path, directory: Path) -> None:
    """Serves the demo model, from a directory that holds no source, and asks it one question."""
    assert _output(penstock, "--version") == f"penstock {_PROJECT['version']}"
    url = f"http://127.0.0.1:{(port := free_port())}"
    # Its own variables would lead Python to the source.
    env = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    # The comparison of the quantized model reads a text that must be in the wheel.
    flags = ["--port", str(port), "--quantization", "int8"]
    server = subprocess.Popen([penstock, "serve", *flags], cwd=directory, env=env)
    try:
        _wait_until_ready(url, server)
        body = {"messages": [{"role": "user", "content": "Who are you?"}], "max_tokens": 16}
        answer = httpx.post(f"{url}/v1/chat/completions", json={"model": "demo"} | body, timeout=60)
        assert answer.status_code == 200, answer.text
        assert answer.json()["choices"][0]["message"]["content"]
        assert "<html" in httpx.get(url).text  # the page's files are in the wheel
    finally:
        server.terminate()
        code = server.wait(60)
    assert code == 0, code


def _wait_until_ready(url: str, server: "subprocess.Popen[bytes]") -> None:
    deadline_s = time.monotonic() + _START_TIMEOUT_S
    while time.monotonic() < deadline_s and server.poll() is None:
        try:
            if httpx.get(f"{url}/ready").status_code == httpx.codes.OK:
                return
        except httpx.TransportError:
            pass
        time.sleep(0.2)
    raise AssertionError(f"the server is not ready; exit code {server.poll()}")


def _version_of(python: str) -> str:
    return _output(python, "-c", "import sys; print(sys.version_info[:2])")


def _output(*command: str | Path) -> str:
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


def _run(*command: str) -> None:
    subprocess.run(command, check=True)


def _say(text: str) -> None:
    print(f"tests.release: {text}", flush=True)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
