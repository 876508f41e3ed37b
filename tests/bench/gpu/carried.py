"""What `make gpu-bundle` put beside the checkout, for a machine that lacks it."""

import importlib
import importlib.util
import os
import shutil
import sys
import tarfile
import zipfile
from collections.abc import Iterable
from pathlib import Path

FOLDER = Path(__file__).parents[3] / "build" / "gpu-bundle"
WHEELS, FLASH_ATTN_3 = FOLDER / "wheels", FOLDER / "flash_attn_3.tar.xz"
TRITON_CACHE = FOLDER / "triton_cache.tar.xz"
# Beside what travels, which has a limit.
_UNPACKED = FOLDER.with_name("gpu-unpacked")


def missing(modules: Iterable[str]) -> list[str]:
    """Which of them this process cannot import."""
    return [name for name in modules if importlib.util.find_spec(name) is None]


def use(modules: Iterable[str]) -> list[str]:
    """Takes the wheels, if some module is missing, for this process and all that it starts.

    Returns what is missing all the same. They are unpacked as pip would, which may be missing too.
    """
    if not missing(modules) or not WHEELS.is_dir():
        return missing(modules)
    packages = _UNPACKED / "packages"
    if not packages.exists():
        unpacked = packages.with_suffix(f".{os.getpid()}")
        for wheel in sorted(WHEELS.glob("*.whl")):
            with zipfile.ZipFile(wheel) as file:
                file.extractall(unpacked)
        unpacked.replace(packages)
    sys.path.append(str(packages))
    before = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (before, str(packages))))
    importlib.invalidate_caches()
    return missing(modules)


def flash_attn_3() -> Path | None:
    """The folder of FlashAttention 3's library, if it was carried."""
    if not FLASH_ATTN_3.exists():
        return None
    folder = _UNPACKED / "flash_attn_3"
    if not folder.exists():
        unpacked = folder.with_suffix(f".{os.getpid()}")
        shutil.rmtree(unpacked, ignore_errors=True)
        with tarfile.open(FLASH_ATTN_3) as file:
            file.extractall(unpacked, filter="data")
        unpacked.replace(folder)
    return folder


def as_package(folder: Path) -> Path:
    """What PYTHONPATH needs for Penstock to find the library of that folder as an installed vLLM's,
    as `penstock.engine.kernels.attention.flash_prefill` looks for it."""
    packages = _UNPACKED / "of_vllm"
    link = packages / "vllm" / "vllm_flash_attn"
    link.parent.mkdir(parents=True, exist_ok=True)
    link.unlink(missing_ok=True)
    link.symlink_to(folder.resolve(), target_is_directory=True)
    return packages
