"""Quantization at load, and its cache on disk."""

import json
import logging
import os
from functools import partial
from pathlib import Path

import msgspec
import pytest
import torch

from penstock.engine.config import LoadFormat, Quantization
from penstock.engine.memory.host import Arena
from penstock.engine.models.at_load.quantize import (
    Quantized,
    Rounder,
    quantization_plan,
    quantize,
)
from penstock.engine.models.at_load.rounding import rounded
from penstock.engine.models.at_load.weights import QuantizedWeights
from penstock.engine.models.config import ModelConfig
from penstock.engine.models.division.shard import Shard
from penstock.engine.models.division.stage import Stage
from penstock.engine.models.errors import InvalidModel
from penstock.engine.models.layers.linear import PlainLinear
from penstock.engine.models.weights import Checkpoint
from penstock.engine.process.phases import LoadProgress, Phases
from tests.support.compiler import needs_compiler
from tests.support.paths import DEMO_MODEL
from tests.support.tiny_models import Harness, engine_config, make_model, save

INT8, INT4 = Quantization.INT8, Quantization.INT4


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The directory that has the quantized weights of each checkpoint."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "penstock" / "quantized"


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    """A model whose layers are wide enough for 4 bits."""
    model = make_model("qwen2", hidden_size=256, num_hidden_layers=2, tie_word_embeddings=False)
    return save(model, tmp_path / "model")


def load(
    directory: Path,
    method: Quantization = INT4,
    phases: Phases | None = None,
    shard: Shard | None = None,
    stage: Stage | None = None,
    **changes: object,
) -> Quantized:
    model = ModelConfig.from_dir(directory)
    if shard is not None:
        model = shard.config
    if stage is not None:
        model = stage.config
    plan = quantization_plan(method, model, torch.bfloat16, stage=stage)
    assert plan is not None
    config = engine_config(directory, quantization=method, **changes)
    with torch.inference_mode():
        return quantize(
            config, directory, plan, phases or Phases(), num_threads=1, shard=shard, stage=stage
        )


def tensors(made: Quantized) -> list[torch.Tensor]:
    return [tensor for part in made.plan.parts for tensor in made.codes_of(part)]


def are_equal(one: Quantized, other: Quantized) -> bool:
    pairs = zip(tensors(one), tensors(other), strict=True)
    return all(torch.equal(a, b) for a, b in pairs)


def overwrite_weights(directory: Path) -> None:
    """With zeros, so that nobody can tell by names, sizes and times."""
    path = directory / "model.safetensors"
    times = path.stat()
    content = bytearray(path.read_bytes())
    header = 8 + int.from_bytes(content[:8], "little")
    content[header:] = bytes(len(content) - header)
    path.write_bytes(content)
    os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))


def test_the_next_start_finds_them_and_reads_no_original_weights(
    directory: Path, cache: Path
) -> None:
    first = load(directory)
    overwrite_weights(directory)
    phases = Phases()
    second = load(directory, phases=phases)
    assert are_equal(first, second)
    assert first.info == second.info
    assert "quantize" not in phases.seconds
    assert len(list(cache.iterdir())) == 1


def test_the_bar_counts_every_weight(directory: Path, cache: Path) -> None:
    reports: list[LoadProgress] = []
    made = load(directory, phases=Phases(reports.append))
    assert reports[-1].num_done == reports[-1].total == made.plan.num_weights
    assert reports[-1].phase == "quantize" and reports[-1].unit == "weights"


def test_each_method_has_its_own(directory: Path, cache: Path) -> None:
    four, eight = load(directory, INT4), load(directory, INT8)
    assert len(list(cache.iterdir())) == 2
    assert {part.kind for part in eight.plan.parts} == {Quantization.INT8}
    assert are_equal(four, load(directory, INT4)) and are_equal(eight, load(directory, INT8))


