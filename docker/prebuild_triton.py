"""Compiles Triton's binding to the CUDA driver on a machine without GPU and driver.

`prebuild_triton.py DIRECTORY`, in the image's build stage: writes cuda_utils.c and cuda_utils.so,
which prebuilt-cc supplies to Triton at run time. Triton compiles no other C: its kernels go through
LLVM to the ptxas of its wheel.
"""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path


def main(directory: Path) -> None:
    # Triton reads both at import.
    os.environ["TRITON_LIBCUDA_PATH"] = str(directory)
    os.environ["CC"] = "gcc"
    from triton.backends.nvidia import driver as nvidia
    from triton.runtime.build import _build

    source = directory / "cuda_utils.c"
    shutil.copyfile(Path(nvidia.__file__).with_name("driver.c"), source)
    driver = directory / "libcuda.so.1"
    _stub_library(driver, source.read_text(encoding="utf-8"))
    library = _build(
        "cuda_utils",
        str(source),
        str(directory),
        nvidia.library_dirs(),
        nvidia.include_dirs,
        nvidia.libraries,
        [],
    )
    Path(library).rename(directory / "cuda_utils.so")
    driver.unlink()


def _stub_library(driver: Path, source: str) -> None:
    """A library with the driver's name and the functions that `source` calls, for linking only.

    Without the functions, a linker that drops unneeded libraries would drop the driver.
    """
    names = sorted(set(re.findall(r"\b(cu[A-Z]\w+)\s*\(", source)))
    functions = "".join(f"void {name}(void) {{}}\n" for name in names)
    command = (
        "gcc",
        "-shared",
        "-fPIC",
        f"-Wl,-soname,{driver.name}",
        "-x",
        "c",
        "-",
        "-o",
        driver,
    )
    subprocess.run(command, input=functions, text=True, check=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
