"""`Calibration`: one file with a step model, and what it is a model of."""

from dataclasses import dataclass
from pathlib import Path

import msgspec

from penstock.engine.step.model_info import ModelInfo
from penstock.engine.step.step_times import read_calibration
from penstock.loadtest.calibrate.front_end import NO_FRONT_END, FrontEnd
from penstock.scheduler.config import SchedulerConfig
from penstock.scheduler.errors import InvalidConfig
from penstock.scheduler.step_model.amounts import DEVICE_UNITS, HOST_UNITS
from penstock.scheduler.step_model.model import StepModel

_FORMAT = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Calibration:
    """model: the served model, named `name`, its device, types and limits. scheduler: the flags
    that it was measured with. front_end: what is not the engine's: HTTP, the tokenizer, messages;
    nothing of it where there was no server. source: where the steps came from, for people. date: as
    in results. units: of the step model's coefficients, which are seconds of each.
    """

    name: str
    source: str
    date: str
    version: str
    model: ModelInfo
    scheduler: SchedulerConfig
    step_model: StepModel
    front_end: FrontEnd = NO_FRONT_END
    format: int = _FORMAT
    device_units: tuple[str, ...] = DEVICE_UNITS
    host_units: tuple[str, ...] = HOST_UNITS

    def write(self, path: Path) -> None:
        """Raises InvalidConfig."""
        data = msgspec.json.format(msgspec.json.encode(self))
        try:
            path.write_bytes(data + b"\n")
        except OSError as error:
            raise InvalidConfig(f"--output {path} cannot be written: {error.strerror}") from error

    @classmethod
    def read(cls, path: Path) -> "Calibration":
        """Raises InvalidConfig."""
        read = read_calibration(path, cls)
        if (read.format, read.device_units, read.host_units) != (_FORMAT, DEVICE_UNITS, HOST_UNITS):
            raise InvalidConfig(
                f"--calibration {path} is of another version of Penstock, {read.version}; make it "
                "anew with penstock calibrate"
            )
        return read
