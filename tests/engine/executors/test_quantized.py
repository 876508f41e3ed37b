"""A quantized checkpoint on the CPU: computed with its codes, or made plain without a compiler."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from penstock.engine.config import LoadFormat
from penstock.engine.executors.cpu import CpuExecutor
from penstock.engine.models.config import ModelConfig
from penstock.engine.models.division.shard import Shard
from penstock.engine.models.errors import InvalidModel
from penstock.engine.models.formats.kept import AsStored
from tests.support.compiler import needs_compiler
from tests.support.executors import cpu_executor
from tests.support.parallel_answers import parallel_config, rank_bytes
from tests.support.quantized_checkpoints import FORMATS, save_quantized
from tests.support.rank_threads import RankThreads, memberships
from tests.support.scheduling import make_request
from tests.support.stepping import SteppedEngine, ids_of
from tests.support.tiny_models import engine_config, make_model, save


@pytest.fixture
def fp8(tmp_path: Path) -> Path:
    """A model in FP8. Beside it, in the directory "plain", one with the same values."""
    model = make_model("llama2", intermediate_size=96)
    path = tmp_path / "fp8"
    save(save_quantized(model, path, FORMATS["fp8-block"]), tmp_path / "plain")
    return path


def answer(executor: CpuExecutor, model: Path) -> list[int]:
    (outputs,) = SteppedEngine(engine_config(model), executor).run([make_request("a", [5, 6, 7])])
    return ids_of(outputs)


@pytest.mark.slow
@needs_compiler
def test_fp8_stays_in_codes_and_answers_as_its_values_do(
    fp8: Path, caplog: pytest.LogCaptureFixture
) -> None:
    plain = fp8.with_name("plain")
    expected = answer(cpu_executor(engine_config(plain), plain), plain)
    executor = cpu_executor(engine_config(fp8), fp8)
    config = ModelConfig.from_dir(fp8)
    assert executor.info.weight_bytes == config.step_weight_bytes(4, AsStored({"fp8"}).num_bytes)
    assert "stored as" not in caplog.text
    assert answer(executor, fp8) == expected


@needs_compiler
def test_weights_in_fp8_that_are_no_numbers_are_refused(fp8: Path) -> None:
    file = fp8 / "model.safetensors"
    tensors = load_file(file)
    codes = tensors["model.layers.2.mlp.up_proj.weight"].view(torch.uint8).clone()
    codes[40, 7] = 0x7F
    tensors["model.layers.2.mlp.up_proj.weight"] = codes.view(torch.float8_e4m3fn)
    save_file(tensors, file)
    with pytest.raises(InvalidModel, match="FP8 are NaN; download the model again"):
        cpu_executor(engine_config(fp8), fp8)


def test_without_a_compiler_fp8_becomes_plain_and_the_log_says_what_that_costs(
    fp8: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("penstock.engine.loading.cpu.load_library", lambda *_, **__: None)
    plain = fp8.with_name("plain")
    expected = answer(cpu_executor(engine_config(plain), plain), plain)
    assert "stored as" not in caplog.text
    executor = cpu_executor(engine_config(fp8), fp8)
    (message,) = (each for each in caplog.messages if "stored as" in each)
    assert message.startswith("the weights are stored as FP8, 0.000 GiB; layers in a format that")
    assert "become float32 as they are read, and all take 0.00" in message
    config = ModelConfig.from_dir(fp8)
    assert executor.info.weight_bytes == config.step_weight_bytes(4, AsStored().num_bytes)
    assert answer(executor, fp8) == expected


@needs_compiler
def test_columns_in_the_order_of_desc_act_are_plain_where_ranks_divide_them_and_the_log_says_so(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = make_model("llama2", intermediate_size=96, max_position_embeddings=512)
    save_quantized(model, tmp_path, FORMATS["gptq-act-order"])
    alone = cpu_executor(engine_config(tmp_path), tmp_path)
    assert "stored as" not in caplog.text
    whole, codes = ModelConfig.from_dir(tmp_path), AsStored({"int4"}).num_bytes
    assert alone.info.weight_bytes == whole.step_weight_bytes(4, codes)

    config = parallel_config(tmp_path, tensor_parallel_size=2)
    ranks = RankThreads(
        replace(config, kv_cache_memory_bytes=rank_bytes(config)), memberships(config)
    )
    ranks.close()
    part = Shard(whole, 0, 2).config
    o_and_down = 3 * (64 * 32 + 64 * 48)
    assert ranks.info.weight_bytes == part.step_weight_bytes(4, codes) > 4 * o_and_down
    message, *_ = (each for each in caplog.messages if "stored as" in each)
    assert message.startswith("the weights are stored as GPTQ, 0.000 GiB; layers in a format that")


@needs_compiler
def test_made_up_weights_are_in_the_format_too(fp8: Path) -> None:
    (fp8 / "model.safetensors").unlink()
    executor = cpu_executor(engine_config(fp8, load_format=LoadFormat.DUMMY), fp8)
    assert executor.info.weight_bytes == ModelConfig.from_dir(fp8).step_weight_bytes(
        4, AsStored({"fp8"}).num_bytes
    )
    assert len(answer(executor, fp8)) == 8
