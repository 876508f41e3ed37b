"""`TorchExecutor`: a transformer over a paged KV pool, on one device.

It holds, on the device, what a step needs of every sequence: its token ids and its block table,
one row per slot. A batch brings only differences. Sampled ids are written back to the token table
where they are made, so the next step reads them there and nothing has to pass through the host.
"""

import logging
import os
import time
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from engine.attention.gathered import gathered_attention
from engine.config import Device, Dtype, EngineConfig, LoadFormat
from engine.executor import ModelInfo
from engine.grammar import Grammars, GrammarTable
from engine.hardware import computes_bfloat16, peak_bandwidth, read_bandwidth
from engine.kv_pool import KVPool, kv_bytes_per_token, size_pool
from engine.memory import Arena
from engine.model_input import ModelInput, build_model_input
from engine.models.config import ModelConfig
from engine.models.layers import PackedLinear, PlainLinear, can_pack
from engine.models.llama import LlamaModel, Model
from engine.models.native import NativeModel, load_library
from engine.models.weights import Checkpoint, Empty, RandomWeights, WeightSource
from engine.prompt_reader import PromptPart, PromptReader
from engine.sampler import Sampler
from scheduler.errors import InvalidConfig
from scheduler.types import PromptOutput, SampledTokens, SamplingParams, ScheduledBatch

logger = logging.getLogger(__name__)

_DEFAULT_BLOCK_SIZE = {"cpu": 16, "cuda": 64}
# Read once at start for the metrics: larger than any last-level cache we know, and 30 ms long.
_BANDWIDTH_PROBE_BYTES = 256 * 2**20


