"""Triton's cache in one file, for the next machine: what it has is not compiled there again.

Its keys come of the kernels' source, the target, and Triton with its assembler, so what was
compiled elsewhere by the same version, without a GPU too (`tests.bench.gpu.compile`), counts. What
is stale is never asked for.
"""

import json
import tarfile
from pathlib import Path

# Machine code, what Triton knows of it, and the compiled functions that launch it.
_KEPT = (".cubin", ".json", ".so")
# One file of the paths of the others, which are absolute.
_GROUP = "__grp__"
# What is copied off a machine that is lent is often limited.
_MAX_BYTES = 15 << 20


def pack(folder: Path, file: Path) -> bool:
    """False, and no file, where it would be too large."""
    new = file.with_suffix(".new")
    with tarfile.open(new, "w:xz", preset=1) as tar:
        for path in sorted(folder.glob("*/*")):
            if path.suffix in _KEPT and path.is_file():
                tar.add(path, path.relative_to(folder))
    if new.stat().st_size > _MAX_BYTES:
        new.unlink()
        return False
    new.replace(file)
    return True


def unpack(file: Path, folder: Path) -> int:
    """The number of its files. Those that are there stay."""
    folder, count = folder.absolute(), 0
    with tarfile.open(file) as tar:
        for member in tar:
            if not member.isfile() or (folder / member.name).exists():
                continue
            count += 1
            tar.extract(member, folder, filter="data")
            path = folder / member.name
            if path.name.startswith(_GROUP):
                group = json.loads(path.read_text(encoding="utf-8"))
                paths = {name: str(path.parent / name) for name in group["child_paths"]}
                path.write_text(json.dumps({"child_paths": paths}), encoding="utf-8")
    return count
