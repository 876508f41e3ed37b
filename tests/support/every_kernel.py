"""`python -m tests.support.every_kernel`: compiles every kernel to PTX and asks whether its threads
meet.

Prints a JSON line for each: its name, what it was compiled for, and what `convergence.parted` finds
in it. Run it without TRITON_INTERPRET.
"""

import ast
import json
from collections.abc import Iterator
from dataclasses import replace

import torch

from penstock.engine.kernels.activation import add_gated, softcap
from penstock.engine.kernels.attention.paged.attention import PagedAttention
from penstock.engine.kernels.attention.protocol import LayerContext
from penstock.engine.kernels.attention.shape import AttentionShape
from penstock.engine.kernels.launch import overlap
from penstock.engine.kernels.sample.sampler import Mode
from penstock.engine.models.parts.attention.rope import RopeConfig
from penstock.engine.models.parts.attention.rotary import Angles
from penstock.engine.models.parts.experts.config import Experts
from penstock.engine.models.parts.experts.kernels.routing import route
from penstock.engine.models.parts.latent_attention.config import LatentAttention
from penstock.engine.models.parts.latent_attention.kernels.products import head_products
from penstock.engine.models.parts.latent_attention.kernels.tokens import rotate_and_store_latents
from penstock.engine.models.parts.per_layer_inputs.kernels import add_table_rows, gate_input
from penstock.engine.step.device_step import DeviceStep
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
        if any(each.rope and each.rope.sections for each in model.config.attentions):
            with overlap(True):
                yield from model.launches(16, has_inserts=True)
                yield from model.launches(7, 1024, has_inserts=True)
    x, ids = _empty(7, 2048), torch.empty(7, dtype=torch.int32, device=META)
    with overlap(True), recorded() as others:
        softcap(_empty(7, 262_144), 30.0)
        add_gated(x, _empty(1, 2048), x, x)
        inputs = _empty(7, 30, 256)
        add_table_rows(inputs, ids, _empty(1000, 30 * 256), _empty(256), 1e-6, 0.5)
        gate_input(_empty(7, 256), inputs, 3)
        route(_empty(7, 256).float(), _EXPERTS, corrections=_empty(256).float())
        _launch_latents()
        _launch_spans()
    yield from others


def _launch_latents() -> None:
    """As DeepSeek-V3's attention does, of which the heads of a rank are here."""
    config = LatentAttention(
        hidden_size=7168, num_heads=16, latent_dim=512, rope_dim=64, nope_dim=128, value_dim=128,
        rope=RopeConfig(theta=1e4), scale=0.1,
    )  # fmt: skip
    positions, keys = torch.empty(7, dtype=torch.int32, device=META), _empty(9, 64, 1, 576)
    table = torch.empty(100, 32, device=META)
    step = DeviceStep(
        token_ids=positions, positions=positions, kv_slots=positions.long(), slots=positions,
        context_lens=positions, num_decodes=7, chunk_starts=None, block_tables=positions.view(1, 7),
    )  # fmt: skip
    query, heads = _empty(7, 16, 576), _empty(7, 16, 192)
    angles = Angles(table, table, table[:, 0].contiguous(), 64)
    rotate_and_store_latents(
        config, _empty(7, 576), heads, _empty(512), angles, step, keys, query
    )  # fmt: skip
    head_products(heads[..., :128], _empty(16, 512, 128), query[..., :512])
    shape = AttentionShape(
        num_heads=16, num_kv_heads=1, head_dim=576, block_size=64, latent_dim=512
    )  # fmt: skip
    attention = PagedAttention({shape: [None]}, 16, 64, 132, META, torch.bfloat16)
    attention.plan(step)
    context = LayerContext(keys, keys[..., :512], None)
    attention(query, context, step, _empty(7, 16, 512))
    chunk = replace(step, num_decodes=0, chunk_starts=positions[:2], slots=positions[:1])
    chunk = replace(chunk, context_lens=positions[:1])
    attention.plan(chunk)
    attention(query, context, chunk, _empty(7, 16, 512))


def _launch_spans() -> None:
    """A prompt with an image, in a layer of Gemma 3's."""
    shape = AttentionShape(num_heads=8, num_kv_heads=4, head_dim=256, block_size=64)
    numbers, keys = torch.empty(300, dtype=torch.int32, device=META), _empty(9, 64, 4, 256)
    step = DeviceStep(
        token_ids=numbers, positions=numbers, kv_slots=numbers.long(), slots=numbers[:1],
        context_lens=numbers[:1], num_decodes=0, chunk_starts=numbers[:2],
        block_tables=numbers[:7].view(1, 7), reaches=numbers,
    )  # fmt: skip
    attention = PagedAttention({shape: [1024]}, 16, 512, 132, META, torch.bfloat16)
    attention.plan(step)
    query = _empty(300, 8, 256)
    attention(query, LayerContext(keys, keys, 1024, None, True), step, torch.empty_like(query))


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
