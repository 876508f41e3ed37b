"""Whether a compiled kernel's threads meet where the hardware needs them to, and in which order it
stores and copies.

Triton up to 3.6 runs LLVM's passes without a target. LLVM then takes no account of threads that
part, and jump threading may lead some of a block's threads into `bar.sync` or `ldmatrix` around the
place where all of them would have met (triton-lang/triton#11153, llvm/llvm-project#213868). Nothing
fails when that is compiled, and Triton's interpreter does not show it. So the PTX is read: no such
instruction may be between a branch that threads take differently and the first block through which
all paths from that branch pass, where the assembler lets them meet again.

A branch is taken by all threads alike if what it depends on is: see `tests.support.thread_bits`.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass, field

from tests.support.thread_bits import ThreadBits

_CONVERGENT = re.compile(
    r"(bar|barrier|shfl|vote|match|redux|ldmatrix|stmatrix|mma|wgmma|elect|activemask|setmaxnreg)\b"
)
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
    regions = {
        name: _between(name, _meeting(name, blocks), blocks)
        for name, block in blocks.items()
        if block.guard
    }
    num_threads = int(re.findall(r"\.reqntid (\d+)", ptx)[0])
    bits = ThreadBits([block.lines for block in blocks.values()], num_threads)
    while True:
        apart = dict.fromkeys(blocks, 0)
        for name, region in regions.items():
            for inside in region:
                apart[inside] |= bits.any(blocks[name].guard)
        found = [bits.note(block.lines, apart[name]) for name, block in blocks.items()]
        if not any(found):
            break
    return [
        f"{name}: {line}"
        for name, block in blocks.items()
        for line in block.lines
        if _CONVERGENT.match(_bare(line)) and (apart[name] or bits.any(_guard(line)))
    ]


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
    targets = set(re.findall(r"\bbra(?:\.uni)?\s+(\$?\w+)", ptx))
    for text in _statements(ptx):
        if text.endswith(":") and text[:-1] not in targets:
            continue
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
