"""Reads the declarations of C structures: Python fills in what the C++ is compiled with, so that a
field has one description."""

import ctypes
import re
from collections.abc import Iterator
from ctypes import Structure
from functools import cache
from threading import Lock

from penstock.engine.native.compiler import ENGINE

# Threads that ask for the same structure get the same one.
_ONE_THREAD = Lock()
_STRUCT = r"^struct {} \{{\n(.*?)^\}};"
_DECLARATION = re.compile(r"(?:const )?(\w+) (.+)", re.DOTALL)
_FIELD = re.compile(r"(\*?)(\w+)(?:\[(\d+)\])?")
_Kind = ctypes.c_int64 | ctypes.c_double | ctypes.c_void_p | Structure
_NUMBERS: dict[str, type[_Kind]] = {
    "int64_t": ctypes.c_int64,
    "double": ctypes.c_double,
    "AllReduce": ctypes.c_void_p,
}


def structure(name: str, source: str = "native/step/structs.h") -> type[Structure]:
    """Returns the structure that a source in the engine's folder declares.

    It may have numbers, pointers, structures that the same source declares, and arrays of these;
    a ValueError names anything else, whose place is not known here.
    """
    with _ONE_THREAD:
        return _structure(name, source)


@cache
def _structure(name: str, source: str) -> type[Structure]:
    text = re.sub(r" *//[^\n]*", "", (ENGINE / source).read_text(encoding="utf-8"))
    found = re.search(_STRUCT.format(name), text, re.DOTALL | re.MULTILINE)
    if found is None:
        raise ValueError(f"{source} declares no structure {name}")
    declarations = (each.strip() for each in found[1].split(";"))
    fields = [field for each in declarations if each for field in _fields(each, source)]
    # Without a dictionary, so that a field that is not declared cannot be set.
    return type(name, (Structure,), {"__slots__": (), "_fields_": fields})


def _fields(declaration: str, source: str) -> Iterator[tuple[str, type]]:
    read = _DECLARATION.fullmatch(declaration)
    names = [_FIELD.fullmatch(name.strip()) for name in read[2].split(",")] if read else [None]
    for name in names:
        if read is None or name is None:
            raise ValueError(f"{source} declares what Python cannot read: {declaration}")
        kind: type[_Kind] = ctypes.c_void_p
        if not name[1]:
            kind = _NUMBERS.get(read[1]) or _structure(read[1], source)
        yield name[2], kind * int(name[3]) if name[3] else kind
