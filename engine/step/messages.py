"""The messages between the server process and the engine process: msgspec over ZeroMQ."""

import secrets
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Self

import msgspec

from penstock.engine.config import AdapterSource, GpuWay
from penstock.engine.process.phases import LoadProgress
from penstock.engine.step.model_info import LoadedAdapter, ModelInfo
from penstock.scheduler.batch import StepOutputs
from penstock.scheduler.stats import SchedulerStats, StepWork
from penstock.scheduler.types import Insert, Request, RequestId, ResumedAnswer, Started


def new_request_id(caller: str) -> RequestId:
    """Returns the id of the HTTP request, which the logs of both processes have, and a part of our
    own: clients may send the same X-Request-Id, and one HTTP request may have many prompts."""
    return RequestId(f"{caller}-{secrets.token_hex(6)}")


def caller_of(request_id: RequestId) -> str:
    return request_id.rpartition("-")[0] or request_id


class Submit(msgspec.Struct, tag=True, frozen=True):
    """Server to engine: run this request."""

    request: Request


class OtherPrompt(msgspec.Struct, array_like=True, frozen=True):
    id: RequestId
    prompt_token_ids: tuple[int, ...]
    max_tokens: int
    resumed: tuple[ResumedAnswer, ...] | None = None
    inserts: tuple[Insert, ...] = ()


class SubmitAlike(msgspec.Struct, tag=True, frozen=True):
    """Server to engine: run these requests, which are the first but for what the others say. What
    is large in their sampling parameters is sent once, and is one object in the engine."""

    first: Request
    others: list[OtherPrompt]

    @classmethod
    def of(cls, requests: Sequence[Request]) -> Self:
        first, *others = requests
        return cls(
            first,
            [
                OtherPrompt(r.id, r.prompt_token_ids, r.sampling.max_tokens, r.resumed, r.inserts)
                for r in others
            ],
        )

    def each(self) -> Iterator[Submit]:
        first, by_max_tokens = self.first, {self.first.sampling.max_tokens: self.first.sampling}
        yield Submit(first)
        for other in self.others:
            sampling = by_max_tokens.get(other.max_tokens)
            if sampling is None:
                sampling = replace(first.sampling, max_tokens=other.max_tokens)
                by_max_tokens[other.max_tokens] = sampling
            yield Submit(
                replace(
                    first,
                    id=other.id,
                    prompt_token_ids=other.prompt_token_ids,
                    sampling=sampling,
                    resumed=other.resumed,
                    inserts=other.inserts,
                )
            )


class Abort(msgspec.Struct, tag=True, frozen=True):
    """Server to engine: end this request, or only its answer `index`."""

    request_id: RequestId
    index: int | None = None


class LoadAdapter(msgspec.Struct, tag=True, frozen=True):
    """Server to engine, and rank 0 to the others: load this LoRA adapter, and answer with
    `AdapterLoaded`. number: of the command."""

    number: int
    source: AdapterSource


class UnloadAdapter(msgspec.Struct, tag=True, frozen=True):
    """Server to engine, and rank 0 to the others: nothing will name this adapter any more."""

    adapter_id: str


class AdapterLoaded(msgspec.Struct, tag=True, frozen=True):
    """The answer: what became of a `LoadAdapter`. adapter: None where it cannot be loaded,
    and message says why."""

    number: int
    adapter: LoadedAdapter | None
    message: str = ""


class Ready(msgspec.Struct, tag=True, frozen=True):
    """Engine to server, once: the model is loaded. adapters: those of its settings that are too."""

    info: ModelInfo
    adapters: tuple[LoadedAdapter, ...] = ()


class Failed(msgspec.Struct, tag=True, frozen=True):
    """Engine to server, its last message: why it ends. signal: where one of its ranks was ended or
    stopped by that. failed_way: see `penstock.engine.step.gpu_fault`."""

    message: str
    signal: int | None = None
    failed_way: GpuWay | None = None


class Refused(msgspec.Struct, tag=True, frozen=True):
    """Engine to server: this request was not accepted, and why. It gets no outputs.

    late: where the same request may be accepted later, since its target is what refused it: the
    arguments of `TargetOutOfReach`.
    """

    request_id: RequestId
    message: str
    late: tuple[float, float] | None = None


class Accepted(msgspec.Struct, tag=True, frozen=True):
    """Engine to server: this request, which has a target for its first token, will run."""

    request_id: RequestId


class StepReport(msgspec.Struct, tag=True, frozen=True):
    """Engine to server, once a step: every new token of the step, and what the step was.

    started_s is in time.monotonic(), which all processes of a machine share. step_s: from launch
    (or the end of the step before) to the ids on the host. model_bytes and model_flops: the least
    that the step had to read and compute. started: answers that had their first step since the last
    report. wait_s: how long the loop waited for the device since the last step's end; where the
    executor computes within `execute`, that is the computation. host_s: the rest of the time since
    then, without waiting for commands: scheduling, launching, reporting. predicted_s: what
    wait_s and host_s together were expected to be when the step was launched; None as long as
    nothing was known of such steps. computed_s: see `SampledTokens`; the rest of step_s is the
    pipeline's bubble. proposing_s, encoding_s: see there too; they are parts of wait_s.
    A report of step 0 stands for no step: it carries the final outputs of aborted answers.
    """

    step: int
    outputs: StepOutputs
    stats: SchedulerStats
    work: StepWork
    started_s: float
    step_s: float
    model_bytes: int
    model_flops: int
    started: list[Started] = []
    wait_s: float = 0.0
    host_s: float = 0.0
    predicted_s: float | None = None
    computed_s: float | None = None
    proposing_s: float = 0.0
    encoding_s: float = 0.0

    @property
    def device_s(self) -> float:
        """The part of wait_s in which a stage computed the step's rows: it neither waited for
        others, nor proposed drafts, nor encoded images."""
        computed_s = self.wait_s if self.computed_s is None else self.computed_s
        return computed_s - self.proposing_s - self.encoding_s


class RatesMeasured(msgspec.Struct, tag=True, frozen=True):
    """Engine to server: what the machine does when nothing else runs; see `ModelInfo`."""

    bandwidth_bytes_per_s: float
    flops_per_s: float


ToEngine = Submit | Abort | LoadAdapter | UnloadAdapter
OnWire = ToEngine | SubmitAlike
FromLoop = Refused | Accepted | StepReport | AdapterLoaded | RatesMeasured
FromEngine = LoadProgress | Ready | Failed | FromLoop