def test_those_of_a_checkpoint_that_has_changed_are_made_again_and_the_old_ones_deleted(
    directory: Path, cache: Path
) -> None:
    before = load(directory)
    save(make_model("qwen2", 1, hidden_size=256, num_hidden_layers=2), directory)
    after = load(directory)
    assert not are_equal(before, after)
    assert len(list(cache.iterdir())) == 1
    assert are_equal(after, load(directory))


@pytest.mark.parametrize(
    "damage", ["part cut off", "part missing", "no manifest", "foreign", "other shape"]
)
def test_what_is_damaged_is_made_again(
    damage: str, directory: Path, cache: Path, caplog: pytest.LogCaptureFixture
) -> None:
    first = load(directory)
    (made,) = cache.iterdir()
    part = made / "00003.safetensors"
    if damage == "part cut off":
        part.write_bytes(part.read_bytes()[:-1])
    elif damage == "part missing":
        part.unlink()
    elif damage == "no manifest":
        (made / "manifest.json").unlink()
    elif damage == "foreign":
        manifest = json.loads((made / "manifest.json").read_text())
        (made / "manifest.json").write_text(json.dumps(manifest | {"key": "0" * 32}))
    else:
        part.write_bytes((made / "00001.safetensors").read_bytes())
    phases = Phases()
    assert are_equal(first, load(directory, phases=phases))
    assert "quantize" in phases.seconds
    assert [r.message for r in caplog.records if "is damaged, and is made again" in r.message]
    phases = Phases()
    assert are_equal(first, load(directory, phases=phases))
    assert "quantize" not in phases.seconds


