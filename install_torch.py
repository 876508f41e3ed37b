"""Installs torch into the environment of the Python that runs this: `make` does so before all else.

PyPI's builds of torch for Linux bring gigabytes of CUDA. Without an NVIDIA device the CPU build is
the one to take. Where the indexes that pip is configured with lack it, it comes from the index that
is named, in addition to those; where none is named, uv installs it, which knows PyTorch's own.

    python install_torch.py --build auto torch==2.13.0

pip's own output is shown only where it fails; while it works, a line every few seconds says on
what. The same for anything else:

    python install_torch.py --pip install --editable .
"""

import argparse
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import IO

_NVIDIA = "0x10de"  # its number among the vendors of PCI devices
_LINE_INTERVAL_S = 5.0
# A machine without a network should not wait long to learn that it has none.
_QUICKLY = ("--retries", "0", "--timeout", "5")


def main(argv: Sequence[str] | None = None, root: Path = Path("/")) -> int:
    """Returns the exit code. root: where this machine's devices are found."""
    options = _parser().parse_args(argv)
    if options.pip:
        return _pip(*options.pip, what="packages")
    has_device = has_nvidia_device(root)
    if options.build == "cuda" or (options.build == "auto" and has_device):
        why = "this machine has an NVIDIA device" if options.build == "auto" else "TORCH=cuda"
        _say(f"a build for CUDA, because {why}; TORCH=cpu chooses the CPU build")
        return _pip("install", f"{options.torch},!={_version(options.torch)}+cpu")
    why = "this machine has no NVIDIA device" if options.build == "auto" else "TORCH=cpu"
    _say(f"the CPU build, because {why}; TORCH=cuda chooses a build for CUDA")
    indexes = _indexes_of_cpu_build(options.torch, options.index)
    if indexes is not None:
        return _pip("install", *indexes, f"{options.torch}+cpu")
    if not options.index and _install_by_uv(options.torch):
        return 0
    place = options.index or "PyTorch's index, which uv asks,"
    missing = f"pip's own indexes lack the CPU build, and {place} lacks it or cannot be reached"
    if options.build == "cpu":
        _say(f"{missing}; name another with TORCH_INDEX=...")
        return 1
    _say(f"{missing}: what follows may bring gigabytes of CUDA; TORCH_INDEX=... names another")
    return _pip("install", options.torch)


def has_nvidia_device(root: Path) -> bool:
    """With a driver or without one: then it is to be installed."""
    nodes = ("dev/nvidiactl", "dev/nvhost-gpu", "usr/lib/wsl/lib/libcuda.so.1")  # also Jetson, WSL
    if any((root / node).exists() for node in nodes):
        return True
    vendors = (root / "sys/bus/pci/devices").glob("*/vendor")
    return any(vendor.read_text(encoding="ascii").strip() == _NVIDIA for vendor in vendors)


def _indexes_of_cpu_build(torch: str, index: str) -> list[str] | None:
    """What pip needs besides its own settings to find the CPU build; None if it cannot."""
    wanted = f"{_version(torch)}+cpu"
    if wanted in _versions():
        return []
    extra = ["--extra-index-url", index]
    return extra if index and wanted in _versions(*extra, *_QUICKLY) else None


def _install_by_uv(torch: str) -> bool:
    """Whether that succeeded. uv itself is installed if need be."""
    uv = [sys.executable, "-m", "uv"]
    if subprocess.run([*uv, "--version"], capture_output=True).returncode != 0:
        _pip("install", "--quiet", *_QUICKLY, "uv")
    # A build for CUDA that is installed has the version without +cpu, and uv would leave it there.
    wanted = f"{torch}+cpu"
    command = [*uv, "pip", "install", "--python", sys.executable, "--torch-backend=cpu", wanted]
    quickly = {"UV_HTTP_CONNECT_TIMEOUT": "5", "UV_HTTP_RETRIES": "0"}
    return subprocess.run(command, env=quickly | os.environ).returncode == 0


def _versions(*options: str) -> list[str]:
    """The versions of torch that pip finds for this Python."""
    command = [sys.executable, "-m", "pip", "index", "versions", "torch", *options]
    done = subprocess.run(command, capture_output=True, text=True)
    for line in done.stdout.splitlines():
        label, _, versions = line.partition(":")
        if label.strip() == "Available versions":
            return versions.replace(",", " ").split()
    return []


def _version(torch: str) -> str:
    return torch.removeprefix("torch==")


def _pip(*arguments: str, what: str = "torch") -> int:
    """Returns its exit code."""
    command = [sys.executable, "-m", "pip", *arguments]
    begun_s = time.monotonic()
    with tempfile.TemporaryFile("w+", errors="replace") as output:
        process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT)
        while True:
            try:
                code = process.wait(_LINE_INTERVAL_S)
                break
            except subprocess.TimeoutExpired:
                _say(f"{_last_line(output)} ... {time.monotonic() - begun_s:.0f} s", what)
        if code:
            output.seek(0)
            print(output.read(), end="", file=sys.stderr, flush=True)
        else:
            _say(f"installed in {time.monotonic() - begun_s:.0f} s", what)
    return code


def _last_line(output: IO[str]) -> str:
    """What pip is busy with, in its own words."""
    output.seek(0)
    lines = [line.strip() for line in output.read().splitlines()]
    lines = [line for line in lines if line and not line.startswith("WARNING")]
    return lines[-1][:60] if lines else "installing"


def _say(text: str, what: str = "torch") -> None:
    print(f"{what}: {text}", flush=True)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description="Install torch, by default as the machine needs it."
    )
    parser.add_argument(
        "torch", nargs="?", metavar="torch==VERSION", help="the version that is pinned"
    )
    parser.add_argument(
        "--pip", nargs=argparse.REMAINDER, help="run pip with what follows, as quietly (no torch)"
    )
    parser.add_argument(
        "--build",
        choices=("auto", "cpu", "cuda"),
        default="auto",
        help="auto is cpu where there is no NVIDIA device (default: %(default)s)",
    )
    parser.add_argument(
        "--index",
        default="",
        metavar="URL",
        help="an index of CPU builds, besides those that pip is configured with (default: none)",
    )
    return parser


if __name__ == "__main__":
    sys.exit(main())
