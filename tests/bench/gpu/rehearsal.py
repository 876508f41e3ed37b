"""`make gpu-rehearsal`: the suite at toy sizes, on what a machine with a GPU has but for the GPU.

From the archive of `make gpu-bundle` alone, in an environment of Python 3.12 with the packages of
such an image in their versions (torch's own build for CUDA, 5 GB), without a network, and without
penstock installed: what would fail there in its first minute fails here. Kernels run in Triton's
interpreter, and no figure means anything.
"""

import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

from penstock.scheduler.errors import PenstockError
from tests.bench.gpu import bundle

FOLDER = bundle.ROOT / "build" / "gpu-rehearsal"
# Of what image.txt names, the packages that the suite uses. numpy is older than an image's, as this
# version of Triton's interpreter, which a GPU does not use, needs it.
_PACKAGES = (
    *("torch==2.11.0", "triton==3.6.0", "transformers==5.17.0", "numpy==2.3.*", "uvloop"),
    *("pytest", "pytest-timeout", "hypothesis", "httpx", "jinja2", "prometheus-client", "pyyaml"),
    *("protobuf", "anyio", "click", "h11", "tqdm", "requests", "annotated-doc"),
)
_SUITE = ("-m", "tests.bench.gpu.suite", "--tiny", "--minutes", "40", "--patience", "4")
# Run in the environment: a network of its own that has the loopback interface alone.
_ALONE = """
import fcntl, os, socket, struct, sys
try:
    os.unshare(os.CLONE_NEWNET)
except PermissionError:
    os.unshare(os.CLONE_NEWUSER | os.CLONE_NEWNET)
SIOCSIFFLAGS, IFF_UP = 0x8914, 1
with socket.socket() as any_socket:
    fcntl.ioctl(any_socket, SIOCSIFFLAGS, struct.pack("16sH14x", b"lo", IFF_UP))
os.execv(sys.executable, [sys.executable, *sys.argv[1:]])
"""


class NoInterpreter(PenstockError):
    """The version of Python is not there."""


def main() -> int:
    """The exit status of the suite: 0 where every part ran and every result is right."""
    python = _environment()
    with tempfile.TemporaryDirectory() as scratch:
        checkout = Path(scratch, "checkout")
        with tarfile.open(bundle.ARCHIVE) as tar:
            tar.extractall(checkout, filter="tar")
        # As on a bare machine: no variable of this one's, no cache, and no penstock.
        there = {"PATH": f"{python.parent}:{os.defpath}", "HOME": scratch, "OMP_NUM_THREADS": "1"}
        command = [str(python), "-c", _ALONE, *_SUITE, "--out", f"{scratch}/out"]
        return subprocess.run(command, cwd=checkout, env=there, check=False).returncode


def _environment() -> Path:
    """Its Python. It is made anew when the packages change."""
    python, made_of = FOLDER / "bin" / "python3", FOLDER / "made-of"
    if not made_of.exists() or made_of.read_text() != repr(_PACKAGES):
        shutil.rmtree(FOLDER, ignore_errors=True)
        subprocess.run([_interpreter(), "-m", "venv", str(FOLDER)], check=True)
        subprocess.run([str(python), "-m", "pip", "install", "--quiet", *_PACKAGES], check=True)
        made_of.write_text(repr(_PACKAGES))
    return python


def _interpreter() -> str:
    """Raises NoInterpreter."""
    name = f"python{bundle.PYTHON}"
    of_pyenv = Path.home().glob(f".pyenv/versions/{bundle.PYTHON}.*/bin/python")
    for found in (os.environ.get("PYTHON312"), shutil.which(name), *sorted(map(str, of_pyenv))):
        # pyenv's own commands are there for versions that are not in use too.
        if found and subprocess.run([found, "-c", ""], capture_output=True).returncode == 0:
            return found
    raise NoInterpreter(f"there is no {name}; install it, or name one by PYTHON312=PATH")


if __name__ == "__main__":
    sys.exit(main())
