"""Which bits of its thread's number each register of a kernel depends on, from its PTX.

A register that depends on none is the same in all threads of the block. What memory holds depends
on the bits of its address: all threads that read one address are taken to read one number, so no
other program may write it in the same launch. Values that lanes exchange by `shfl.bfly`, and then
add or compare, no longer depend on the bit by which these lanes differ: so a whole warp's sum is
the same in all its lanes, and in other warps too if they began with the same numbers.

A product that is contracted into such a sum (`fma`) is rounded in one lane's order, not in the
other's, so that sum keeps the bit. So does a sum to which a product is added that ptxas may
contract.
"""

import functools
import operator
import re
from collections import Counter

# Of a thread's number in its block, the lower five bits are its lane's. One more stands for what
# depends on something else, such as a clock.
_LANE, _THREAD, _OTHER = 0x1F, 0x3FF, 0x400
# Bits that all of a number depends on, or those of each of its 64 bits.
Bits = int | tuple[int, ...]
# Also names that inline assembly declares. Nothing writes symbols, parameters and operations.
REGISTER = re.compile(r"(?<![\w.$%])%?[A-Za-z_]\w*")
_OWN = re.compile(r"%(laneid|warpid|lanemask_\w+|clock\w*|globaltimer\w*|smid)\b|\.local\b")
# What other programs, or other parts of this one, change meanwhile.
_CHANGING = re.compile(r"(atom|call|mbarrier|ld\.(volatile|relaxed|acquire))\b")
_MIXED = re.compile(r"(ldmatrix|mma|wgmma|match|elect|activemask)\b")
_CARRIES = re.compile(r"(add|sub|mul|mad)\.(lo\.|wide\.)?[su]\d+$")


class ThreadBits:
    def __init__(self, blocks: list[list[str]], num_threads: int) -> None:
        """blocks: all instructions of a kernel, of which those of a block follow each other."""
        num_bits = (num_threads - 1).bit_length()
        number = tuple(1 << bit for bit in range(num_bits)) + (0,) * (64 - num_bits)
        # Wherever they are written, and after what was seen of the block that is being read.
        self._known: dict[str, Bits] = {"%tid": number, "%tid.x": number}
        self._here: dict[str, Bits] = {}
        self._parsed = {line: _Instruction(line) for lines in blocks for line in lines}
        parsed = [[self._parsed[line] for line in lines] for lines in blocks]
        times = Counter(name for block in parsed for one in block for name in one.written)
        products = {
            name
            for one in self._parsed.values()
            if re.match(r"mul\.(\w+\.)*f\d", one.operation)
            for name in one.written
        }
        self._reduced = {
            to: (own, lane)
            for block in parsed
            for to, (own, lane) in _reduced(block).items()
            if times[to] == 1 and own not in products
        }

    def any(self, register: str | None) -> int:
        """All bits that it depends on, wherever it is written."""
        return _any(self._known.get(register or "", 0))

    def note(self, block: list[str], apart: int) -> bool:
        """Whether what these instructions write depends on bits not known yet.

        block: they follow each other. apart: the bits by which threads came to it, or did not.
        """
        self._here = {}
        found = False
        for line in block:
            one = self._parsed[line]
            bits = _union(self._result(one), apart) if one.written else 0
            for register in one.written:
                here = _union(bits, self._of(register)) if one.guard else bits
                self._here[register] = here
                before = self._known.get(register, 0)
                after = _union(before, here)
                if after != before:
                    self._known[register] = after
                    found = True
        return found

    def _of(self, register: str) -> Bits:
        return self._here.get(register, self._known.get(register, 0))

    def _any(self, register: str) -> int:
        return _any(self._of(register))

    def _result(self, one: "_Instruction") -> Bits:
        if one.is_own:
            return _THREAD | _OTHER
        if one.written[0] in self._reduced:
            own, lane = self._reduced[one.written[0]]
            return self._any(own) & ~lane
        bits = functools.reduce(operator.or_, map(self._any, one.read), 0)
        if _MIXED.match(one.operation):
            return bits | _THREAD
        if re.match(r"redux|vote", one.operation):
            return bits & ~_LANE
        if one.operation.startswith("shfl"):
            return self._exchanged(one)
        if bits == 0 or one.guard:
            return bits
        return self._moved(one, bits)

    def _exchanged(self, one: "_Instruction") -> Bits:
        value = self._of(one.operands[0])
        others = functools.reduce(operator.or_, map(self._any, one.operands[1:]), 0)
        if ".idx" in one.operation and one.operands[2] == "31":  # from one lane, if that is one
            value = _without(value, _LANE)
        elif ".bfly" not in one.operation and _any(value) & _LANE:
            value = _any(value) | _LANE
        return _union(value, others)

    def _moved(self, one: "_Instruction", bits: int) -> Bits:
        """Of operations that leave some bits of a number as they were, or clear them."""
        name, operands = one.operation, one.operands
        values = [self._of(operand) for operand in operands]
        last = operands[-1]
        constant = int(last, 0) if re.fullmatch(r"-?(0x[0-9A-Fa-f]+|\d+)", last) else None
        width = 64 if name.endswith("64") else 32
        if (
            re.match(r"mov\.[bu]\d|cvt\.u(64\.u32|32\.u64)$", name)
            and len(one.written + operands) == 2
        ):
            return _cut(_each(values[0]), 32 if "32" in name else 64)
        if constant is None:
            if re.match(r"(and|or|xor)\.b", name):
                return _union(values[0], values[1])
        elif re.match(r"and\.b", name):
            return tuple(bit if constant >> k & 1 else 0 for k, bit in enumerate(_each(values[0])))
        elif name.startswith("shl.b"):
            return _cut((0,) * constant + _each(values[0])[: 64 - constant], width)
        elif re.match(r"shr\.[ub]", name):
            return _cut(_each(values[0]), width)[constant:] + (0,) * constant
        elif name.startswith("bfe.u") and operands[1].isdecimal():
            return _cut(_each(values[0])[int(operands[1]) :] + (0,) * int(operands[1]), constant)
        if _CARRIES.match(name):
            each = functools.reduce(_union, values)
            return tuple(_running(_each(each)))
        return bits


