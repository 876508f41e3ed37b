"""What can become of files of blocks."""

import random
from pathlib import Path

from penstock.engine.memory.tiers.block_files import HEADER_BYTES

DAMAGES = ("flipped bit", "cut off", "longer", "empty", "missing", "zeros", "another's", "header")


def files_in(directory: Path) -> list[Path]:
    """Those of blocks, in order."""
    return sorted(directory.glob("*/*/*.*"))


def damage(path: Path, kind: str, seed: int) -> None:
    """One of DAMAGES. seed: of where and how much."""
    chosen = random.Random(seed)
    if not path.exists():
        return
    content = bytearray(path.read_bytes())
    if not content:
        return
    match kind:
        case "flipped bit":
            content[chosen.randrange(len(content))] ^= 1 << chosen.randrange(8)
        case "header":
            content[chosen.randrange(min(HEADER_BYTES, len(content)))] ^= 0xFF
        case "cut off":
            del content[chosen.randrange(len(content)) :]
        case "longer":
            content += chosen.randbytes(chosen.randrange(1, 100))
        case "empty":
            content.clear()
        case "zeros":  # as a file system may leave it after a power failure
            start = chosen.randrange(len(content))
            content[start:] = bytes(len(content) - start)
        case "another's":
            others = [each for each in files_in(path.parents[2]) if each != path]
            content = bytearray(chosen.choice(others).read_bytes() if others else b"")
        case "missing":
            path.unlink()
            return
    path.write_bytes(content)
