"""Reads the declarations of C structures: Python fills in what the C++ is compiled with, so that a
field has one description."""

import ctypes
import re
from ctypes import Structure
from functools import cache

from penstock.engine.native.compiler import ENGINE

_STRUCT = r"^struct {} \{{\n(.*?)^\}};"
_DECLARATION = re.compile(r"(?:const )?(\w+) (.+)", re.DOTALL)
_FIELD = re.compile(r"(\*?)(\w+)(?:\[(\d+)\])?")
_NUMBERS = {"int64_t": ctypes.c_int64, "double": ctypes.c_double, "AllReduce": ctypes.c_void_p}


@cache
def structure(name: str, source: str = "native/step/structs.h") -> type[Structure]:
    """Returns the structure that a source in the engine's folder declares.

    It may have numbers, pointers, structures that the same source declares, and arrays of these;
    a ValueError names anything else, whose place is not known here.
    """
    text = re.sub(r" *//[^\n]*", "", (ENGINE / source).read_text(encoding="utf-8"))
    found = re.search(_STRUCT.format(name), text, re.DOTALL | re.MULTILINE)
    if found is None:
        raise ValueError(f"{source} declares no structure {name}")
    fields: list[tuple[str, type]] = []
    *declarations, rest = found[1].split(";")
    for declaration in (*declarations, *([rest] if rest.strip() else [])):
        read = _DECLARATION.fullmatch(declaration.strip())
        parts = [_FIELD.fullmatch(each.strip()) for each in read[2].split(",")] if read else [None]
        for part in parts:
            if read is None or part is None:
                raise ValueError(f"{source}: {name} has a field that Python cannot read:{declaration}")
            kind = ctypes.c_void_p if part[1] else _NUMBERS.get(read[1]) or structure(read[1], source)
            fields.append((part[2], kind * int(part[3]) if part[3] else kind))
    # Without a dictionary, so that a field that is not declared cannot be set.
    return type(name, (Structure,), {"__slots__": (), "_fields_": fields})
