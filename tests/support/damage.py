"""Damage to a model's files, chosen at random: bytes, and what JSON holds."""

import json
import os
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

_INTEGERS = (0, 1, 7, 255, 2**16, 2**31 - 1, 2**31, 2**32 - 1, 2**40, 2**63 - 1, 2**64 - 1)
_VALUES: tuple[Any, ...] = (
    *(None, True, "", "a", "\udcff", "\0", "ÿ" * 4096, "(" * 99, "(a+)+$", "[", -1, 0, 1, 2**31),
    *(2**63, 2**64, 1e308, [], {}, [[]], [None], {"type": "Split"}, {"type": "Sequence"}),
)


def damaged(file: Path, chosen: random.Random) -> bytes:
    """A file's content, damaged as it may be by its kind: JSON's tree as well as its bytes; what
    stands before weights, which are no more than numbers, more often than these."""
    content = file.read_bytes()
    if file.suffix == ".json":
        return damaged_json(content, chosen)
    if file.suffix == ".safetensors" and chosen.random() < 0.5:
        size = int.from_bytes(content[:8], "little")
        header = damaged_json(content[8 : 8 + size], chosen)
        return len(header).to_bytes(8, "little") + header + content[8 + size :]
    is_header = file.suffix in (".safetensors", ".gguf") and chosen.random() < 0.8
    return damaged_bytes(content, chosen, 20_000 if is_header else len(content))


def copy_with(whole: Path, into: Path, changes: dict[Path, bytes]) -> Path:
    """A directory like another, with other contents of some files; all others are links.

    changes: by the path in the directory.
    """
    for file in files_of(whole):
        copy = into / file
        copy.parent.mkdir(parents=True, exist_ok=True)
        if file in changes:
            copy.write_bytes(changes[file])
        else:
            copy.symlink_to(whole / file)
    return into


def files_of(directory: Path) -> list[Path]:
    """The paths in it of all files."""
    found = (Path(folder, name) for folder, _, names in os.walk(directory) for name in names)
    return sorted(path.relative_to(directory) for path in found)


def damaged_bytes(content: bytes, chosen: random.Random, end: int) -> bytes:
    """end: of the part that is damaged, but where the rest is cut off."""
    changed = bytearray(content)
    end = min(end, len(changed))
    for _ in range(chosen.choice((1, 1, 1, 2, 5, 20))):
        # Most of the fields are at the beginning.
        at = chosen.randrange(min(chosen.choice((64, 4096, end)), max(1, len(changed) - 1)))
        match chosen.randrange(5):
            case 0:
                changed[at : at + 1] = bytes((chosen.randrange(256),))
            case 1:
                size = chosen.choice((4, 8))
                number = chosen.choice(_INTEGERS) % 256**size
                changed[at : at + size] = number.to_bytes(size, "little")
            case 2:
                del changed[at : at + chosen.randrange(1, 64)]
            case 3:
                changed[at:at] = changed[at : at + chosen.randrange(1, 64)]
            case _:
                if chosen.random() < 0.2:
                    del changed[at:]
    return bytes(changed)


def damaged_json(content: bytes, chosen: random.Random) -> bytes:
    """Mostly JSON still, of other values."""
    if chosen.random() < 0.3:
        return damaged_bytes(content, chosen, len(content))
    tree = json.loads(content)
    for _ in range(chosen.choice((1, 1, 2, 4))):
        holders = list(_holders(tree)) or [[tree]]
        # Vocabularies are long: as often anywhere else.
        small = [holder for holder in holders if len(holder) < 30] or holders
        holder = chosen.choice(chosen.choice((holders, small)))
        key = chosen.choice(list(holder) if isinstance(holder, dict) else range(len(holder)))
        match chosen.randrange(4):
            case 0:
                del holder[key]
            case 1:
                holder[key] = chosen.choice(holders)  # perhaps itself, with all that it holds
                try:
                    json.dumps(tree)
                except ValueError:
                    holder[key] = None
            case _:
                holder[key] = chosen.choice(_VALUES)
    return json.dumps(tree, ensure_ascii=chosen.random() < 0.5).encode("utf-8", "surrogatepass")


def _holders(tree: Any) -> Iterator[Any]:
    """The objects and lists within that are not empty."""
    if isinstance(tree, dict | list) and tree:
        yield tree
        for each in tree.values() if isinstance(tree, dict) else tree:
            yield from _holders(each)