def test_a_cache_that_cannot_be_written_is_one_line_of_the_log(
    directory: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    (tmp_path / "file").write_text("not a directory")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    made = load(directory)
    assert tensors(made)
    warnings = [r.message for r in caplog.records if r.levelno >= logging.WARNING]
    assert len(warnings) == 1 and "are not cached" in warnings[0]


def test_a_disk_that_is_too_full_gets_nothing(
    directory: Path,
    cache: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr("penstock.engine.models.at_load.cache._SPARE_BYTES", 2**60)
    load(directory)
    assert not list(cache.iterdir())
    assert "GiB free" in caplog.text


def test_a_start_that_fails_leaves_nothing_behind(directory: Path, cache: Path) -> None:
    model = make_model("qwen2", hidden_size=256, num_hidden_layers=2, tie_word_embeddings=False)
    model.model.layers[1].mlp.down_proj.weight.data[3, 7] = torch.inf
    save(model, directory)
    with pytest.raises(InvalidModel, match=r"layers\.1\.mlp\.down_proj has weights that are NaN"):
        load(directory)
    assert not list(cache.iterdir())


def test_random_weights_are_rounded_and_not_cached(directory: Path, cache: Path) -> None:
    (directory / "model.safetensors").unlink()
    made = load(directory, load_format=LoadFormat.DUMMY)
    assert all(codes.any() for codes in tensors(made))
    assert made.info.kl_divergence is None
    assert not cache.exists()


def test_the_figures_are_kept_beside_the_weights(
    cache: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    first = load(DEMO_MODEL, INT8).info
    assert first.kl_divergence is not None and first.num_tokens > 200
    assert f"mean KL divergence {first.kl_divergence:.2g}" in caplog.text
    assert "report" not in caplog.text
    (made,) = cache.iterdir()
    manifest = json.loads((made / "manifest.json").read_text())
    manifest["quality"]["kl_divergence"] = 0.5
    (made / "manifest.json").write_bytes(msgspec.json.encode(manifest))
    assert load(DEMO_MODEL, INT8).info.kl_divergence == 0.5

    measured_again = load(DEMO_MODEL, INT8, quantization_report=True).info
    assert measured_again.kl_divergence == pytest.approx(first.kl_divergence, rel=1e-3)
    assert "quantization report: perplexity of the text" in caplog.text


def weights(made: Quantized) -> dict[str, torch.Tensor]:
    """In float32, by the part's key."""
    found = {}
    for part in made.plan.parts:
        weight = torch.empty(part.shape)
        part.linear(made.codes_of(part), None).write_weight(weight)
        found[part.key] = weight
    return found


@pytest.mark.parametrize("method", Quantization)
def test_each_rank_rounds_its_part_to_what_the_whole_is_rounded_to(
    method: Quantization, tmp_path: Path, cache: Path
) -> None:
    """But for FP8, whose scale is for a row, of which each rank has a part."""
    sizes = {"hidden_size": 512, "intermediate_size": 512, "num_hidden_layers": 2}
    model = make_model("llama2", vocab_size=97, **sizes)
    directory = save(model, tmp_path / "model")
    whole = weights(load(directory, method))
    config = ModelConfig.from_dir(directory)
    made = [load(directory, method, shard=Shard(config, rank, 2)) for rank in range(2)]
    ranks = [weights(each) for each in made]
    for layer in ("self_attn.o_proj", "mlp.down_proj"):
        name = f"model.layers.1.{layer}"
        joined = torch.cat([rank[name] for rank in ranks], 1)
        if method is not Quantization.FP8:
            assert joined.equal(whole[name])
            continue
        exact = model.get_submodule(name).weight.detach()
        allocate = lambda shape, dtype: torch.empty(shape, dtype=dtype)  # noqa: E731
        own = [rounded(half, Quantization.FP8, allocate) for half in exact.chunk(2, dim=1)]
        expected = [each.codes.float() * each.scales for each in own]
        assert joined.equal(torch.cat(expected, 1))
        # Of fewer weights, the largest is no larger.
        assert (joined - exact).square().sum() < (whole[name] - exact).square().sum()
    assert torch.cat([rank["lm_head"] for rank in ranks])[:97].equal(whole["lm_head"])
    name = "model.layers.0.mlp.gate_proj+model.layers.0.mlp.up_proj"
    gates_and_ups = [rank[name].view(2, 256, 512) for rank in ranks]
    assert torch.cat(gates_and_ups, 1).flatten(0, 1).equal(whole[name])


def test_each_rank_and_each_stage_has_its_own_cache(directory: Path, cache: Path) -> None:
    config = ModelConfig.from_dir(directory)
    shards = [Shard(config, rank, 2) for rank in range(2)]
    shares = [(shard, Stage(shard.config, i, 2)) for shard in shards for i in range(2)]
    first = [load(directory, INT8, shard=shard, stage=stage) for shard, stage in shares]
    whole = load(directory, INT8)
    assert len(list(cache.iterdir())) == 5
    overwrite_weights(directory)
    again = [load(directory, INT8, shard=shard, stage=stage) for shard, stage in shares]
    assert all(map(are_equal, first, again)) and not are_equal(first[0], first[2])
    assert are_equal(whole, load(directory, INT8))
    names = [name for made in first[:2] for part in made.plan.parts for name in part.names]
    assert sorted(names) == sorted(name for part in whole.plan.parts for name in part.names)


@needs_compiler
@pytest.mark.parametrize("hidden_size", [45, 46])
def test_a_tied_embedding_is_not_rounded_with_the_output_layer(
    hidden_size: int, tmp_path: Path
) -> None:
    """Codes of odd columns are widened in the compiled step, and are no embedding then either."""
    changes = {"head_dim": 8, "tie_word_embeddings": True}
    path = save(make_model("qwen3", hidden_size=hidden_size, **changes), tmp_path)
    plan = quantization_plan(Quantization.FP8, ModelConfig.from_dir(path), torch.float32)
    assert plan is not None
    plain = Checkpoint(path, partial(torch.empty, dtype=torch.float32))
    found = []
    for native in (False, True):
        rounder = Rounder(plain, plan, Arena().empty, Phases(), num_threads=1)
        weights = QuantizedWeights(plain, plan.scheme.parts, rounder)
        ways = {"native": native, "has_codes": native}
        harness = Harness(path, num_sequences=1, make_linear=PlainLinear, weights=weights, **ways)
        harness.token_table[0, :20] = torch.arange(3, 23)
        found += harness.run([(0, 0, 20)])
    torch.testing.assert_close(found[1], found[0], atol=1e-5, rtol=1e-4)
