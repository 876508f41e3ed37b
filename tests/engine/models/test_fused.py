"""The GPU's fused model agrees with transformers, for every family."""

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", reason="Triton is not installed; pip install 'penstock[dev]'")

from penstock.engine.encoders.positions import insert_positions
from penstock.engine.kernels.attention.paged.attention import PagedAttention
from penstock.engine.kernels.tables import RotaryPositions, gather_chunks
from penstock.engine.memory.pool.kv_pool import KVPool
from penstock.engine.models.config import ModelConfig
from penstock.engine.models.decoder.fused import FusedModel
from penstock.engine.models.decoder.model import LlamaModel
from penstock.engine.models.errors import UnsupportedFeature, UnsupportedWeightFormat
from penstock.engine.models.layers.linear import MakeLinear, PlainLinear
from penstock.engine.models.weights import Checkpoint
from penstock.engine.step.device_step import DeviceStep
from tests.support.image_models import logits_of_transformers, made_prompt
from tests.support.inserted_rows import InsertedPrompt, of_inserts
from tests.support.kernels import DEVICE, ON_GPU, error
from tests.support.tiny_models import (
    BLOCK_SIZE,
    FAMILIES,
    LATENT_FAMILIES,
    MAX_LEN,
    MORE_FAMILIES,
    make_model,
    save,
)
from tests.support.weight_formats import (
    NegatedLinear,
    coded,
    on_gpu,
    reversed_config,
    round_weights,
)

NUM_BLOCKS, NUM_SLOTS = 40, 6
# The interpreter takes seconds per family; together these have every feature of the others.
SOME = ("llama_biases", "mistral_window", "qwen3")
# One of each kind of layer.
SOME_MORE = ("phi4_mini", "gemma3", "youtu")
# In float32 only the order of summation differs; torch does not use TF32 by default.
TOLERANCE = {torch.float32: 1e-5, torch.float16: 5e-3}
MORE_TOLERANCE = 1e-4  # of logits up to 10
DTYPES = [torch.float32, pytest.param(torch.float16, marks=pytest.mark.slow)]


