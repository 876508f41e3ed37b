"""Every quantized format on two ranks and in two stages, and weights that are rounded at load."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from penstock.engine.config import Dtype, EngineConfig, Quantization
from penstock.engine.loading import cpu
from penstock.engine.models.at_load.quantize import quantization_plan, quantize
from penstock.engine.models.config import ModelConfig
from penstock.engine.models.division.shard import Shard
from penstock.engine.native import compiler
from penstock.engine.process.phases import Phases
from tests.support.parallel_answers import (
    TOLERANCE,
    assert_ranks_answer_alike,
    parallel_config,
)
from tests.support.quantized_checkpoints import FORMATS, save_quantized
from tests.support.tiny_models import make_model, save

# But for float32, codes that are integers are multiplied with states that are rounded to 8 bits. A
# state that is between two of them may become either, depending on the order of a sum.
OF_ROUNDED_STATES = 0.05
LAYOUTS = [pytest.param(2, 1, id="ranks"), pytest.param(1, 2, id="stages")]
# One of each form that the compiled step computes.
COMPILED = ["fp8-block", "ct-w8a8", "ct-w8a16-asym", "ct-w4a16", "awq", "ct-nvfp4"]
# Of these, ranks have some layers plain, and one rank has none.
ORDERED = ["gptq-act-order", "gptq8-asym-act-order"]


def saved(name: str, path: Path, family: str = "llama2", **options: Any) -> Path:
    settings = {"max_position_embeddings": 512, "intermediate_size": 96, "head_dim": 16} | options
    save_quantized(make_model(family, **settings), path, FORMATS[name])
    return path


@pytest.mark.parametrize(("tensor_size", "num_stages"), LAYOUTS)
@pytest.mark.parametrize(
    ("name", "dtype", "tolerance"),
    [
        *((name, Dtype.FLOAT32, TOLERANCE) for name in (*COMPILED, *ORDERED)),
        *(
            pytest.param(name, Dtype.FLOAT16, OF_ROUNDED_STATES, marks=pytest.mark.slow)
            for name in COMPILED
        ),
    ],
)
def test_ranks_answer_as_one(
    name: str, dtype: Dtype, tolerance: float, tensor_size: int, num_stages: int, tmp_path: Path
) -> None:
    # States are rounded in groups of 64 at most, of which no two ranks have one.
    path = saved(name, tmp_path, head_dim=32, intermediate_size=128)
    config = parallel_config(path, dtype=dtype)
    assert_ranks_answer_alike(config, tensor_size, num_stages, num_tokens=60, tolerance=tolerance)


@pytest.mark.parametrize(("tensor_size", "num_stages"), LAYOUTS)
@pytest.mark.parametrize("name", FORMATS)
def test_so_they_do_where_torch_computes_them(
    name: str, tensor_size: int, num_stages: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cpu, "load_library", lambda *_, **__: None)
    # The halves of the MLP begin in a group of 32.
    config = parallel_config(saved(name, tmp_path))
    assert_ranks_answer_alike(config, tensor_size, num_stages, num_tokens=20)


@pytest.mark.parametrize("name", ["fp8-block", "gptq4"])
@pytest.mark.parametrize(
    "family", ["phi4", "qwen3_bias", "gemma3", "qwen3_moe", "qwen3_5", "gemma4"]
)
def test_so_do_families_that_differ(
    name: str, family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cpu, "load_library", lambda *_, **__: None)
    options = {"moe_intermediate_size": 32} if family == "qwen3_moe" else {}
    config = parallel_config(saved(name, tmp_path, family, **options))
    assert_ranks_answer_alike(config, 2, 2, num_tokens=20)


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of weights that are rounded; what is compiled stays where all tests have it."""
    compiled = compiler.cache_directory()
    monkeypatch.setattr(compiler, "cache_directory", lambda: compiled)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


# Parts of 256 columns, which 4 bits are for, and of whole groups.
WIDE = {"hidden_size": 512, "intermediate_size": 512, "num_hidden_layers": 2, "vocab_size": 97}


@pytest.mark.usefixtures("cache")
@pytest.mark.parametrize("is_compiled", [True, False])
@pytest.mark.parametrize(("tensor_size", "num_stages"), LAYOUTS)
@pytest.mark.parametrize("method", [Quantization.INT8, Quantization.INT4])
def test_ranks_round_at_load_to_what_one_rounds_to(
    method: Quantization,
    tensor_size: int,
    num_stages: int,
    is_compiled: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if not is_compiled:
        monkeypatch.setattr(cpu, "load_library", lambda *_, **__: None)
    model = make_model("llama3.2_tied", max_position_embeddings=512, **WIDE)
    config = parallel_config(save(model, tmp_path / "model"), quantization=method)
    # Logits are some ten times as large as those of the other models.
    ranks = assert_ranks_answer_alike(
        config, tensor_size, num_stages, num_tokens=20, tolerance=10 * TOLERANCE
    )
    info = ranks.info.quantization
    assert info is not None and info.method == method and info.kl_divergence is None


@pytest.mark.usefixtures("cache")
@pytest.mark.parametrize("family", ["olmo2", "llama_biases"])
def test_ranks_compute_with_the_fp8_that_each_rounds_its_part_to(
    family: str, tmp_path: Path
) -> None:
    """As does one rank with a plain model of these numbers."""
    model = make_model(family, max_position_embeddings=512)
    config = parallel_config(save(model, tmp_path / "model"), quantization=Quantization.FP8)
    whole = ModelConfig.from_dir(tmp_path / "model")
    shards = [Shard(whole, rank, 2) for rank in range(2)]
    ranks = [rounded_by(shard, config) for shard in shards]
    for name in ranks[0]:
        layer, cut = model.get_submodule(name), shards[0].cut(name)
        parts = torch.cat([rank[name] for rank in ranks], 0 if cut.columns is None else 1)
        layer.weight = torch.nn.Parameter(parts[: layer.out_features].clone())
    plain = save(model, tmp_path / "plain")
    assert_ranks_answer_alike(
        config, 2, num_tokens=60, of_one=replace(config, model=str(plain), quantization=None)
    )


def rounded_by(shard: Shard, config: EngineConfig) -> dict[str, Tensor]:
    """The weights of its linear layers, by name."""
    plan = quantization_plan(config.quantization, shard.config, torch.float32)
    assert plan is not None
    made = quantize(config, Path(config.model), plan, Phases(), num_threads=1, shard=shard)
    found: dict[str, Tensor] = {}
    for part in plan.parts:
        weight = torch.empty(part.shape)
        part.linear(made.codes_of(part), None).write_weight(weight)
        sizes = [len(each) for each in torch.chunk(weight, len(part.names))]
        if part.names[-1].endswith("v_proj"):
            queries = shard.config.num_heads * shard.config.head_dim
            keys = (part.rows - queries) // 2
            sizes = [queries, keys, keys]
        found |= dict(zip(part.names, torch.split(weight, sizes), strict=True))
    return found
