"""The part of `openvino_genai` for continuous batching, with the behaviour of version 2026.4."""

import enum
import time
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy
from openvino import Tensor

# What is said of GenerationStatus.IGNORED: the cache has no room for the request.
_MAX_PROMPT_TOKENS = 64
_STEP_S = 0.005


class GenerationStatus(enum.Enum):
    RUNNING = 0
    FINISHED = 1
    IGNORED = 2
    CANCEL = 3


class GenerationFinishReason(enum.Enum):
    NONE = 0
    STOP = 1
    LENGTH = 2


class SchedulerConfig:
    cache_size = 0
    max_num_seqs = 256
    max_num_batched_tokens = 256
    enable_prefix_caching = False


@dataclass
class GenerationConfig:
    max_new_tokens: int = 2**64 - 1
    ignore_eos: bool = False
    do_sample: bool = True


@dataclass
class GenerationOutput:
    generated_ids: list[int]
    finish_reason: GenerationFinishReason


class GenerationHandle:
    def __init__(self, number: int, prompt: list[int], config: GenerationConfig) -> None:
        self._number, self._prompt, self._config = number, prompt, config
        self._num_tokens = 0
        self._status = GenerationStatus.RUNNING
        self._unread: list[GenerationOutput] = []

    def step(self) -> None:
        if len(self._prompt) > _MAX_PROMPT_TOKENS:
            self._status = GenerationStatus.IGNORED
            return
        token_id = self._prompt[self._num_tokens % len(self._prompt)]
        self._num_tokens += 1
        reason = GenerationFinishReason.NONE
        if token_id == 0 and not self._config.ignore_eos:
            reason = GenerationFinishReason.STOP
        elif self._num_tokens == self._config.max_new_tokens:
            reason = GenerationFinishReason.LENGTH
        if reason is not GenerationFinishReason.NONE:
            self._status = GenerationStatus.FINISHED
        self._unread.append(GenerationOutput([token_id], reason))

    def can_read(self) -> bool:
        return bool(self._unread) and self._status is not GenerationStatus.CANCEL

    def read(self) -> dict[int, GenerationOutput]:
        return {0: self._unread.pop(0)}

    def get_status(self) -> GenerationStatus:
        return self._status

    def cancel(self) -> None:
        self._status = GenerationStatus.CANCEL
        print(f"request {self._number} is cancelled", flush=True)


class Tokenizer:
    def encode(self, text: str) -> Any:
        return SimpleNamespace(input_ids=Tensor(numpy.array([[*text.encode()]])))

    def decode(self, rows: list[list[int]]) -> list[str]:
        return [bytes(row).decode(errors="replace") for row in rows]


class ContinuousBatchingPipeline:
    def __init__(
        self, model: str, scheduler: SchedulerConfig, device: str, properties: dict[str, Any]
    ) -> None:
        print(f"{device} {properties} {vars(scheduler)}", flush=True)
        self._handles: list[GenerationHandle] = []

    def get_tokenizer(self) -> Tokenizer:
        return Tokenizer()

    def get_config(self) -> GenerationConfig:
        return GenerationConfig()

    def add_request(
        self, request_id: int, input_ids: Tensor, config: GenerationConfig
    ) -> GenerationHandle:
        assert not config.do_sample and input_ids.data.dtype == numpy.int64
        handle = GenerationHandle(request_id, input_ids.data[0].tolist(), config)
        self._handles.append(handle)
        return handle

    def step(self) -> None:
        running = [each for each in self._handles if each.get_status() is GenerationStatus.RUNNING]
        print(f"a step of {len(running)}", flush=True)
        for handle in running:
            handle.step()
        self._handles = running
        time.sleep(_STEP_S)
