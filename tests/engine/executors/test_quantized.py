"""A quantized checkpoint on the CPU: formats that nothing there computes are made plain."""

from pathlib import Path

import pytest

from penstock.engine.config import LoadFormat
from penstock.engine.executors.cpu import CpuExecutor
from penstock.engine.models.config import ModelConfig
from penstock.engine.models.layers.kept import AsStored
from tests.support.quantized_checkpoints import FORMATS, save_quantized
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


@pytest.mark.parametrize("is_compiled", [True, False])
def test_fp8_becomes_plain_weights_and_the_log_says_what_that_costs(
    is_compiled: bool, fp8: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not is_compiled:
        monkeypatch.setattr("penstock.engine.executors.cpu.load_library", lambda *_, **__: None)
    plain = fp8.with_name("plain")
    expected = answer(CpuExecutor(engine_config(plain), plain), plain)
    assert "stored as" not in caplog.text
    executor = CpuExecutor(engine_config(fp8), fp8)
    (message,) = (each for each in caplog.messages if "stored as" in each)
    assert message.startswith("the weights are stored as FP8, 0.000 GiB; nothing here computes")
    assert "become float32 as they are read, and take 0.00" in message
    config = ModelConfig.from_dir(fp8)
    assert executor.info.weight_bytes == config.step_weight_bytes(4, AsStored().num_bytes)
    assert answer(executor, fp8) == expected


def test_made_up_weights_are_in_the_format_too_and_become_plain(
    fp8: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (fp8 / "model.safetensors").unlink()
    executor = CpuExecutor(engine_config(fp8, load_format=LoadFormat.DUMMY), fp8)
    assert executor.info.weight_bytes == ModelConfig.from_dir(fp8).step_weight_bytes(
        4, AsStored().num_bytes
    )
    assert "stored as FP8" in caplog.text
    assert len(answer(executor, fp8)) == 8
