"""`python -m tests.bench.gpu.resources --write`: registers and shared memory of every kernel.

By them, a number of programs fits a multiprocessor at once. `resources.json` keeps them, because
compiling takes a minute, and needs the version of Triton that GPU machines have:

    make kernel-table
    PYTHONPATH=build/triton-3.6.0 python -m tests.bench.gpu.resources --write

It also keeps a hash of the kernels' sources, without comments: a test fails where they have changed
since.
"""

import ast
import hashlib
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tests.bench.gpu.goals import LLAMA, QWEN
from tests.support.paths import MODEL_CONFIGS, ROOT

if TYPE_CHECKING:
    from tests.support.compile_kernels import Launch

FILE = Path(__file__).with_name("resources.json")
_SOURCES = ("kernels", "models/parts")
_FIELDS = ("warps", "registers", "shared_bytes", "stack_bytes", "loop", "inner")


def known() -> dict[str, Any]:
    """`triton` (its version), `sources` (a hash), and `kernels` by `launches.key`."""
    found: dict[str, Any] = json.loads(FILE.read_text(encoding="utf-8"))
    return found


def sources() -> str:
    """A hash of all that Triton compiles, in whatever files it is."""
    kernels: list[str] = []
    for folder in _SOURCES:
        for file in (ROOT / "engine" / folder).rglob("*.py"):
            for node in ast.parse(file.read_text(encoding="utf-8")).body:
                if isinstance(node, ast.FunctionDef) and _is_kernel(node):
                    if ast.get_docstring(node):
                        node.body = node.body[1:] or [ast.Pass()]
                    kernels.append(ast.unparse(node))
    return hashlib.sha256("".join(sorted(kernels)).encode()).hexdigest()[:16]


def _is_kernel(function: ast.FunctionDef) -> bool:
    return any("triton.jit" in ast.unparse(decorator) for decorator in function.decorator_list)


def launches() -> Iterator["Launch"]:
    """Of all models' steps, where the interpreter is off. May have a kernel more than once."""
    import torch

    from penstock.engine.kernels.launch import overlap
    from penstock.engine.kernels.sample.sampler import Mode
    from tests.support.compile_kernels import MOST_DRAFTS, QUANTIZED, MetaModel

    models = [MetaModel(path, max_rows=256) for path in sorted(MODEL_CONFIGS.iterdir())]
    models += [
        MetaModel(MODEL_CONFIGS / QWEN, max_rows=256, codes=codes) for codes in QUANTIZED.values()
    ]
    fp8 = QUANTIZED["fp8"]
    models.append(MetaModel(MODEL_CONFIGS / LLAMA, max_rows=256, codes=fp8))
    models += [
        MetaModel(MODEL_CONFIGS / name, max_rows=256, kv_dtype=torch.float8_e4m3fn)
        for name in (LLAMA, QWEN)
    ]
    kinds = [(model, False) for model in models]
    kinds.append((MetaModel(MODEL_CONFIGS / QWEN, max_rows=256), True))
    for model, has_adapters in kinds:
        with overlap(True):
            found = model.sampling_launches(Mode.PLAIN)
            if not (model.model.has_states or has_adapters):
                for num_drafts in (1, 3, MOST_DRAFTS):
                    found += model.drafted_launches(64, num_drafts)
            for num_decodes, chunk in (
                (1, 0),
                (16, 0),
                (32, 0),
                (64, 0),
                (128, 0),
                (256, 0),
                (7, 1024),
            ):
                found += model.launches(num_decodes, chunk, has_adapters=has_adapters)
        yield from found


def _compiled() -> dict[str, Any]:
    """Where the interpreter is off."""
    import triton

    from tests.bench.gpu.keys import key
    from tests.support.kernel_table import programs_that_fit

    kernels: dict[str, Any] = {}
    for one in launches():
        name = key(one.name, one.constants, one.types, one.options)
        if name not in kernels:
            entry = one.compile(90)
            figures = {field: entry[field] for field in _FIELDS}
            kernels[name] = figures | {"fit": programs_that_fit(entry)}
    kernels = dict(sorted(kernels.items()))
    return {"triton": triton.__version__, "sources": sources(), "kernels": kernels}


if __name__ == "__main__":
    text = json.dumps(_compiled(), indent=1) + "\n"
    if "--write" in sys.argv:
        FILE.write_text(text, encoding="utf-8")
    else:
        print(text, end="")