class TorchExecutor:
    """See `engine.executor.Executor`."""

    def __init__(self, config: EngineConfig, model_dir: Path) -> None:
        self._load_seconds: dict[str, float] = {}
        self._device = _device(config.device)
        self._dtype = _dtype(config.dtype, self._device)
        # One core is left to the server process.
        num_threads = config.num_threads or max(1, (os.cpu_count() or 1) - 1)
        model = ModelConfig.from_dir(model_dir)
        block_size = config.block_size or _DEFAULT_BLOCK_SIZE[self._device.type]

        # Before the weights are read: what does not fit is told at once.
        size = size_pool(config, model, block_size, self._dtype)
        with self._timed("compile"):
            library = load_library() if self._on_cpu else None
        with self._timed("weights"), torch.inference_mode():
            # The threads that read are Python's; each of torch's calls inside them uses one.
            torch.set_num_threads(1)
            self._model: Model
            self._model = llama = LlamaModel(
                model,
                _weights(config.load_format, model_dir, self._empty(in_arena=library is not None)),
                PackedLinear if can_pack(self._device) and library is None else PlainLinear,
                gathered_attention,
                max_model_len=size.max_model_len,
                device=self._device,
                num_load_threads=num_threads,
            )
            torch.set_num_threads(num_threads)
        with self._timed("kv_pool"):
            self._pool = KVPool(model, size.num_blocks, block_size, self._dtype, self._device)
            if library is not None:
                self._model = NativeModel(library, llama, self._pool, num_threads)
        with self._timed("bandwidth"):
            measured = read_bandwidth(_BANDWIDTH_PROBE_BYTES) if self._on_cpu else None

        max_num_seqs = config.scheduler.max_num_seqs
        max_blocks = -(-size.max_model_len // block_size)
        self._token_table = self._table(max_num_seqs, size.max_model_len + 1, torch.int64)
        self._block_tables = self._table(max_num_seqs, max_blocks, torch.int32)
        self._prompt_lengths = [0] * max_num_seqs
        grammars = Grammars.of_model(model_dir, model.vocab_size, model.eos_token_ids)
        self._grammars = GrammarTable(grammars, max_num_seqs, model.vocab_size)
        self._sampler = Sampler(max_num_seqs, model.vocab_size, self._device, self._grammars)
        self._prompts = PromptReader(model.vocab_size, self._model.logits)
        self._info = self._describe(
            model, size.max_model_len, size.num_blocks, block_size, measured
        )

    @property
    def info(self) -> ModelInfo:
        return self._info

    @property
    def runs_ahead(self) -> bool:
        return False

    def prepare(self, sampling: SamplingParams) -> "Future[Any] | None":
        return self._grammars.compile(sampling)

    def execute(self, batch: ScheduledBatch) -> "Done":
        with torch.inference_mode():
            self._apply(batch)
            return Done(self._run(batch))

    def _apply(self, batch: ScheduledBatch) -> None:
        """Brings the tables up to date, in the order that `ScheduledBatch` states."""
        for assignment in batch.assignments:
            slot, token_ids, num_prompt_tokens, block_ids, sampling, seed, _ = assignment
            self._token_table[slot, : len(token_ids)] = self._tensor(token_ids)
            self._block_tables[slot, : len(block_ids)] = self._tensor(block_ids)
            self._prompt_lengths[slot] = num_prompt_tokens
            self._sampler.assign(slot, sampling, seed)
            self._grammars.assign(assignment)
            self._prompts.assign(assignment)
        if batch.table_updates:
            slots, indices, blocks = self._tensor(batch.table_updates).unbind(1)
            self._block_tables[slots, indices] = blocks.to(torch.int32)
        if batch.copies:
            self._pool.copy(batch.copies)

    def _run(self, batch: ScheduledBatch) -> SampledTokens:
        if not batch.slots:
            return SampledTokens(step=batch.step, token_ids=[])
        block_size = self._info.block_size
        step = build_model_input(batch, self._token_table, self._block_tables, block_size)
        rows = [row for row, samples in enumerate(batch.samples) if samples]
        slots = [batch.slots[row] for row in rows]
        self._grammars.start(slots)
        prompts: tuple[PromptOutput, ...] = ()
        if parts := self._prompts.parts(batch, step.query_starts):
            logits, prompts = self._compute_and_read(step, parts)
        else:
            logits = self._model(step, self._pool)
        lengths = [step.context_lens[row] for row in rows]
        if not rows:
            return SampledTokens(step=batch.step, token_ids=[], prompts=prompts)
        prompt_lengths = [self._prompt_lengths[slot] for slot in slots]
        ids, logprobs = self._sampler.sample(
            logits, slots, lengths, self._token_table, prompt_lengths
        )
        self._token_table[self._tensor(slots), self._tensor(lengths)] = ids
        token_ids = ids.tolist()
        failed = self._grammars.advance(slots, token_ids)
        return SampledTokens(
            step=batch.step,
            token_ids=token_ids,
            logprobs=logprobs,
            failed=failed,
            prompts=prompts,
        )

    def _compute_and_read(
        self, step: ModelInput, parts: list[PromptPart]
    ) -> tuple[Tensor, tuple[PromptOutput, ...]]:
        """The logits of a step in which something is asked of prompts, and what is told of them."""
        num_sampling = len(step.sample_rows)
        asked = self._tensor([row for part in parts for row in part.rows])
        rows = torch.cat((step.sample_rows, asked))
        states = self._model.states(step, self._pool, rows)
        prompts = self._prompts.read(parts, states[num_sampling:], self._token_table)
        return self._model.logits(states[:num_sampling]), prompts

    @property
    def _on_cpu(self) -> bool:
        return self._device.type == "cpu"

    def _empty(self, *, in_arena: bool) -> Empty:
        """An arena is for weights that stay as they are read, and not for those to be packed."""
        if in_arena:
            return partial(Arena().empty, dtype=self._dtype)
        return partial(torch.empty, dtype=self._dtype, device=self._device)

    def _table(self, rows: int, columns: int, dtype: torch.dtype) -> Tensor:
        return torch.zeros(rows, columns, dtype=dtype, device=self._device)

    def _tensor(self, values: object) -> Tensor:
        return torch.tensor(values, dtype=torch.int64, device=self._device)

    @contextmanager
    def _timed(self, phase: str) -> Iterator[None]:
        start = time.perf_counter()
        yield
        self._load_seconds[phase] = time.perf_counter() - start

    def _describe(
        self,
        model: ModelConfig,
        max_model_len: int,
        num_blocks: int,
        block_size: int,
        measured_bandwidth: float | None,
    ) -> ModelInfo:
        num_linear = model.num_layers * model.num_layer_weights
        num_embedding = model.vocab_size * model.hidden_size
        name = "cpu" if self._on_cpu else torch.cuda.get_device_name(self._device)
        return ModelInfo(
            architecture=model.family,
            dtype=str(self._dtype).removeprefix("torch."),
            device=name,
            vocab_size=model.vocab_size,
            hidden_size=model.hidden_size,
            max_model_len=max_model_len,
            block_size=block_size,
            num_blocks=num_blocks,
            eos_token_ids=model.eos_token_ids,
            num_parameters=model.num_parameters,
            weight_bytes=model.num_step_weights * self._dtype.itemsize,
            kv_bytes_per_token=kv_bytes_per_token(model, self._dtype),
            flops_per_token=2 * num_linear,
            flops_per_sampled_token=2 * num_embedding,
            flops_per_attention_pair=4 * model.num_layers * model.num_heads * model.head_dim,
            peak_bandwidth_bytes_per_s=peak_bandwidth(name),
            measured_bandwidth_bytes_per_s=measured_bandwidth,
            load_seconds=self._load_seconds,
        )


class Done:
    """`PendingTokens` of a device that has computed when `execute` returns."""

    def __init__(self, sampled: SampledTokens) -> None:
        self._sampled = sampled

    def wait(self) -> SampledTokens:
        return self._sampled


def _device(wanted: Device) -> torch.device:
    if wanted is Device.CUDA and not torch.cuda.is_available():
        raise InvalidConfig("--device is cuda, but torch finds no GPU here; use --device cpu")
    if wanted is Device.AUTO and torch.cuda.is_available():
        return torch.device("cuda")
    return torch.device("cpu" if wanted is Device.AUTO else wanted.value)


def _weights(load_format: LoadFormat, model_dir: Path, empty: Empty) -> WeightSource:
    if load_format is LoadFormat.DUMMY:
        return RandomWeights(empty)
    return Checkpoint(model_dir, empty)


def _dtype(wanted: Dtype, device: torch.device) -> torch.dtype:
    if wanted is Dtype.AUTO:
        return torch.bfloat16 if computes_bfloat16(device) else torch.float32
    return {Dtype.FLOAT32: torch.float32, Dtype.BFLOAT16: torch.bfloat16}[wanted]
