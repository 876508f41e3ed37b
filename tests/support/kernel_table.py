"""`python -m tests.support.kernel_table MODEL_DIR...`: what this compiler makes of our kernels.

A line for each kernel that the models' steps launch, compiled for Hopper, with what is over its
limit; the exit status is 1 if anything is. `make kernel-table` runs it with the Triton version that
the images and GPU machines have, which may not be the one that the tests use.
"""

import re
import sys
from itertools import product
from pathlib import Path
from typing import Any

import triton

from penstock.engine.kernels import launch
from penstock.engine.kernels.sample.sampler import Mode
from penstock.engine.memory.pool.kv_codes import LIMITS
from tests.support.compile_kernels import QUANTIZED, MetaModel
from tests.support.multiprocessor import ROOM, WHOLE, room_of

Entry = dict[str, Any]

# Of an H100 or H200, from the CUDA programming guide: of a block.
_MAX_BLOCK_SHARED = 227 * 1024
# Words that are spilled across a loop cost nothing, and few that are read again in it little.
_MAX_SPILLS = 8
# What reads weights or keys hides the memory's latency behind copies that run ahead, and multiplies
# on the matrix units. Those of Hopper (HGMMA) take 64 rows at least.
_PRODUCTS = {
    **{"_skinny": "HMMA", "_skinny_grouped": "HMMA", "_tiled": "HGMMA"},
    **{"_decode": "HMMA", "_prefill": "HGMMA"},
}
# Programs that must fit a multiprocessor at once, for as many bytes in flight as the memory needs.
_LEAST_PROGRAMS = {"_decode": 3, "_skinny": 1, "_prefill": 1}
# Of the decodes of larger heads, whose tiles have twice as many bytes.
_WIDE_HEAD, _LEAST_WIDE = 128, 2


def programs_that_fit(entry: Entry) -> int:
    """On one multiprocessor."""
    return WHOLE.times(room_of(**{name: entry[name] for name in ROOM}))


def faults(entry: Entry) -> list[str]:
    """What is over a limit, in words."""
    name, instructions = entry["kernel"], entry["instructions"]
    found = []
    if entry["shared_bytes"] > _MAX_BLOCK_SHARED:
        found.append(f"{entry['shared_bytes']} bytes of shared memory")
    if entry["spills"] > _MAX_SPILLS:
        found.append(f"{entry['spills']} times a spilled register is moved")
    if entry["is_overlapped"] and entry["before_wait"] != []:
        found.append(f"before it waits: {entry['before_wait']}")
    if entry["is_overlapped"] and entry["wait"] != ["PREEXIT", "ACQBULK"]:
        found.append(f"it lets the next kernel start and waits in this order: {entry['wait']}")
    if entry["narrow_offsets"]:
        found.append(f"addresses in 32 bits: {entry['narrow_offsets']}")
    if name in _PRODUCTS and not {"LDGSTS", "UTMALDG"} & instructions.keys():
        found.append("no copies run ahead")
    if name in _PRODUCTS and _PRODUCTS[name] not in instructions:
        found.append(f"no {_PRODUCTS[name]}")
    least = _LEAST_PROGRAMS.get(name, 1)
    if entry["constants"].get("HEAD_DIM", 0) > _WIDE_HEAD:
        least = min(least, _LEAST_WIDE)
    if entry["constants"].get("REST"):  # of latents
        least = 1
    if programs_that_fit(entry) < least:
        found.append(f"{programs_that_fit(entry)} programs fit a multiprocessor")
    return found


# Steps of decodes, a tile of codes for each.
_TILED = ((32, 0), (128, 0))
_CODES = {"*i8": "int8", "*u8": "fp8"}
_COLUMNS = ("warps", "registers", "stack", "shared", "ahead", "hmma", "hgmma", "fit")
HEADER = f"{'kernel':<22} {'variant':<30}" + "".join(f"{name:>10}" for name in _COLUMNS)


def line(entry: Entry) -> str:
    instructions = entry["instructions"]
    columns = (
        entry["warps"],
        entry["registers"],
        entry["stack_bytes"],
        entry["shared_bytes"],
        instructions.get("LDGSTS", 0) + instructions.get("UTMALDG", 0),
        instructions.get("HMMA", 0),
        instructions.get("HGMMA", 0),
        programs_that_fit(entry),
    )
    figures = "".join(f"{figure:>10}" for figure in columns)
    found = "; ".join(faults(entry))
    return f"{entry['kernel']:<22} {variant(entry):<30}{figures}  {found}".rstrip()


def variant(entry: Entry) -> str:
    """What distinguishes it from others of its name."""
    flags = [
        re.sub(r"^(HAS|IS)_", "", name).lower()
        for name, value in entry["constants"].items()
        if value is True and name != "PDL"
    ]
    if "BITS" in entry["constants"]:
        is_float = entry["types"]["codes"] == "*u8" and entry["constants"]["BITS"] == 8
        flags.append("fp8" if is_float else f"int{entry['constants']['BITS']}")
    if "ROWS" in entry["constants"]:
        flags.append(f"rows {entry['constants']['ROWS']}")
    if entry["types"].get("keys") in _CODES:
        flags.append(_CODES[entry["types"]["keys"]])
    if entry["types"].get("logits") == "*fp32":
        flags.append("float32 logits")
    return ", ".join(flags)


def main(model_dirs: list[str]) -> int:
    print(f"Triton {triton.__version__}\n{HEADER}", flush=True)
    seen: set[str] = set()
    num_faults = 0
    models = [
        MetaModel(Path(model_dir), kv_dtype=kv_dtype)
        for model_dir, kv_dtype in product(model_dirs, (None, *LIMITS))
    ]
    # Codes of weights make no difference but to the layers' size.
    models += [MetaModel(Path(model_dirs[-1]), codes=codes) for codes in QUANTIZED.values()]
    for model in models:
        with launch.overlap(True):
            launches = [one for mode in Mode for one in model.sampling_launches(mode)]
            for num_decodes, chunk in ((1, 0), (16, 0), (64, 0), (256, 0), (7, 1024), *_TILED):
                launches += model.launches(num_decodes, chunk)
        for one in launches:
            if one.key not in seen:
                seen.add(one.key)
                entry = one.compile(90)
                num_faults += len(faults(entry))
                print(line(entry), flush=True)
    print(f"{len(seen)} kernels, {num_faults} over a limit")
    return 1 if num_faults else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