class _Instruction:
    """operands: in the order of the text. read: registers, and all other names, of these."""

    def __init__(self, line: str) -> None:
        found = re.match(r"@!?(%?\w+)\s+", line)
        self.guard = found[1] if found else None
        bare = line[found.end() :] if found else line
        self.operation, _, rest = bare.replace("\t", " ").partition(" ")
        self.written: list[str] = []
        if not re.match(r"(bra|bar|ret)\b", self.operation):
            results = re.match(r"\s*(\{[^}]*\}|[^,[]+)", rest)  # not an address
            if results:
                self.written = REGISTER.findall(results[0])
                rest = rest[results.end() :]
        self.operands = [part.strip(" \t{}[]") for part in rest.strip(" \t,").split(",")]
        self.read = REGISTER.findall(rest) + ([self.guard] if self.guard else [])
        self.is_own = bool(_OWN.search(line) or _CHANGING.match(self.operation))


def _reduced(block: list[_Instruction]) -> dict[str, tuple[str, int]]:
    """Sums and the like of a register with that of another lane: that register, and the bit."""
    # What is a part of which register, of which lane: "all", its lower or upper half, or the latter
    # in its place. The register is named with how often it was written before.
    parts: dict[str, tuple[str, int, str]] = {}
    times = Counter[str]()
    reduced: dict[str, tuple[str, int]] = {}
    for one in block:
        name, operands = one.operation, one.operands
        now = [f"{operand} {times[operand]}" for operand in operands]
        first, *others = [parts.get(operand, ("", 0, "")) for operand in now]
        times.update(one.written)
        if not one.written or one.guard:
            continue
        to = f"{one.written[-1]} {times[one.written[-1]]}"
        if name == "shfl.sync.bfly.b32" and operands[2:] == ["31", "-1"]:
            base, lane, which = first if first[0] else (now[0], 0, "all")
            parts[to] = base, lane ^ int(operands[1]), which
        elif name == "cvt.u32.u64" and not first[0]:
            parts[to] = now[0], 0, "lower"
        elif name == "mov.b64" and len(one.written) == 2:
            for register, which in zip(one.written, ("lower", "upper"), strict=True):
                parts[f"{register} {times[register]}"] = now[0], 0, which
        elif name == "cvt.u64.u32" and first[0]:
            parts[to] = first
        elif name == "shl.b64" and first[2] == "upper" and operands[1] == "32":
            parts[to] = *first[:2], "placed"
        elif name in ("or.b64", "mov.b64") and others and first[:2] == others[0][:2]:
            kinds = first[2], others[0][2]
            is_or = name == "or.b64" and set(kinds) == {"lower", "placed"}
            if is_or or (name == "mov.b64" and kinds == ("lower", "upper")):
                parts[to] = *first[:2], "all"
        elif re.match(r"(max|min|add|and|or|xor)\.", name) and len(operands) == 2:
            for own, (base, lane, which) in zip(now, [*others, first], strict=True):
                if base == own and which == "all" and lane:
                    reduced[one.written[0]] = own.split()[0], lane
    return reduced


def _any(bits: Bits) -> int:
    return bits if isinstance(bits, int) else functools.reduce(operator.or_, bits)


def _each(bits: Bits) -> tuple[int, ...]:
    return (bits,) * 64 if isinstance(bits, int) else bits


def _union(one: Bits, other: Bits) -> Bits:
    if isinstance(one, int) and isinstance(other, int):
        return one | other
    if one == 0 or other == 0:
        return one or other
    return tuple(map(operator.or_, _each(one), _each(other)))


def _without(bits: Bits, these: int) -> Bits:
    if isinstance(bits, int):
        return bits & ~these
    return tuple(bit & ~these for bit in bits)


def _cut(each: tuple[int, ...], width: int) -> tuple[int, ...]:
    return each[:width] + (0,) * (64 - width)


def _running(each: tuple[int, ...]) -> list[int]:
    found = [each[0]]
    for bit in each[1:]:
        found.append(found[-1] | bit)
    return found
