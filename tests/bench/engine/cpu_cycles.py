"""`python -m tests.bench.engine.cpu_cycles [CHECKOUT]`: what llvm-mca makes of products with codes.

For a machine without AVX-512: prints the multiply-adds a cycle that the tiles of grouped.h and
blocks.h come to with one, eight and 32 rows, by the assembly that g++ makes of the sources in
CHECKOUT (this one). It is a model of the pipes: it has no caches, takes no branch for mispredicted,
and knows no more of a processor than LLVM's tables. Needs g++ and llvm-mca of LLVM 19 ($LLVM_MCA).
"""

import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from tests.support.paths import ROOT

_FLAGS = ("-std=c++20", "-O3", "-fPIC", "-falign-functions=64")
# GCC 12.2 knows no znver4.
_AVX512 = ("f", "dq", "cd", "bw", "vl", "ifma", "vbmi", "vbmi2", "vnni", "bitalg", "vpopcntdq")
_MARCH = {
    "znver4": ("-march=znver3", *(f"-mavx512{each}" for each in _AVX512)),
    "sapphirerapids": ("-march=sapphirerapids",),
    "icelake-server": ("-march=icelake-server",),
}
_BAND = 32
_NUM_ROWS = (1, 8, 32)
_REPEATS = 60


class _Format(NamedTuple):
    """name: of a mangled function, without its rows. columns: of a group. passes: of the innermost
    loop in a group."""

    title: str
    function: str
    columns: int
    passes: int
    source: str


_FORMATS = (
    _Format("int8, groups of 32", "groupedX{}EL4Kind0ELb0", 32, 8, "kBytes, false"),
    _Format("int8, groups of 128", "groupedX{}EL4Kind0ELb0", 128, 32, "kBytes, false"),
    _Format("int4, groups of 32", "groupedX{}EL4Kind1ELb0", 32, 4, "kNibbles, false"),
    _Format("int4, groups of 128", "groupedX{}EL4Kind1ELb0", 128, 16, "kNibbles, false"),
    _Format("int4 with zeros, 128", "groupedX{}EL4Kind1ELb1", 128, 16, "kNibbles, true"),
    _Format("IQ4_XS", "blocksX{}ELi4ELb1ELb0", 32, 2, "4, true, false"),
    _Format("Q4_K", "blocksX{}ELi4ELb0ELb1", 32, 2, "4, false, true"),
    _Format("Q5_K", "blocksX{}ELi5ELb0ELb1", 32, 2, "5, false, true"),
    _Format("Q6_K", "blocksX{}ELi6ELb0ELb0", 16, 1, "6, false, false"),
)
_ARGUMENTS = {
    "grouped": "const Grouped &, const unsigned char *, int64_t, int64_t, int64_t, float *, "
    "int64_t",
    "blocks": "const Blocks &, const float *, int64_t, int64_t, int64_t, float *, int64_t",
}


def main() -> None:
    checkout = Path(sys.argv[1]) if len(sys.argv) > 1 else ROOT
    print("multiply-adds a cycle |", *(f"{cpu} {rows} |" for cpu in _MARCH for rows in _NUM_ROWS))
    compiled = {cpu: _compiled(checkout, march) for cpu, march in _MARCH.items()}
    for each in _FORMATS:
        rates = []
        for cpu, assembly in compiled.items():
            functions = _functions(assembly)
            most = int(re.search(r"^most_rows:\s+\.long\s+(\d+)", assembly, re.MULTILINE)[1])  # type: ignore[index]
            for rows in _NUM_ROWS:
                cycles = sum(_cycles(functions, each, cpu, part) for part in _tiles(rows, most))
                rates.append(f"{rows * each.columns * _BAND / cycles:.1f} |")
        print(f"{each.title} |", *rates, flush=True)


