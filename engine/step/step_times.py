"""The step model that an engine starts with, before it has steps of its own to learn from."""

from pathlib import Path
from typing import TypeVar

import msgspec

from penstock.engine.config import EngineConfig
from penstock.engine.step.model_info import ModelInfo
from penstock.scheduler.errors import InvalidConfig
from penstock.scheduler.step_model.amounts import DEVICE_UNITS, HOST_UNITS
from penstock.scheduler.step_model.analytic import analytic_model
from penstock.scheduler.step_model.model import StepModel

T = TypeVar("T")


class _CalibratedModel(msgspec.Struct):
    device: str
    dtype: str
    num_parameters: int


class _CalibrationFile(msgspec.Struct):
    """The part of a file of penstock calibrate that is used here."""

    model: _CalibratedModel
    step_model: StepModel
    device_units: tuple[str, ...]
    host_units: tuple[str, ...]


def first_step_model(config: EngineConfig, info: ModelInfo) -> StepModel | None:
    """The calibrated one if there is a file; else one by the device's peaks, of the datasheet or as
    measured at start; None where there are none. Raises InvalidConfig for a file that cannot be
    used."""
    if config.calibration is not None:
        return _calibrated(Path(config.calibration), info)
    bandwidth = info.peak_bandwidth_bytes_per_s or info.measured_bandwidth_bytes_per_s
    flops = info.peak_flops_per_s or info.measured_flops_per_s
    if not bandwidth or not flops:
        return None
    return analytic_model(
        bandwidth=bandwidth,
        flops=flops,
        weight_bytes=info.weight_bytes,
        flops_per_token=info.flops_per_token,
        num_layers=0,  # not known here; steps tell what the gaps between launches take
        runs_ahead=info.runs_ahead,
    )


def read_calibration(path: Path, kind: type[T]) -> T:
    """The file of --calibration, as far as `kind` has its fields. Raises InvalidConfig."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=kind)
    except OSError as error:
        raise InvalidConfig(f"--calibration {path} cannot be read: {error.strerror}") from error
    except msgspec.MsgspecError as error:
        raise InvalidConfig(
            f"--calibration {path} is not a file of penstock calibrate: {error}"
        ) from error


def _calibrated(path: Path, info: ModelInfo) -> StepModel:
    read = read_calibration(path, _CalibrationFile)
    if (read.device_units, read.host_units) != (DEVICE_UNITS, HOST_UNITS):
        raise InvalidConfig(
            f"--calibration {path} is of another version of Penstock; make it anew with penstock "
            "calibrate"
        )
    served = (info.num_parameters, info.dtype, info.device)
    calibrated = (read.model.num_parameters, read.model.dtype, read.model.device)
    if calibrated != served:
        raise InvalidConfig(
            f"--calibration {path} is of {_words(*calibrated)}, and this server runs "
            f"{_words(*served)}; make it anew with penstock calibrate"
        )
    return read.step_model


def _words(num_parameters: int, dtype: str, device: str) -> str:
    return f"a model of {num_parameters:,} parameters in {dtype} on {device}"
