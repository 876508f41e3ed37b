"""Whether a kernel's addresses are computed in enough bits, by Triton's intermediate code.

Offsets are in elements, and Triton's integers have 32 bits until somebody widens them. A KV pool
has more than 2**31 elements a layer, and a row of logits may begin beyond that too; an offset that
wraps reads other memory, and no small test shows it.
"""

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass

# Nothing that a kernel is given, reads or counts is more: not ids, positions, rows or strides, and
# blocks are limited to so many (`penstock.engine.executors.cuda.setup`). What is in 64 bits is out
# of question.
_MOST = 2**20
# Programs of a launch, in its first dimension and in the others: tokens, and what CUDA allows.
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
    """One of the program's: the line that computes it, and what of. No line: given, or read."""

    line: str
    operands: tuple["Value | None", ...] = ()


def narrow_offsets(ttir: str, programs: tuple[int, int] = _PROGRAMS) -> list[str]:
    """The offsets of this kernel that 32 bits may not hold: the lines that compute them.

    programs: the most of a launch, in its first dimension and in the others.
    """
    sizes: dict[Value | None, int] = {None: _MOST}
    wrong: list[str] = []

    def size(value: Value | None) -> int:
        """The most that it may be, either side of zero."""
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
    """What is added to pointers. Names count from where they are set: parts of a program that
    stand side by side may share one."""
    known: dict[str, Value | None] = {}
    for line in ttir.splitlines():
        text = re.sub(r" loc\(.*$", "", line).strip()
        if loop := _LOOP.search(text):
            known |= dict.fromkeys(_HANDED_ON.findall(text))
            known[loop[1]] = known.get(loop[2].rstrip(","))  # below its end
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
    return 2**63  # not known here, so not known to be small
