"""What an adapter makes of a model's logits, against its base model with merged weights, which are
PEFT's own numbers (compared once with PEFT 0.21)."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from penstock.engine.models.config import ModelConfig
from penstock.engine.models.lora.weights import read_adapter
from penstock.engine.models.parts.adapter import Adapter
from penstock.engine.native.model import NativeModel
from tests.support.adapters import ALL, OF_DELTA_NETS, merged, save_adapter
from tests.support.compiler import needs_compiler
from tests.support.quantized_checkpoints import FORMATS, save_quantized
from tests.support.tiny_models import CPU, Harness, make_model, save

TOLERANCE = 1e-4
on_both_paths = pytest.mark.parametrize(
    "native", [False, pytest.param(True, marks=needs_compiler)], ids=["torch", "compiled"]
)
IDS = torch.tensor([5, 60, 61, 7, 90, 33, 8, 41, 12, 77, 3, 19])


def packed(harness: Harness, model_dir: Path, adapter: Path) -> Any:
    """As the harness's model computes with it."""
    config = ModelConfig.from_dir(model_dir)
    read: Adapter = read_adapter(adapter, config, torch.float32, CPU, max_rank=64)
    model = harness.model
    return model.packed_adapter(read) if isinstance(model, NativeModel) else read


def expected(model: Any, adapter: Path | None, ids: Tensor) -> Tensor:
    with torch.no_grad():
        logits: Tensor = (merged(model, adapter) if adapter else model)(ids[None]).logits[0]
        return logits


SETTINGS: dict[str, dict[str, Any]] = {
    "all": {},
    "rslora": {"use_rslora": True, "rank": 16},
    "patterns": {
        "rank_pattern": {"q_proj": 2, "down_proj": 6},
        "alpha_pattern": {"k_proj": 3.0, "gate_proj": 1.0},
    },
    "some_layers": {"targets": ("v_proj", "up_proj"), "layers": (0, 2)},
    "odd_rank": {"rank": 3, "targets": ("k_proj", "o_proj", "down_proj")},
}


@on_both_paths
@pytest.mark.parametrize("settings", SETTINGS)
@pytest.mark.parametrize("family", ["llama2", "qwen3"])
def test_logits_are_those_of_merged_weights(
    family: str, settings: str, native: bool, tmp_path: Path
) -> None:
    model = make_model(family)
    path = save(model, tmp_path / "base")
    adapter = save_adapter(model, tmp_path / "adapter", **SETTINGS[settings])
    harness = Harness(path, native=native)
    harness.token_table[0, : len(IDS)] = IDS
    weights = packed(harness, path, adapter)
    got = torch.cat(
        harness.run([(0, 0, 7)], adapters={0: weights})
        + harness.run([(0, 7, 4)], adapters={0: weights})
        + harness.run([(0, 11, 1)], num_decodes=1, adapters={0: weights})
    )
    wanted = expected(model, adapter, IDS)
    assert (got - wanted).abs().max() < TOLERANCE
    assert (wanted - expected(model, None, IDS)).abs().max() > 0.1


@on_both_paths
@pytest.mark.parametrize("family", ["phi4", "olmo2", "gemma3"])
def test_an_adapter_changes_other_families_too(family: str, native: bool, tmp_path: Path) -> None:
    """Of stacked names in the checkpoint, of norms elsewhere, of another activation."""
    model = make_model(family)
    path = save(model, tmp_path / "base")
    targets = (*ALL, "qkv_proj", "gate_up_proj")
    adapter = save_adapter(model, tmp_path / "adapter", targets=targets)
    harness = Harness(path, native=native)
    harness.token_table[0, : len(IDS)] = IDS
    (got,) = harness.run([(0, 0, len(IDS))], adapters={0: packed(harness, path, adapter)})
    wanted = expected(model, adapter, IDS)
    assert (got - wanted).abs().max() < TOLERANCE * max(1.0, float(wanted.abs().max()))


HYBRID: dict[str, dict[str, Any]] = {
    "all": {"targets": (*ALL, *OF_DELTA_NETS)},
    "delta nets": {"targets": OF_DELTA_NETS, "rank": 9},
    "gates": {"targets": ("in_proj_b", "in_proj_a", "q_proj"), "rank": 3},
    "patterns": {
        "targets": ("in_proj_qkv", "in_proj_a", "out_proj"),
        "rank_pattern": {"in_proj_a": 11, "out_proj": 2},
    },
}


@on_both_paths
@pytest.mark.parametrize("settings", HYBRID)
@pytest.mark.parametrize("codes", [None, "fp8-block", "gptq4"])
def test_an_adapter_changes_gated_delta_nets_too(
    codes: str | None, settings: str, native: bool, tmp_path: Path
) -> None:
    """codes: of the base; where they are integers, gates are multiplied after the rest."""
    model, path = make_model("qwen3_5", intermediate_size=96), tmp_path / "base"
    if codes is None:
        save(model, path)
    else:
        save_quantized(model, path, FORMATS[codes])
    adapter = save_adapter(model, tmp_path / "adapter", **HYBRID[settings])
    harness = Harness(path, native=native, has_codes=native and codes is not None)
    harness.token_table[:2, : len(IDS)] = IDS
    weights = {0: packed(harness, path, adapter)}
    got = torch.cat(
        harness.run([(0, 0, 7), (1, 0, 5)], adapters=weights)[:1]
        + harness.run([(1, 5, 2), (0, 7, 4)], adapters=weights)[1:]
        + harness.run([(0, 11, 1), (1, 7, 1)], num_decodes=2, adapters=weights)[:1]
    )
    wanted, of_base = expected(model, adapter, IDS), expected(model, None, IDS)
    assert (got - wanted).abs().max() < TOLERANCE
    assert (wanted - of_base).abs().max() > 0.03
    # And its neighbour in the step is as it was.
    (other,) = harness.run([(1, 8, 4)], adapters=weights)
    assert (other - of_base[8:]).abs().max() < TOLERANCE


@on_both_paths
def test_each_sequence_of_a_step_has_its_own_adapter_or_none(native: bool, tmp_path: Path) -> None:
    model = make_model("llama3_gqa")
    path = save(model, tmp_path / "base")
    adapters = [
        save_adapter(model, tmp_path / str(i), rank=2 + 3 * i, seed=i, targets=targets)
        for i, targets in enumerate([ALL, ("q_proj", "down_proj")])
    ]
    harness = Harness(path, native=native)
    of_slot = dict(enumerate(packed(harness, path, adapter) for adapter in adapters))
    of_slot[3] = of_slot[0]
    for slot in range(4):
        harness.token_table[slot, : len(IDS)] = IDS.roll(slot)
    starts = harness.run([(slot, 0, 5 + slot) for slot in range(4)], adapters=of_slot)
    decodes = harness.run([(s, 5 + s, 1) for s in range(4)], num_decodes=4, adapters=of_slot)
    files = [*adapters, None, adapters[0]]
    for slot, file in enumerate(files):
        wanted = expected(model, file, IDS.roll(slot)[: 6 + slot])
        got = torch.cat((starts[slot], decodes[slot]))
        assert (got - wanted).abs().max() < TOLERANCE, slot
