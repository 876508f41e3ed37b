"""Checks in Triton's intermediate code that a kernel computes addresses in enough bits.

Offsets are in elements, and Triton's integers have 32 bits unless widened. A KV pool has more than
2**31 elements per layer, and a row of logits may begin beyond that too; an offset that overflows
reads other memory, which no small test reveals.
"""

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass

# Bounds every argument, loaded value and counter: ids, positions, rows and strides; blocks are
# limited to this (`penstock.engine.loading.gpu`). 64-bit values are always wide enough.
_MOST = 2**20
# The most programs of a launch, in its first dimension (tokens) and the others (CUDA's limit).
_PROGRAMS = (_MOST, 2**16)
_TOO_MANY = 2**31

_SET = re.compile(r"(%\w+)(?::\d+)? = (.*)$")
_NAME = re.compile(r"%\w+(?:#\d+)?")
_LOOP = re.compile(r"scf\.for (%\w+) = \S+ to (\S+) step")
_HANDED_ON = re.compile(r"(%\w+) = %")
_SAME = (
    "tt.splat", "tt.broadcast", "tt.expand_dims", "tt.reshape", "tt.trans", "arith.extsi",
    "arith.extui", "arith.shrsi",
)  # fmt: skip
_READ = ("tt.load", "tt.reduce", "tt.scan", "scf.for", "scf.if")
_SUMS: dict[str, Callable[[list[int]], int]] = {
    "arith.addi": sum,
    "arith.subi": sum,
    "arith.muli": lambda sizes: sizes[0] * sizes[1],
    "arith.shli": lambda sizes: sizes[0] << min(sizes[1], 63),
    "arith.minsi": min,
    "arith.maxsi": max,
    "arith.remsi": min,
    "arith.andi": min,
    "arith.ori": sum,
    "arith.select": lambda sizes: max(sizes[1:]),
}


@dataclass(frozen=True, eq=False)
class Value:
    """A value of the program: the line that computes it, and its operands."""

    line: str
    operands: tuple["Value | None", ...] = ()


def narrow_offsets(ttir: str, programs: tuple[int, int] = _PROGRAMS) -> list[str]:
    """The lines that compute offsets which 32 bits may not hold.

    programs: the most of a launch, in its first dimension and in the others.
    """
    sizes: dict[Value | None, int] = {None: _MOST}
    wrong: list[str] = []

    def size(value: Value | None) -> int:
        """The largest absolute value that it can have."""
        if value not in sizes:
            assert value
            sizes[value] = _size(value, size, programs)
            if sizes[value] >= _TOO_MANY and not value.line.endswith(("i64", "i64>")):
                wrong.append(value.line)
        return sizes[value]

    for offset in _offsets(ttir):
        size(offset)
    return wrong


def _offsets(ttir: str) -> Iterator["Value | None"]:
    """What is added to pointers. A name refers to its latest definition: separate regions of a
    program may reuse it."""
    known: dict[str, Value | None] = {}
    for line in ttir.splitlines():
        text = re.sub(r" loc\(.*$", "", line).strip()
        if loop := _LOOP.search(text):
            known |= dict.fromkeys(_HANDED_ON.findall(text))
            known[loop[1]] = known.get(loop[2].rstrip(","))  # less than the loop's end
        found = _SET.match(text)
        names = [name.partition("#")[0] for name in _NAME.findall(found[2] if found else text)]
        if "tt.addptr" in text:
            yield known.get(names[-1])
        if found:
            known[found[1]] = Value(text, tuple(known.get(name) for name in names))


def _size(value: Value, size: Callable[[Value | None], int], programs: tuple[int, int]) -> int:
    found = _SET.match(value.line)
    assert found
    operation, _, rest = found[2].replace('"', "").replace("(", " ", 1).partition(" ")
    operands = value.operands
    if operation == "arith.constant":
        number = re.match(r"(?:dense<)?(-?\w+)", rest)
        assert number, value.line
        return abs(int({"true": "1", "false": "0"}.get(number[1], number[1]), 0))
    if operation == "arith.cmpi":
        return 1
    if operation == "tt.make_range":
        return int(re.findall(r"end = (\d+)", rest)[0])
    if operation in ("tt.get_program_id", "tt.get_num_programs"):
        return programs[rest[0] != "x"]
    if operation == "arith.divsi":
        by = operands[1]
        is_known = by is not None and "arith.constant" in by.line
        return size(operands[0]) // (size(by) if is_known else 1)
    if operation in _SAME:
        return size(operands[0])
    if operation in _SUMS:
        return _SUMS[operation]([size(operand) for operand in operands])
    if operation in _READ:
        return _MOST
    return 2**63  # unknown operation, so possibly large
