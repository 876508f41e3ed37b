"""`--quantization` in the executors: what is refused, and the bytes that are counted."""

import json
from functools import partial
from pathlib import Path

import pytest
import torch

from penstock.engine.config import Dtype, LoadFormat, Quantization
from penstock.engine.loading.devices import check_quantization
from penstock.engine.memory.host import Arena
from penstock.engine.models.at_load.plan import Plan, Scheme
from penstock.engine.models.at_load.quantize import Rounder
from penstock.engine.models.config import ModelConfig
from penstock.engine.models.weights import Checkpoint
from penstock.engine.native import compiler
from penstock.engine.process.phases import Phases
from penstock.scheduler.errors import InvalidConfig
from tests.engine.executors.test_cpu import generate
from tests.support.executors import cpu_executor
from tests.support.tiny_models import engine_config, make_model, save

INT8, INT4 = Quantization.INT8, Quantization.INT4


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    compiled = compiler.cache_directory()
    monkeypatch.setattr(
        compiler, "cache_directory", lambda: compiled
    )  # where all tests have what is compiled
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def plan_of(directory: Path, method: Quantization, dtype: torch.dtype) -> Plan:
    return Plan.of(Scheme(method, ModelConfig.from_dir(directory)), dtype)


@pytest.mark.parametrize("family", ["llama3.2_tied", "llama_biases", "qwen3", "mistral_window"])
@pytest.mark.parametrize("method", [INT8, INT4])
def test_the_plan_counts_the_bytes_that_are_loaded(
    family: str, method: Quantization, tmp_path: Path
) -> None:
    model = make_model(
        family, hidden_size=256, intermediate_size=256, num_hidden_layers=2, head_dim=64
    )
    directory = save(model, tmp_path / "model")
    config = engine_config(directory, quantization=method, dtype=Dtype.BFLOAT16)
    executor = cpu_executor(config, directory)
    plan = plan_of(directory, method, torch.bfloat16)
    assert executor.info.weight_bytes == plan.step_weight_bytes
    shape = ModelConfig.from_dir(directory)
    assert plan.weight_bytes - plan.step_weight_bytes == 2 * shape.vocab_size * shape.hidden_size
    least, most = (8.5, 8.5) if method is INT8 else (4.5, 5.5)
    assert least <= plan.bits_per_weight <= most
    assert plan.num_weights == shape.num_token_weights + 96 * 256
    info = executor.info.quantization
    assert info is not None and (info.method, info.bits) == (method, method.bits)


def test_4_bits_leave_the_output_layer_the_values_and_narrow_layers_at_8(tmp_path: Path) -> None:
    wide = plan_of(
        save(make_model("qwen2", hidden_size=256), tmp_path / "wide"), INT4, torch.float32
    )
    bits = {name: part.kind.bits for part in wide.parts for name in part.names}
    eight = {name.rpartition(".")[2] for name, num in bits.items() if num == 8}
    # down_proj reads the 112 of intermediate_size.
    assert eight == {"lm_head", "v_proj", "down_proj"}
    narrow = plan_of(save(make_model("qwen2"), tmp_path / "narrow"), INT4, torch.float32)
    assert {part.kind for part in narrow.parts} == {Quantization.INT8}
    assert len(narrow.parts) == 3 * 4 + 1  # q, k and v are one where they have the same format


@pytest.mark.parametrize("method", Quantization)
def test_a_step_computes_with_the_rounded_weights(method: Quantization, tmp_path: Path) -> None:
    """As does the same model whose weights were rounded before they were saved."""
    model = make_model("qwen3_bias", hidden_size=256, intermediate_size=256)
    directory = save(model, tmp_path / "model")
    executor = cpu_executor(engine_config(directory, quantization=method), directory)
    prompts = [[3, 7, 11, 5], list(range(20, 60))]
    answers = generate(executor, prompts, 8)

    plan = plan_of(directory, method, torch.float32)
    rounder = Rounder(
        Checkpoint(directory, partial(torch.empty, dtype=torch.float32)),
        plan,
        Arena().empty,
        Phases(),
        num_threads=1,
    )
    layers = dict(model.named_modules())
    for part in plan.parts:
        rows = torch.empty(part.shape)
        part.linear(rounder(part), None).write_weight(rows)
        modules = [layers[name] for name in part.names]
        sizes = [len(module.weight) for module in modules]
        for module, weight in zip(modules, torch.split(rows, sizes), strict=True):
            module.weight = torch.nn.Parameter(weight.clone())  # no longer the embedding, if tied
    model.config.tie_word_embeddings = False
    rounded_before = save(model, tmp_path / "rounded")
    expected = cpu_executor(engine_config(rounded_before), rounded_before)
    assert answers == generate(expected, prompts, 8)


def test_random_weights_are_served_quantized(tmp_path: Path) -> None:
    make_model("llama3.2_tied", hidden_size=256).config.save_pretrained(tmp_path)
    config = engine_config(tmp_path, quantization=INT4, load_format=LoadFormat.DUMMY)
    executor = cpu_executor(config, tmp_path)
    assert generate(executor, [[1, 2, 3]], 4)
    assert executor.info.quantization is not None


def test_a_checkpoint_that_is_quantized_already_is_refused(tmp_path: Path) -> None:
    config = make_model("llama2").config.to_dict() | {
        "quantization_config": {"quant_method": "awq"}
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(InvalidConfig, match="quantized already, in the format AWQ; leave it out"):
        check_quantization(engine_config(tmp_path, quantization=INT8), tmp_path)


def test_a_report_of_nothing_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidConfig, match="--quantization-report needs --quantization"):
        engine_config(tmp_path, quantization_report=True)
