"""The messages between the server process and the engine process: msgspec over ZeroMQ."""

import msgspec

from penstock.engine.model_info import ModelInfo
from penstock.engine.phases import LoadProgress
from penstock.scheduler.stats import SchedulerStats, StepWork
from penstock.scheduler.types import Request, RequestId, RequestOutput, Started


class Submit(msgspec.Struct, tag=True, frozen=True):
    """Server to engine: run this request."""

    request: Request


class Abort(msgspec.Struct, tag=True, frozen=True):
    """Server to engine: end this request, or only its answer `index`."""

    request_id: RequestId
    index: int | None = None


class Ready(msgspec.Struct, tag=True, frozen=True):
    """Engine to server, once: the model is loaded."""

    info: ModelInfo


class Failed(msgspec.Struct, tag=True, frozen=True):
    """Engine to server, its last message: why it ends."""

    message: str


class Refused(msgspec.Struct, tag=True, frozen=True):
    """Engine to server: this request was not accepted, and why. It gets no outputs."""

    request_id: RequestId
    message: str


class StepReport(msgspec.Struct, tag=True, frozen=True):
    """Engine to server, once a step: every new token of the step, and what the step was.

    started_s is in time.monotonic(), which all processes of a machine share. step_s: from launch
    (or the end of the step before) to the ids on the host. model_bytes and model_flops: the least
    that the step had to read and compute. started: answers that had their first step since the last
    report. A report of step 0 stands for no step: it carries the final outputs of aborted answers.
    """

    step: int
    outputs: list[RequestOutput]
    stats: SchedulerStats
    work: StepWork
    started_s: float
    step_s: float
    model_bytes: int
    model_flops: int
    started: list[Started] = []


ToEngine = Submit | Abort
FromEngine = LoadProgress | Ready | Failed | Refused | StepReport
