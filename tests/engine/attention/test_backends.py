"""Every attention backend of a GPU computes the same, and refuses what it cannot compute."""

import importlib.util
import inspect
import re
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.support.paths import DEMO_MODEL

pytest.importorskip("triton", reason="Triton is not installed; pip install 'penstock[dev]'")

from penstock.engine.config import AttentionBackend, EngineConfig, KVCacheDtype
from penstock.engine.kernels.attention.backends import make_attention
from penstock.engine.kernels.attention.flash import FlashAttention
from penstock.engine.kernels.attention.gathered import TorchAttention
from penstock.engine.kernels.attention.paged.attention import PagedAttention
from penstock.engine.kernels.attention.protocol import DeviceAttention, LayerContext
from penstock.engine.kernels.attention.shape import AttentionShape
from penstock.engine.models.config import ModelConfig
from penstock.engine.step.device_step import DeviceStep
from penstock.engine.step.model_input import ModelInput
from penstock.scheduler.errors import InvalidConfig
from tests.support.executors import cpu_executor
from tests.support.flash_attn_module import SOURCE, FlashAttnModule, parameters
from tests.support.kernels import DEVICE, error, poisoned, random
from tests.support.reference_attention import reference_attention

SHAPE = AttentionShape(num_heads=6, num_kv_heads=2, head_dim=16, block_size=256)
WINDOWS = (None, 70)
MAX_BLOCKS = 3
CPU = torch.device("cpu")

_FLASH_FUNCTIONS = ("flash_attn_with_kvcache", "flash_attn_varlen_func")
MAKERS: dict[str, Callable[[], DeviceAttention]] = {
    "triton": lambda: PagedAttention(
        {SHAPE: WINDOWS}, 8, 600, num_sms=2, device=DEVICE, dtype=torch.float32
    ),
    "torch": TorchAttention,
    "flash_attn": lambda: FlashAttention([SHAPE]),
}


@pytest.fixture
def flash_attn(monkeypatch: pytest.MonkeyPatch) -> None:
    """Installs the stand-in."""
    module = ModuleType("flash_attn")
    for name in _FLASH_FUNCTIONS:
        setattr(module, name, getattr(FlashAttnModule, name))
    monkeypatch.setitem(sys.modules, "flash_attn", module)


class Step:
    """Decodes, then chunks, of sequences whose blocks are anywhere in the pool."""

    def __init__(self, lengths: list[int], counts: list[int], num_decodes: int) -> None:
        num_rows, size = len(lengths), SHAPE.block_size
        pool = (num_rows * MAX_BLOCKS + 1, size, SHAPE.num_kv_heads, SHAPE.head_dim)
        self.keys, self.values = random(*pool, seed=1), random(*pool, seed=2)
        generator = torch.Generator().manual_seed(0)
        blocks = torch.randperm(pool[0] - 1, generator=generator).to(torch.int32)
        tables = torch.full((num_rows + 2, MAX_BLOCKS), pool[0] - 1, dtype=torch.int32)
        slots = torch.randperm(num_rows + 2, generator=generator)[:num_rows]
        tables[slots] = blocks.view(num_rows, MAX_BLOCKS)
        offsets = [0, *torch.tensor(counts).cumsum(0).tolist()]
        positions = [torch.arange(n - c, n) for n, c in zip(lengths, counts, strict=True)]
        self.query = random(offsets[-1], SHAPE.num_heads, SHAPE.head_dim)
        chunk_starts = [offset - num_decodes for offset in offsets[num_decodes:]]
        self.step = DeviceStep(
            token_ids=_ints([0] * offsets[-1]),
            positions=torch.cat(positions).to(DEVICE, torch.int32),
            kv_slots=_ints([0] * offsets[-1]).long(),
            slots=slots.to(DEVICE, torch.int32),
            context_lens=_ints(lengths),
            num_decodes=num_decodes,
            chunk_starts=_ints(chunk_starts) if num_decodes < num_rows else None,
            block_tables=tables.to(DEVICE),
        )
        self._input = ModelInput(
            token_ids=torch.empty(0),
            positions=torch.cat(positions),
            kv_slots=torch.empty(0),
            block_tables=tables[slots],
            query_starts=offsets,
            context_lens=lengths,
            num_decodes=num_decodes,
            sample_rows=torch.empty(0),
        )

    def error(self, attention: DeviceAttention) -> float:
        """The largest over all windows."""
        attention.plan(self.step)
        return max(self._error(attention, window) for window in WINDOWS)

    def _error(self, attention: DeviceAttention, window: int | None) -> float:
        out = poisoned(*self.query.shape)
        attention(self.query, LayerContext(self.keys, self.values, window), self.step, out)
        inputs = self.query.cpu(), self.keys.cpu(), self.values.cpu()
        return error(out.cpu(), reference_attention(*inputs, self._input, window))


