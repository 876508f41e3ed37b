"""What is between the products and attention to latents agrees with torch."""

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", reason="Triton is not installed; pip install 'penstock[dev]'")

from penstock.engine.memory.pool.kv_codes import LIMITS, Codes, KVPages, decode, store
from penstock.engine.models.parts.attention.rope import RopeConfig
from penstock.engine.models.parts.attention.rotary import Angles, rotary_table, rotate
from penstock.engine.models.parts.latent_attention.config import LatentAttention
from penstock.engine.models.parts.latent_attention.kernels.products import head_products
from penstock.engine.models.parts.latent_attention.kernels.tokens import rotate_and_store_latents
from penstock.engine.models.parts.norm.layer import rms_norm
from penstock.engine.step.device_step import DeviceStep
from tests.support.kernels import DEVICE, DTYPES, TOLERANCE, error, poisoned, random

POSITIONS = torch.tensor([0, 7, 40, 3, 99], dtype=torch.int32, device=DEVICE)
SLOTS = torch.tensor([5, 0, 30, 11, 12], dtype=torch.int64, device=DEVICE)


def config(**changes: object) -> LatentAttention:
    settings: dict[str, object] = {
        "hidden_size": 64,
        "num_heads": 18,  # more than a program has
        "latent_dim": 40,
        "rope_dim": 12,
        "nope_dim": 20,
        "value_dim": 24,
        "rope": RopeConfig(theta=10_000.0),
        "scale": 0.3,
    }
    return LatentAttention(**(settings | changes))  # type: ignore[arg-type]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("num_tokens", [1, 16, 17, 150])
@pytest.mark.parametrize("has_factors", [False, True])
def test_each_head_has_a_matrix_of_its_own(
    num_tokens: int, dtype: torch.dtype, has_factors: bool
) -> None:
    """Of which one is transposed, and both are views of wider tensors."""
    x = random(num_tokens, 3, 50, dtype=dtype)[..., :44]
    both = random(3, 70, 44, dtype=dtype)
    positions = torch.arange(num_tokens, dtype=torch.int32, device=DEVICE) % 9
    factors = random(9) if has_factors else None
    scale = 1.0 if factors is None else factors[positions.long()].view(-1, 1, 1)
    for weight in (both[:, 2:], random(3, 44, 68, dtype=dtype).transpose(1, 2)):
        wide = poisoned(num_tokens, 3, 80, dtype=dtype)
        head_products(x, weight, wide[..., :68], factors, positions)
        expected = torch.einsum("thc,hrc->thr", x.float(), weight.float()) * scale
        assert error(wide[..., :68], expected) < TOLERANCE[dtype]
        assert bool(wide[..., 68:].isnan().all())


def angles(rope_dim: int, factors: Tensor | None) -> Angles:
    cos, sin = rotary_table(RopeConfig(theta=10_000.0), rope_dim, 100, DEVICE)
    return Angles(cos, sin, factors, rope_dim)


def turned(x: Tensor, of: Angles, *, is_interleaved: bool) -> Tensor:
    """x: (T, heads, rope_dim)."""
    if is_interleaved:
        x = torch.cat((x[..., ::2], x[..., 1::2]), dim=-1)
    at = of.at(POSITIONS.long())
    return rotate(x, at.cos.unsqueeze(1), at.sin.unsqueeze(1))


@pytest.mark.parametrize("kv_dtype", [None, *LIMITS])
@pytest.mark.parametrize("is_interleaved", [True, False])
@pytest.mark.parametrize("dtype", DTYPES)
def test_latents_are_stored_and_queries_rotated_as_torch_does_it(
    dtype: torch.dtype, is_interleaved: bool, kv_dtype: torch.dtype | None
) -> None:
    of = config(is_interleaved=is_interleaved)
    factors = random(100).abs()
    tables = angles(of.rope_dim, factors)
    latents = random(5, 60, dtype=dtype)[:, : of.head_dim]
    heads = random(5, of.num_heads * of.query_dim + 3, dtype=dtype)[:, 3:]
    heads = heads.view(5, of.num_heads, of.query_dim)
    norm = 1 + random(of.latent_dim, dtype=dtype) / 4
    pages = [empty_pages(of, dtype, kv_dtype) for _ in range(2)]
    query = poisoned(5, of.num_heads, of.head_dim, dtype=dtype)
    step = DeviceStep(
        token_ids=POSITIONS,
        positions=POSITIONS,
        kv_slots=SLOTS,
        slots=POSITIONS,
        context_lens=POSITIONS,
        num_decodes=5,
        chunk_starts=None,
        block_tables=POSITIONS.view(1, -1),
    )
    rotate_and_store_latents(of, latents, heads, norm, tables, step, pages[0], query)

    latent, shared = torch.split(latents, [of.latent_dim, of.rope_dim], dim=1)
    key = torch.cat(
        (
            rms_norm(latent, norm, of.norm_eps).unsqueeze(1),
            turned(shared.unsqueeze(1), tables, is_interleaved=is_interleaved),
        ),
        dim=2,
    )
    store(pages[1], SLOTS, key)
    stored, expected = (plain(each).flatten(0, 1) for each in pages)
    coarse = 0.05 if kv_dtype else 2 * TOLERANCE[dtype]  # a rounding may go the other way
    assert error(stored[SLOTS], expected[SLOTS]) < coarse
    rest = [slot for slot in range(32) if slot not in SLOTS.tolist()]
    assert torch.equal(stored[rest], expected[rest])
    rotated = turned(heads[..., of.nope_dim :].float(), tables, is_interleaved=is_interleaved)
    rotated *= factors[POSITIONS.long()].view(-1, 1, 1)
    assert error(query[..., of.latent_dim :], rotated) < 2 * TOLERANCE[dtype]
    assert bool(query[..., : of.latent_dim].isnan().all())  # that is the products'


def empty_pages(of: LatentAttention, dtype: torch.dtype, kv_dtype: torch.dtype | None) -> KVPages:
    """Two blocks of 16."""
    pages = torch.zeros(2, 16, 1, of.head_dim, dtype=kv_dtype or dtype, device=DEVICE)
    return pages if kv_dtype is None else Codes(pages, torch.zeros(2, 1, 16, device=DEVICE))


def plain(pages: KVPages) -> Tensor:
    if isinstance(pages, Tensor):
        return pages.float()
    return decode(pages.codes, pages.scales.transpose(1, 2))


@pytest.mark.filterwarnings("ignore:invalid value")  # by the interpreter
def test_what_is_not_finite_reaches_the_scale_of_codes() -> None:
    of = config()
    latents = random(5, of.head_dim)
    latents[2, 50] = float("inf")
    pages = empty_pages(of, torch.float32, torch.int8)
    assert isinstance(pages, Codes)
    heads = random(5, of.num_heads, of.query_dim)
    step = DeviceStep(
        token_ids=POSITIONS, positions=POSITIONS, kv_slots=SLOTS, slots=POSITIONS,
        context_lens=POSITIONS, num_decodes=5, chunk_starts=None,
        block_tables=POSITIONS.view(1, -1),
    )  # fmt: skip
    query = poisoned(5, of.num_heads, of.head_dim)
    norm, tables = torch.ones(of.latent_dim, device=DEVICE), angles(of.rope_dim, None)
    rotate_and_store_latents(of, latents, heads, norm, tables, step, pages, query)
    is_finite = pages.scales.flatten()[SLOTS].isfinite()
    assert is_finite.tolist() == [True, True, False, True, True]
