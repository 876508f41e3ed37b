"""Compiles Triton's bridge to the CUDA driver where there is neither GPU nor driver.

`prebuild_triton.py DIRECTORY`, in the image's build stage: writes cuda_utils.c and cuda_utils.so,
which prebuilt-cc hands to Triton at run time. Triton compiles nothing else in C: kernels go from
LLVM to the ptxas that its wheel brings.
"""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path


def main(directory: Path) -> None:
    # Triton reads both when it is imported.
    os.environ["TRITON_LIBCUDA_PATH"] = str(directory)
    os.environ["CC"] = "gcc"
    from triton.backends.nvidia import driver as nvidia
    from triton.runtime.build import _build

    source = directory / "cuda_utils.c"
    shutil.copyfile(Path(nvidia.__file__).with_name("driver.c"), source)
    driver = directory / "libcuda.so.1"
    _stand_in(driver, source.read_text(encoding="utf-8"))
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


def _stand_in(driver: Path, source: str) -> None:
    """A library of the driver's name with the functions that `source` names, for the linker alone.

    Without them, a linker that drops what is not needed would drop the driver.
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
