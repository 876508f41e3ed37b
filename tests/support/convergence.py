"""Whether a compiled kernel's threads meet where the hardware needs them to, and in which order it
stores and copies.

Triton up to 3.6 runs LLVM's passes without a target. LLVM then takes no account of threads that
part, and jump threading may lead some of a block's threads into `bar.sync` or `ldmatrix` around the
place where all of them would have met (triton-lang/triton#11153, llvm/llvm-project#213868). Nothing
fails when that is compiled, and Triton's interpreter does not show it. So the PTX is read: no such
instruction may be between a branch that threads take differently and the first block through which
all paths from that branch pass, where the assembler lets them meet again.

A branch is taken by all threads alike if what it depends on does not come from a thread's number,
from what threads exchange, or from memory at addresses that differ. All threads that read one
address are taken to read one number, so no other program may write it in the same launch.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass, field

_CONVERGENT = re.compile(
    r"(bar|barrier|shfl|vote|match|redux|ldmatrix|stmatrix|mma|wgmma|elect|activemask|setmaxnreg)\b"
)
# Results that may differ between threads, whatever they are computed from.
_DIFFERING = re.compile(r"(shfl|vote|match|redux|ldmatrix|mma|wgmma|elect|activemask|atom|call)\b")
_OWN = re.compile(r"%(tid|laneid|warpid|lanemask_\w+|clock\w*|smid)\b|\.local\b")
_REGISTER = re.compile(r"%[a-z]+\d+\b")
_EXIT = "exit"


@dataclass
class _Block:
    lines: list[str] = field(default_factory=list)
    next: list[str] = field(default_factory=list)
    guard: str | None = None  # the predicate of the last branch, if it has one


def parted(ptx: str) -> list[str]:
    """Instructions of a kernel that need all threads, but which some may reach without the others.

    ptx: of one kernel. Raises ValueError for jumps through a table.
    """
    blocks = _blocks(ptx)
    meets = {name: _meeting(name, blocks) for name in blocks}
    alike = _reduced(blocks) if re.search(r"\.reqntid 32\s", ptx) else set()
    differing: set[str] = set()
    while True:
        regions = [
            _between(name, meets[name], blocks)
            for name, block in blocks.items()
            if block.guard in differing
        ]
        apart = set().union(*regions)
        found = {
            register
            for name, block in blocks.items()
            for line in block.lines
            for register in _written(line)
            if name in apart or (register not in alike and _differs(line, differing))
        }
        if found <= differing:
            break
        differing |= found
    return [
        f"{name}: {line}"
        for name, block in blocks.items()
        for line in block.lines
        if _CONVERGENT.match(_bare(line)) and (name in apart or _guard(line) in differing)
    ]


def _reduced(blocks: dict[str, _Block]) -> set[str]:
    """Registers that have the same number in all lanes of a warp, as they were exchanged across all
    of them: with `redux`, or with five `shfl.bfly` of which each is followed by a sum or the like.

    A product that is contracted into such a sum (`fma`) is rounded in one lane's order, not in the
    other's, so its sum is not the same in all lanes.
    """
    lines = [line for block in blocks.values() for line in block.lines]
    written = [register for line in lines for register in _written(line)]
    exchanged: dict[str, tuple[str, str]] = {}
    across: dict[str, frozenset[str]] = {}
    found: set[str] = set()
    for line in lines:
        if _guard(line) or any(written.count(register) > 1 for register in _written(line)):
            continue
        if swap := re.match(r"shfl\.sync\.bfly\.b32\s+(%\w+), (%\w+), (\d+), 31, -1$", line):
            exchanged[swap[1]] = swap[2], swap[3]
        elif pair := re.match(r"(?:max|min|add)\.[\w.]+\s+(%\w+), (%\w+), (%\w+)$", line):
            for own, other in ((pair[2], pair[3]), (pair[3], pair[2])):
                if other in exchanged and exchanged[other][0] == own:
                    lanes = across.get(own, frozenset()) | {exchanged[other][1]}
                    across[pair[1]] = lanes
                    found |= {pair[1]} if lanes >= {"1", "2", "4", "8", "16"} else set()
        elif line.startswith("redux.sync"):
            found |= set(_written(line))
    return found


def _statements(ptx: str) -> Iterator[str]:
    """Labels, with a colon, and instructions, without their semicolon."""
    body = ptx[ptx.index(".entry") :]
    body = re.sub(r"//[^\n]*", "", body[body.index("{") + 1 :])
    for line in body.splitlines():
        text = line.strip()
        if re.fullmatch(r"\$?\w+:", text):
            yield text
            continue
        for part in text.split(";"):
            one = part.strip().strip("\t ")
            if not re.search(r"\{.*\}", one):
                one = one.strip("{} \t")
            if one and not one.startswith("."):
                yield one


def _blocks(ptx: str) -> dict[str, _Block]:
    blocks = {"entry": _Block()}
    current, number = "entry", 0
    for text in _statements(ptx):
        if text.endswith(":"):
            if not blocks[current].next:
                blocks[current].next = [text[:-1]]
            current = text[:-1]
            blocks[current] = _Block()
            continue
        block, bare = blocks[current], _bare(text)
        if bare.startswith("brx"):
            raise ValueError(f"jumps through a table are not understood: {text}")
        block.lines.append(text)
        if re.match(r"(bra|ret|exit|trap)\b", bare):
            target = bare.split()[-1] if bare.startswith("bra") else _EXIT
            block.guard = _guard(text)
            number += 1
            current = f"after {number}"
            block.next = [target, current] if block.guard else [target]
            blocks[current] = _Block()
    blocks[current].next = blocks[current].next or [_EXIT]
    reached = _reached(["entry"], blocks, without=None)
    return {name: block for name, block in blocks.items() if name in reached}


def _reached(starts: list[str], blocks: dict[str, _Block], without: str | None) -> set[str]:
    found: set[str] = set()
    waiting = list(starts)
    while waiting:
        name = waiting.pop()
        if name not in found and name != without:
            found.add(name)
            waiting += blocks[name].next if name != _EXIT else []
    return found


def _meeting(start: str, blocks: dict[str, _Block]) -> str:
    """The first block through which all paths from the end of this one pass to the exit."""
    after = blocks[start].next
    common = [
        name
        for name in _reached(after, blocks, without=None) - {_EXIT}
        if _EXIT not in _reached(after, blocks, without=name)
    ]
    # Of two of these the later is reached without the earlier by no path.
    for name in common:
        if not (_reached(after, blocks, without=name) & set(common)):
            return name
    return _EXIT


def _between(start: str, meeting: str, blocks: dict[str, _Block]) -> set[str]:
    return _reached(blocks[start].next, blocks, without=meeting) - {_EXIT}


def _guard(line: str) -> str | None:
    found = re.match(r"@!?(%?\w+)", line)
    return found[1] if found else None


def _bare(line: str) -> str:
    return re.sub(r"^@!?%?\w+\s+", "", line)


def _operands(line: str) -> tuple[str, str]:
    """What an instruction writes, and all that it reads, its guard included."""
    operation, _, rest = _bare(line).partition(" ")
    if not rest:
        operation, _, rest = _bare(line).partition("\t")
    guard = _guard(line) or ""
    if re.match(r"(st|red|bra|bar|cp|prefetch|ret)\b", operation):
        return "", f"{guard} {rest}"
    results = re.match(r"\s*(\{[^}]*\}|[^,]+)", rest)
    written = results[0] if results else ""
    return written, f"{guard} {operation} {rest[len(written) :]}"


def _written(line: str) -> list[str]:
    return _REGISTER.findall(_operands(line)[0])


def _differs(line: str, differing: set[str]) -> bool:
    _, read = _operands(line)
    return bool(
        _DIFFERING.match(_bare(line))
        or _OWN.search(read)
        or not differing.isdisjoint(_REGISTER.findall(read))
    )


def unordered_copies(machine_code: str) -> list[str]:
    """Stores to global memory after which a copy to shared memory (LDGSTS) may come without a
    barrier between them, on some path.

    `_decode` stores a row's new key and value, and copies them to shared memory with the others.
    What one thread stored, another one's copy reads. PTX's memory model orders the two by the
    block's barrier: it has both wait for each other, and makes accesses before it visible to all of
    the block after it. A fence is not needed besides: copies of this kind (`cp.async`, not
    `cp.async.bulk`) are weak accesses through the generic proxy, as the stores are. And a stale
    line of the first cache is not read: both go through that of one multiprocessor, to which stores
    are written through, or around it, with `.cg`.

    machine_code: of one kernel, as nvdisasm prints it. Raises ValueError for jumps through a table.
    """
    lines = re.findall(r"^(\.L\w+)(?=:)|^\s+/\*\w+\*/\s+(.+?) ;", machine_code, re.MULTILINE)
    labels: dict[str, int] = {}
    codes: list[str] = []
    for label, code in lines:
        if label:
            labels[label] = len(codes)
        else:
            codes.append(code)
    return [
        code for at, code in enumerate(codes) if _is(code, "STG") and _copies(at, codes, labels)
    ]


def _is(code: str, operation: str) -> bool:
    return re.match(rf"(@!?U?P\w+ )?{operation}\b", code) is not None


def _copies(start: int, codes: list[str], labels: dict[str, int]) -> bool:
    seen: set[int] = set()
    waiting = [start + 1]
    while waiting:
        at = waiting.pop()
        if at in seen or at >= len(codes):
            continue
        seen.add(at)
        code = codes[at]
        if _is(code, "LDGSTS"):
            return True
        if _is(code, "BRX|JMX"):
            raise ValueError(f"jumps through a table are not understood: {code}")
        if re.match(r"BAR\.SYNC", code):  # with a predicate, it may be passed
            continue
        jump = re.search(r"(?:BRA|CALL).*?(\.L\w+)", code)
        if jump:
            waiting.append(labels[jump[1]])
        if not re.match(r"(BRA(\.U)? `?\(?\.L|EXIT|RET)", code):
            waiting.append(at + 1)
    return False