def _tiles(rows: int, most: int) -> list[int]:
    """As multiply_grouped cuts rows."""
    num = -(-rows // most)
    return [(tile + 1) * rows // num - tile * rows // num for tile in range(num)]


def _compiled(checkout: Path, march: Sequence[str]) -> str:
    lines = [
        '#include "native/products/blocks.h"',
        'extern "C" const int most_rows = kGroupedRows;',
    ]
    kinds = {(each.function.split("X")[0], each.source) for each in _FORMATS}
    for family, kind in sorted(kinds):
        lines += (
            f"template void multiply_{family}_tile<{rows}, {kind}>"
            f"(const CodedRows &, int64_t, {_ARGUMENTS[family]});"
            for rows in range(1, 9)
        )
    with tempfile.TemporaryDirectory() as directory:
        source, assembly = Path(directory, "tiles.cpp"), Path(directory, "tiles.s")
        source.write_text("\n".join(lines))
        include = f"-I{checkout / 'engine'}"
        command = ("g++", *_FLAGS, *march, include, "-S", str(source), "-o", str(assembly))
        subprocess.run(command, check=True)
        return assembly.read_text()


def _functions(assembly: str) -> dict[str, list[str]]:
    """Labels and instructions of each function."""
    functions: dict[str, list[str]] = {}
    lines: list[str] = []
    for line in assembly.splitlines():
        text = line.split("#")[0].strip()
        if re.match(r"_Z\w+:", text):
            lines = functions[text[:-1]] = []
        elif re.match(r"\.L\w+:", text) or (text and not text.startswith(".")):
            lines.append(text)
    return functions


def _cycles(functions: dict[str, list[str]], of: _Format, cpu: str, rows: int) -> float:
    """Of one group of a tile."""
    wanted = "multiply_" + of.function.format(rows).replace("X", "_tileILi")
    lines = next(lines for name, lines in functions.items() if wanted in name)
    path = _path_of_group(lines, of.passes)
    assert sum("vpdpbusd" in line for line in path) == rows * of.columns * _BAND / 64, path
    path = [_modelled(line, cpu) for line in path]
    command = (os.environ.get("LLVM_MCA", "llvm-mca-19"), f"-mcpu={cpu}")
    done = subprocess.run(
        (*command, f"-iterations={_REPEATS}"),
        input="\n".join((*path, ".Lnext:\n")),
        capture_output=True,
        text=True,
        check=True,
    )
    total = re.search(r"Total Cycles:\s+(\d+)", done.stdout)
    assert total
    return int(total[1]) / _REPEATS


def _path_of_group(lines: Sequence[str], passes: int) -> list[str]:
    """The instructions of one pass of the loop over groups.

    Branches go back as often as there are passes of the loop over columns, and forward only over a
    jump: what else is there, such as scales of 16 bits in grouped.h, is left out.
    """
    labels = {line[:-1]: at for at, line in enumerate(lines) if line.endswith(":")}

    def target(at: int) -> int:
        jump = re.match(r"j\w+\s+(\.L\w+)", lines[at])
        return labels.get(jump[1], len(lines)) if jump else len(lines)

    loops = [(target(at), at) for at in range(len(lines)) if target(at) <= at]
    whole = [
        (first, last)
        for first, last in loops
        if all(
            any(word in line for line in lines[first:last])
            for word in ("vpdpbusd", "vcvtdq2ps", "vfmadd")
        )
    ]
    first, last = min(whole, key=lambda loop: loop[1] - loop[0])
    path: list[str] = []
    taken: dict[int, int] = {}
    at = first
    while at != last:
        line = lines[at]
        if not line.endswith(":"):
            path.append(line)
        if line.startswith("jmp"):
            at = target(at)
        elif target(at) <= at and taken.setdefault(at, 1) < passes:
            taken[at] += 1
            at = target(at)
        elif target(at) < last and lines[at + 1].startswith("jmp"):
            at = target(at)
        else:
            at += 1
    return path


def _modelled(line: str, cpu: str) -> str:
    """The line as the processor's tables should have it."""
    if line.startswith("j"):
        return line.split()[0] + " .Lnext"
    if cpu == "znver4":
        # LLVM 19 has vpdpbusd once in two cycles, and a processor has been measured at more: it
        # takes the pipes of a multiply-add, and as long. And a broadcast from memory is a load.
        line = line.replace("vpdpbusd", "vfmadd231ps")
        line = re.sub(r"^v(?:pbroadcastd|broadcastss)(\s+\S*\()", r"vmovups\1", line)
    return line


if __name__ == "__main__":
    main()