class Model:
    """Two sequences of 60 tokens, in slots 4 and 1, of a small random model."""

    def __init__(
        self,
        family: str,
        tmp_path: Path,
        make_linear: MakeLinear = PlainLinear,
        dtype: torch.dtype = torch.float32,
        kv_dtype: torch.dtype | None = None,
    ) -> None:
        self.oracle = make_model(family)
        path = save(self.oracle, tmp_path / family)
        config = ModelConfig.from_dir(path)
        llama = LlamaModel(
            config,
            Checkpoint(path, partial(torch.empty, dtype=dtype, device=DEVICE)),
            make_linear,
            max_model_len=MAX_LEN,
            device=DEVICE,
            maps_tables=False,
        )
        self.has_sections = any(each.rope and each.rope.sections for each in config.attentions)
        windows = config.attention_windows(BLOCK_SIZE)
        pool = KVPool(config.kv_shape, NUM_BLOCKS, BLOCK_SIZE, kv_dtype or dtype, DEVICE)
        attention = PagedAttention(windows, NUM_SLOTS, 64, num_sms=1, device=DEVICE, dtype=dtype)
        self.model = FusedModel(llama, pool, attention, max_rows=2)
        generator = torch.Generator().manual_seed(1)
        blocks = torch.randperm(NUM_BLOCKS, generator=generator).to(torch.int32)
        self.tokens = torch.zeros(NUM_SLOTS, MAX_LEN + 1, dtype=torch.int32)
        self.tables = torch.zeros(NUM_SLOTS, MAX_LEN // BLOCK_SIZE, dtype=torch.int32)
        for index, slot in enumerate((4, 1)):
            self.tokens[slot, :60] = torch.randint(0, 96, (60,), generator=generator)
            self.tables[slot, :16] = blocks[16 * index : 16 * index + 16]
        self.tables = self.tables.to(DEVICE)

    def run(
        self,
        rows: list[tuple[int, int, int]],
        num_decodes: int,
        prompts: Mapping[int, InsertedPrompt] = MappingProxyType({}),
    ) -> float:
        """rows: (slot, start, number of tokens). prompts: with inserts, by slot. The largest error
        of any row's last logits."""
        slots, starts, counts = (self._ints(column) for column in zip(*rows, strict=True))
        offsets = self._ints([0, *counts.cumsum(0).tolist()])
        num_tokens, size = int(offsets[-1]), max(row[2] for row in rows)
        token_ids, positions = offsets.new_empty(2, num_tokens).unbind()
        kv_slots, context_lens = token_ids.new_empty(num_tokens).long(), torch.empty_like(slots)
        lengths = offsets.new_zeros(NUM_SLOTS)
        rotary = None
        if prompts and self.has_sections:
            shifts = torch.zeros_like(lengths)
            for slot, prompt in prompts.items():
                shifts[slot] = MAX_LEN - insert_positions(prompt.inserts, MAX_LEN, MAX_LEN + 1)[0]
            rotary = RotaryPositions(shifts, torch.empty_like(positions))
        gather_chunks(
            slots, starts, offsets, lengths, self.tokens.to(DEVICE), self.tables[None], BLOCK_SIZE,
            size, token_ids, positions, kv_slots[None], context_lens, rotary=rotary,
        )  # fmt: skip
        given: dict[str, Any] = {}
        if prompts and num_decodes < len(rows):
            given = of_inserts(offsets.tolist(), rows, prompts)
            if given["reaches"] is not None:
                given["reaches"] = self._ints(given["reaches"].tolist())
        starts_of_chunks = offsets[num_decodes:] - num_decodes
        states = self.model(
            DeviceStep(
                token_ids=token_ids,
                positions=positions,
                kv_slots=kv_slots,
                slots=slots,
                context_lens=context_lens,
                num_decodes=num_decodes,
                chunk_starts=starts_of_chunks if num_decodes < len(rows) else None,
                block_tables=self.tables,
                rotary_positions=None if rotary is None else rotary.of_tokens,
                **given,
            )
        )
        logits = self.model.logits(states[offsets[1:].long() - 1]).cpu()
        return max(
            error(row_logits, self._expected(slot, start + count, prompts.get(slot)))
            for row_logits, (slot, start, count) in zip(logits, rows, strict=True)
        )

    def _expected(self, slot: int, length: int, prompt: InsertedPrompt | None) -> Tensor:
        if prompt is not None:
            whole = logits_of_transformers(self.oracle, self.tokens[slot, :60].long(), prompt)
            return whole[length - 1]
        logits: Tensor = self.oracle(self.tokens[slot : slot + 1, :length].long()).logits[0, -1]
        return logits

    def _ints(self, values: Any) -> Tensor:
        return torch.tensor(values, dtype=torch.int32, device=DEVICE)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "family",
    FAMILIES
    if ON_GPU
    else [SOME[0], *(pytest.param(name, marks=pytest.mark.slow) for name in SOME[1:])],
)
@torch.inference_mode()
def test_prefill_chunks_and_decodes_agree_with_transformers(
    family: str, dtype: torch.dtype, tmp_path: Path
) -> None:
    model, tolerance = Model(family, tmp_path, dtype=dtype), TOLERANCE[dtype]
    assert model.run([(4, 0, 21)], num_decodes=0) < tolerance  # too many tokens for skinny_linear
    assert model.run([(4, 21, 1), (1, 0, 8)], num_decodes=1) < tolerance
    assert model.run([(4, 22, 1), (1, 8, 1)], num_decodes=2) < tolerance
    assert model.run([(1, 9, 20), (4, 23, 3)], num_decodes=0) < tolerance


@pytest.mark.parametrize(
    "family",
    [
        name if ON_GPU or name in SOME_MORE else pytest.param(name, marks=pytest.mark.slow)
        for name in (*MORE_FAMILIES, *LATENT_FAMILIES)
        if not name.endswith(("_wrapped", "_no_window")) or name.startswith("gemma4")
    ],
)
@torch.inference_mode()
def test_the_families_that_differ_more_from_llama_agree_with_transformers(
    family: str, tmp_path: Path
) -> None:
    model = Model(family, tmp_path)
    assert model.run([(4, 0, 40)], num_decodes=0) < MORE_TOLERANCE
    assert model.run([(4, 40, 1), (1, 0, 8)], num_decodes=1) < MORE_TOLERANCE
    assert model.run([(4, 41, 1), (1, 8, 1)], num_decodes=2) < MORE_TOLERANCE


