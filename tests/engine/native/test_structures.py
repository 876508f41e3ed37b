"""Structures as the C++ declares them: Python has the same fields at the same places."""

import ctypes
import os
import re
import subprocess
from ctypes import Structure
from pathlib import Path

import pytest
import torch

from penstock.engine.native import compiler
from penstock.engine.native.packing import Packer
from penstock.engine.native.structures import structure
from tests.support.compiler import needs_compiler

HEADER = compiler.ENGINE / "native/step/structs.h"
NAMES = re.findall(r"^struct (\w+)", HEADER.read_text(), re.MULTILINE)


def places(of: type[Structure]) -> list[tuple[str, int, int]]:
    """Each field's name, offset and size; after them the size of all."""
    fields = [name for name, *_ in of._fields_]
    each = [(name, getattr(of, name).offset, getattr(of, name).size) for name in fields]
    return [*each, ("", ctypes.sizeof(of), 0)]


def compiled_places(header: Path, directory: Path) -> dict[str, list[tuple[str, int, int]]]:
    """The same as the compiler has them."""
    lines = []
    for name in NAMES:
        for field, *_ in structure(name, str(header))._fields_:
            at = f"offsetof({name}, {field}), sizeof({name}::{field})"
            lines.append(f'printf("{name} {field} %zu %zu\\n", {at});')
        lines.append(f'printf("{name}  %zu 0\\n", sizeof({name}));')
    source, program = directory / "places.cpp", directory / "places"
    source.write_text(
        f'#include <cstddef>\n#include <cstdio>\n#include "{header}"\nint main() {{\n'
        + "\n".join(lines)
        + "\n}\n"
    )
    command = [os.environ.get("CXX", "g++"), "-std=c++20", f"-I{compiler.ENGINE}", str(source)]
    subprocess.run([*command, "-o", str(program)], check=True)
    found: dict[str, list[tuple[str, int, int]]] = {name: [] for name in NAMES}
    printed = subprocess.run([program], capture_output=True, text=True, check=True).stdout
    for line in printed.splitlines():
        name, field, offset, size = line.split(" ")
        found[name].append((field, int(offset), int(size)))
    return found


@needs_compiler
def test_every_field_is_where_the_compiler_has_it(tmp_path: Path) -> None:
    compiled = compiled_places(HEADER, tmp_path)
    assert compiled == {name: places(structure(name)) for name in NAMES}
    assert len(NAMES) > 15


@needs_compiler
def test_a_field_that_moves_in_the_header_moves_in_python(tmp_path: Path) -> None:
    swapped = tmp_path / "structs.h"
    text = HEADER.read_text()
    assert "double eps;\n    const Layer *layers;" in text
    swapped.write_text(
        text.replace(
            "double eps;\n    const Layer *layers;", "const Layer *layers;\n    double eps;"
        )
    )
    ours = places(structure("Model", str(swapped)))
    assert ours == compiled_places(swapped, tmp_path)["Model"]
    assert ours != places(structure("Model"))


@pytest.mark.parametrize(
    "field", ["int32_t count;", "void (*call)(int64_t);", "int64_t count = 0;", "int64_t a : 3;"]
)
def test_a_field_whose_place_is_not_known_is_refused(field: str, tmp_path: Path) -> None:
    header = tmp_path / "odd.h"
    header.write_text(f"struct Odd {{\n    int64_t first;\n    {field}\n}};\n")
    with pytest.raises(ValueError, match="declares"):
        structure("Odd", str(header))


def test_a_field_that_is_not_declared_cannot_be_set() -> None:
    with pytest.raises(AttributeError, match="hiden"):
        structure("Model")(hiden=64)


def test_a_field_that_nothing_is_given_for_ends_the_packing() -> None:
    packer = Packer(ctypes.CDLL(None), torch.float32)
    with pytest.raises(AttributeError, match="is given for the field"):
        packer.filled("PerLayerInputs", object())
