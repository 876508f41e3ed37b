"""`make gpu-bundle`: the checkout, and what a machine with a GPU lacks for it, in one archive.

Such a machine may be lent for minutes, without a network, with an image that has torch, Triton and
transformers (image.txt lists one's packages). The others go along as wheels, in the versions that
are installed here. `python3 -m tests.bench.gpu.suite` takes them from build/gpu-bundle.
"""

import argparse
import importlib.metadata
import lzma
import re
import shutil
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from pathlib import Path

from packaging.requirements import Requirement

from penstock.scheduler.errors import PenstockError
from tests.bench.gpu.carried import FLASH_ATTN_3, FOLDER, TRITON_CACHE, WHEELS

ROOT = Path(__file__).parents[3]
ARCHIVE = ROOT / "build" / "gpu-bundle.tar.xz"
PYTHON = "3.12"
# What the kernels' tests need beside penstock's own dependencies.
_OF_TESTS = ("gguf", "httpx", "hypothesis", "pytest", "pytest-asyncio", "pytest-timeout")
_MAX_BYTES = 64 << 20
# A wheel bears the oldest glibc that it runs with; pip takes those that are named alone.
_PLATFORMS = tuple(f"manylinux_2_{minor}_x86_64" for minor in range(5, 36))
_OF_FLASH_ATTN_3 = ("_vllm_fa3_C.abi3.so", "flash_attn_interface.py")


class TooLarge(PenstockError):
    """The machine takes less."""


def main(argv: list[str]) -> int:
    args = _parser().parse_args(argv)
    shutil.rmtree(FOLDER, ignore_errors=True)
    WHEELS.mkdir(parents=True)
    wanted = lacking(_names(args.image.read_text()))
    _download(wanted)
    if args.flash_attn_3:
        _take_flash_attn_3(args.flash_attn_3)
    if args.triton_cache:
        shutil.copyfile(args.triton_cache, TRITON_CACHE)
    files = _files()
    num_bytes = sum(path.stat().st_size for path in files)
    if num_bytes > _MAX_BYTES:
        raise TooLarge(f"{num_bytes >> 20} MiB exceed the {_MAX_BYTES >> 20} MiB that may travel")
    with lzma.open(ARCHIVE, "wb", preset=1) as file, tarfile.open(fileobj=file, mode="w") as tar:
        for path in files:
            tar.add(path, path.relative_to(ROOT))
    print(f"{len(wanted)} wheels: {', '.join(wanted)}")
    print(f"{ARCHIVE}: {ARCHIVE.stat().st_size >> 20} MiB, {num_bytes >> 20} MiB unpacked")
    print("there, in the folder where it is unpacked, or in a checkout with build/gpu-bundle:")
    print("    python3 -m tests.bench.gpu.suite --out gpu_results")
    return 0


def lacking(image: set[str]) -> list[str]:
    """NAME==VERSION of what an image with these packages lacks, as it is installed here."""
    pyproject = tomllib.loads((ROOT / "pyproject.toml").read_text())
    todo = [*pyproject["project"]["dependencies"], *_OF_TESTS]
    found: dict[str, str] = {}
    while todo:
        requirement = Requirement(todo.pop())
        name = _normal(requirement.name)
        there = {"python_version": PYTHON, "extra": ""}
        is_needed = requirement.marker is None or requirement.marker.evaluate(there)
        if name in image or name in found or not is_needed:
            continue
        package = importlib.metadata.distribution(name)
        found[name] = package.version
        todo += package.requires or []
    return [f"{name}=={version}" for name, version in sorted(found.items())]


def _download(wanted: list[str]) -> None:
    platforms = [flag for name in _PLATFORMS for flag in ("--platform", name)]
    target = ["--python-version", PYTHON, "--implementation", "cp", *platforms]
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps"]
    command += ["--only-binary=:all:", "--dest", str(WHEELS), *target, *wanted]
    subprocess.run(command, check=True)


def _take_flash_attn_3(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as file:
        members = [name for name in file.namelist() if Path(name).name in _OF_FLASH_ATTN_3]
        unpacked = FOLDER / "unpacked"
        for name in members:
            file.extract(name, unpacked)
    with tarfile.open(FLASH_ATTN_3, "w:xz") as tar:
        for name in members:
            tar.add(unpacked / name, Path(name).name)
    shutil.rmtree(unpacked)


def _files() -> list[Path]:
    """What travels: what git would take, as it lies here, and the bundle."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    names = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    paths = [ROOT / name for name in names.split("\0") if name]
    bundled = [path for path in FOLDER.rglob("*") if path.is_file()]
    return [path for path in paths if path.is_symlink() or path.is_file()] + bundled


def _names(text: str) -> set[str]:
    lines = (line for line in text.splitlines() if not line.startswith("#"))
    return {_normal(name) for line in lines for name in line.split()}


def _normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m tests.bench.gpu.bundle",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    image = Path(__file__).with_name("image.txt")
    parser.add_argument(
        "--image", type=Path, default=image, metavar="FILE", help="the names of its packages"
    )
    parser.add_argument(
        "--flash-attn-3",
        type=Path,
        metavar="WHEEL",
        help="of vLLM, for the same torch: FlashAttention 3's library goes along, to compare with",
    )
    parser.add_argument(
        "--triton-cache",
        type=Path,
        metavar="FILE",
        help="triton_cache.tar.xz of an earlier run: what it has is not compiled again",
    )
    return parser


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
