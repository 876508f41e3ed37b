"""`python -m tests.support.every_kernel`: compiles every kernel to PTX and asks whether its threads
meet.

Prints a JSON line for each: its name, what it was compiled for, and what `convergence.parted` finds
in it. Run it without TRITON_INTERPRET.
"""

import ast
import json
from collections.abc import Iterator

import torch

from penstock.engine.kernels.activation import add_gated, softcap
from penstock.engine.kernels.launch import overlap
from penstock.engine.kernels.sample.sampler import Mode
from penstock.engine.models.parts.experts.config import Experts
from penstock.engine.models.parts.experts.kernels.routing import route
from penstock.engine.models.parts.per_layer_inputs.kernels import add_table_rows, gate_input
from tests.bench.gpu import resources
from tests.support.compile_kernels import META, Launch, MetaModel, recorded
from tests.support.convergence import parted
from tests.support.paths import MODEL_CONFIGS, ROOT

# As DeepSeek-V3 routes.
_EXPERTS = Experts(
    hidden_size=7168,
    num_experts=256,
    num_per_token=8,
    size=2048,
    is_normed=True,
    has_sigmoids=True,
    has_corrections=True,
    num_groups=8,
    num_groups_used=4,
    num_best=2,
    weight_factor=2.5,
)


def names() -> set[str]:
    """All functions that the engine's sources launch on a GPU."""
    found: set[str] = set()
    compiled: set[str] = set()
    for file in (ROOT / "engine").rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Subscript):
                found.add(ast.unparse(node.func.value))
            elif isinstance(node, ast.FunctionDef) and "triton.jit" in str(
                [ast.unparse(one) for one in node.decorator_list]
            ):
                compiled.add(node.name)
    return found & compiled


def launches() -> Iterator[Launch]:
    """Those of the table of resources, of requests with filters and adjustments, and of models that
    it has no row of. May have a kernel more than once."""
    yield from resources.launches()
    for path in sorted(MODEL_CONFIGS.iterdir()):
        model = MetaModel(path)
        for mode in Mode:
            with overlap(True):
                yield from model.sampling_launches(mode)
    x, ids = _empty(7, 2048), torch.empty(7, dtype=torch.int32, device=META)
    with overlap(True), recorded() as others:
        softcap(_empty(7, 262_144), 30.0)
        add_gated(x, _empty(1, 2048), x, x)
        inputs = _empty(7, 30, 256)
        add_table_rows(inputs, ids, _empty(1000, 30 * 256), _empty(256), 1e-6, 0.5)
        gate_input(_empty(7, 256), inputs, 3)
        route(_empty(7, 256).float(), _EXPERTS, corrections=_empty(256).float())
    yield from others


def _empty(*shape: int) -> torch.Tensor:
    return torch.empty(shape, dtype=torch.bfloat16, device=META)


def main() -> None:
    seen: set[str] = set()
    for one in launches():
        if one.key not in seen:
            seen.add(one.key)
            print(json.dumps([one.name, str(one.constants), parted(one.ptx(90))]), flush=True)


if __name__ == "__main__":
    main()