def _ints(values: list[int]) -> Tensor:
    return torch.tensor(values, dtype=torch.int32, device=DEVICE)


@pytest.mark.usefixtures("flash_attn")
@pytest.mark.parametrize("name", MAKERS)
def test_decodes_and_chunks_agree_with_the_reference(name: str) -> None:
    attention = MAKERS[name]()
    assert Step([1, 300, 65, 90, 400], [1, 1, 1, 90, 3], num_decodes=3).error(attention) < 1e-5
    assert Step([7, 520], [1, 1], num_decodes=2).error(attention) < 1e-5
    assert Step([40, 9], [1, 9], num_decodes=0).error(attention) < 1e-5


def test_the_stand_in_has_the_parameters_of_flash_attn() -> None:
    places = (Path(place, SOURCE) for place in sys.path)
    installed = next((place for place in places if place.is_file()), None)
    if installed is None:
        pytest.skip("flash-attn is not installed")
    real = parameters(installed)
    for name in _FLASH_FUNCTIONS:
        ours = list(inspect.signature(getattr(FlashAttnModule, name)).parameters)
        # Versions add parameters; what we pass by position comes first in all of them.
        assert set(ours) <= set(real[name])
        assert real[name][:3] == ours[:3]


def test_the_error_for_a_missing_flash_attn_names_the_extra() -> None:
    if importlib.util.find_spec("flash_attn"):
        pytest.skip("flash-attn is installed")
    with pytest.raises(InvalidConfig, match=re.escape("pip install 'penstock[flash]'")):
        FlashAttention([SHAPE])


def test_the_error_for_a_library_that_cannot_be_loaded_has_its_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "flash_attn.py").write_text("raise ImportError('undefined symbol: _ZN3c10')")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "flash_attn", raising=False)
    with pytest.raises(InvalidConfig, match="undefined symbol: _ZN3c10"):
        FlashAttention([SHAPE])


def _make(
    backend: AttentionBackend,
    *,
    block_size: int = 64,
    kv_cache_dtype: KVCacheDtype = KVCacheDtype.AUTO,
    **changes: Any,
) -> DeviceAttention:
    arguments: dict[str, Any] = {"dtype": torch.bfloat16} | changes
    model = ModelConfig.from_dir(DEMO_MODEL)
    return make_attention(
        EngineConfig(
            model=str(DEMO_MODEL), attention_backend=backend, kv_cache_dtype=kv_cache_dtype
        ),
        model.attention_windows(block_size),
        device=CPU,
        max_rows=4,
        max_tokens=64,
        **arguments,
    )


@pytest.mark.usefixtures("flash_attn")
@pytest.mark.parametrize(
    ("backend", "expected", "is_capturable"),
    [
        (AttentionBackend.AUTO, PagedAttention, True),
        (AttentionBackend.TRITON, PagedAttention, True),
        (AttentionBackend.FLASH_ATTN, FlashAttention, True),
        (AttentionBackend.TORCH, TorchAttention, False),
    ],
)
def test_the_configured_backend_is_made(
    backend: AttentionBackend,
    expected: type,
    is_capturable: bool,
) -> None:
    attention = _make(backend, block_size=256)
    assert isinstance(attention, expected)
    assert attention.is_capturable is is_capturable


@pytest.mark.usefixtures("flash_attn")
def test_blocks_too_small_for_flash_attn_are_refused_with_the_size_that_fits() -> None:
    with pytest.raises(InvalidConfig, match="use --block-size 256"):
        _make(AttentionBackend.FLASH_ATTN, block_size=64)


@pytest.mark.usefixtures("flash_attn")
def test_float16_is_computed_by_flash_attention() -> None:
    made = _make(AttentionBackend.FLASH_ATTN, dtype=torch.float16, block_size=256)
    assert isinstance(made, FlashAttention)


def test_float32_is_refused_by_flash_attention() -> None:
    with pytest.raises(InvalidConfig, match="use --dtype bfloat16"):
        _make(AttentionBackend.FLASH_ATTN, dtype=torch.float32, block_size=256)


@pytest.mark.usefixtures("flash_attn")
def test_a_cache_in_8_bits_is_refused_by_flash_attention() -> None:
    with pytest.raises(
        InvalidConfig, match=r"--kv-cache-dtype is int8.* --attention-backend triton"
    ):
        _make(AttentionBackend.FLASH_ATTN, block_size=256, kv_cache_dtype=KVCacheDtype.INT8)


def test_the_cpu_refuses_a_backend_by_name() -> None:
    config = EngineConfig(model=str(DEMO_MODEL), attention_backend=AttentionBackend.TORCH)
    with pytest.raises(InvalidConfig, match="leave the flag out"):
        cpu_executor(config, DEMO_MODEL)