@pytest.mark.parametrize(
    ("family", "bits", "group_size"),
    [
        ("llama_biases", 4, 32),
        pytest.param("llama_biases", 8, 64, marks=pytest.mark.slow),
        pytest.param("qwen3", 4, 128, marks=pytest.mark.slow),
        pytest.param("qwen3", 8, 32, marks=pytest.mark.slow),
        pytest.param("mistral_window", 8, 1024, marks=pytest.mark.slow),
    ],
)
@torch.inference_mode()
def test_with_weights_in_codes_it_agrees_with_transformers_on_what_these_stand_for(
    family: str, bits: int, group_size: int, tmp_path: Path
) -> None:
    make_linear = coded(bits, group_size, has_zeros=bits == 4)
    model = Model(family, tmp_path, on_gpu(make_linear))
    round_weights(model.oracle, make_linear)
    tolerance = TOLERANCE[torch.float32]
    assert model.run([(4, 0, 21)], num_decodes=0) < tolerance  # too many tokens for one kernel
    assert model.run([(4, 21, 1), (1, 0, 8)], num_decodes=1) < tolerance
    assert model.run([(4, 22, 1), (1, 8, 1)], num_decodes=2) < tolerance


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kv_dtype", "tolerance"),
    [(torch.int8, 0.02), pytest.param(torch.float8_e4m3fn, 0.1, marks=pytest.mark.slow)],
)
@torch.inference_mode()
def test_with_a_cache_in_8_bits_prefill_chunks_and_decodes_are_near_transformers(
    kv_dtype: torch.dtype, tolerance: float, tmp_path: Path
) -> None:
    model = Model("qwen3", tmp_path, kv_dtype=kv_dtype)
    assert 1e-5 < model.run([(4, 0, 21)], num_decodes=0) < tolerance
    assert model.run([(4, 21, 1), (1, 0, 8)], num_decodes=1) < tolerance
    assert model.run([(4, 22, 1), (1, 8, 1)], num_decodes=2) < tolerance


@pytest.mark.parametrize("negated", ["down", "lm_head"])
def test_a_weight_format_that_no_kernel_computes_is_refused_by_name(
    negated: str, tmp_path: Path
) -> None:
    columns = {"down": 112, "lm_head": 64}[negated]  # the lm_head alone has 96 rows of 64 columns
    rows = {"down": 64, "lm_head": 96}[negated]

    def make_linear(weight: Tensor, bias: Tensor | None) -> PlainLinear | NegatedLinear:
        is_negated = weight.shape == (rows, columns)
        return NegatedLinear(weight, bias) if is_negated else PlainLinear(weight, bias)

    with pytest.raises(UnsupportedWeightFormat, match="'negated', which the GPU's fused step"):
        Model("llama2", tmp_path, make_linear)


def test_a_flag_that_no_kernel_computes_is_refused_by_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read = ModelConfig.from_dir
    monkeypatch.setattr(ModelConfig, "from_dir", lambda path: reversed_config(read(path)))
    with pytest.raises(UnsupportedFeature, match="Reversed, which the GPU's fused step"):
        Model("llama2", tmp_path)


@pytest.mark.parametrize(
    "family",
    [
        "qwen3_vl",
        pytest.param("gemma3_wrapped", marks=pytest.mark.slow),
        pytest.param("gemma4_small_wrapped", marks=pytest.mark.slow),
    ],
)
@torch.inference_mode()
def test_rows_in_place_of_tokens_agree_with_transformers(family: str, tmp_path: Path) -> None:
    model = Model(family, tmp_path)
    hidden = model.oracle.config.get_text_config().hidden_size
    prompts = {4: made_prompt(family, hidden, seed=9)}
    tolerance = 5 * MORE_TOLERANCE if family.startswith("gemma4") else MORE_TOLERANCE
    assert model.run([(4, 0, 33)], num_decodes=0, prompts=prompts) < tolerance
    # The second image, beside a text.
    assert model.run([(1, 0, 9), (4, 33, 10)], num_decodes=0, prompts=prompts) < tolerance
    # A decode after it, beside a chunk, and both as decodes alone, and in chunks of few tokens.
    assert model.run([(4, 43, 1), (1, 9, 3)], num_decodes=1, prompts=prompts) < tolerance
    assert model.run([(4, 44, 1), (1, 12, 1)], num_decodes=2, prompts=prompts) < tolerance
    assert model.run([(4, 45, 3)], num_decodes=0, prompts=prompts) < tolerance
