"""The libraries of the page at `/`, as they come from npm.

    python -m tests.ops.page_libraries            says which files differ from npm's
    python -m tests.ops.page_libraries --write    writes the files, their hashes and licences

`libraries.json` beside the files is the only place that names versions. A file is npm's, unchanged
but for its last line if that names a source map.
"""

import argparse
import hashlib
import json
import re
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path
from typing import Any

from tests.support.paths import ROOT

FOLDER = ROOT / "server" / "api" / "page" / "vendor"
RECORD = FOLDER / "libraries.json"
LICENCES = "LICENSES.txt"
# The licence of KaTeX's fonts, which npm's package names in the fonts alone.
OFL = FOLDER / "fonts" / "OFL.txt"
_SOURCE_MAP = re.compile(rb"\n?//# sourceMappingURL=\S+\s*$")
_LICENCE_NAMES = ("LICENSE", "LICENSE.txt", "LICENSE-MIT.txt", "LICENSE.md")


def record() -> dict[str, dict[str, Any]]:
    """Package -> its version, licence, bundled packages, and files: name -> path there and hash."""
    packages: dict[str, dict[str, Any]] = json.loads(RECORD.read_text())
    return packages


def from_npm() -> dict[str, bytes]:
    """Name -> content of every file that belongs into the folder, but for the record and OFL."""
    contents, licences = {}, []
    with tempfile.TemporaryDirectory() as folder:
        for name, library in record().items():
            package = _Package(name, library["version"], Path(folder))
            for file, entry in library["files"].items():
                contents[file] = _SOURCE_MAP.sub(b"\n", package.read(entry["path"]))
            licences.append(package.licence())
            for other in library["bundles"]:
                bundled, _, version = other.rpartition("@")
                licences.append(_Package(bundled, version, Path(folder)).licence())
    return contents | {LICENCES: "\n\n".join(licences).encode()}


class _Package:
    def __init__(self, name: str, version: str, folder: Path) -> None:
        self._title = f"{name} {version}"
        command = [
            "npm",
            "pack",
            "--silent",
            f"{name}@{version}",
            "--pack-destination",
            str(folder),
        ]
        run = subprocess.run(command, capture_output=True, text=True, check=True)
        self._path = folder / run.stdout.split()[-1]

    def read(self, path: str) -> bytes:
        with tarfile.open(self._path) as archive:
            file = archive.extractfile(f"package/{path}")
            assert file is not None, f"{self._title} has no {path}"
            return file.read()

    def licence(self) -> str:
        with tarfile.open(self._path) as archive:
            names = {name.removeprefix("package/") for name in archive.getnames()}
        found = next((name for name in _LICENCE_NAMES if name in names), None)
        assert found, f"{self._title} has no licence text"
        return f"{self._title}\n{'=' * len(self._title)}\n\n{self.read(found).decode().strip()}\n"


def hash_of(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--write", action="store_true", help="write the files and their hashes")
    contents = from_npm()
    if parser.parse_args().write:
        for name, content in contents.items():
            (FOLDER / name).write_bytes(content)
        packages = record()
        for library in packages.values():
            for name, entry in library["files"].items():
                entry["sha256"] = hash_of(contents[name])
        RECORD.write_text(json.dumps(packages, indent=2) + "\n")
        return 0
    changed = [
        name for name, content in contents.items() if (FOLDER / name).read_bytes() != content
    ]
    print("\n".join(f"{name} differs from npm's" for name in changed) or "all files are npm's")
    return bool(changed)


if __name__ == "__main__":
    sys.exit(main())
