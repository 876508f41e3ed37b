"""Records what a step launches on a GPU, from the launch code itself, on a machine without one.

The model's tensors have no data. Only the kernels that plan a step's attention run, in Triton's
interpreter on real lengths, because their results say which programs of later launches have work.
Import it before anything that imports Triton: it turns the interpreter on.
"""

import os

os.environ.setdefault("TRITON_INTERPRET", "1")

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from triton.runtime.interpreter import InterpretedFunction

from penstock.engine.executors.cuda.graphs import drafted_sizes
from penstock.engine.kernels import launch
from penstock.engine.kernels.attention.paged.attention import PagedAttention
from penstock.engine.kernels.sample.sampler import DeviceSampler, Mode
from penstock.engine.kernels.tables import (
    DraftedRows,
    DraftedTokens,
    accept_drafts,
    gather_chunks,
    gather_decodes,
    gather_drafted,
    store_sampled,
)
from penstock.engine.memory.pool.kv_pool import KVPool
from penstock.engine.models.config import ModelConfig
from penstock.engine.models.decoder.fused import FusedModel
from penstock.engine.models.decoder.model import LlamaModel
from penstock.engine.models.layers.linear import PlainLinear
from penstock.engine.step.device_step import DecodeQueries, DeviceStep
from tests.bench.gpu.keys import key
from tests.support.compile_kernels import (
    BLOCK_SIZE,
    META,
    MOST_DRAFTS,
    NUM_SMS,
    Codes,
    MetaWeights,
)

_CPU = torch.device("cpu")
_OPTIONS = ("num_warps", "num_stages", "maxnreg", "launch_pdl")
_PLANS = ("_plan_decode", "_plan_prefill")
CUBLAS, FP8_PRODUCT = "cuBLAS", "FP8 by torch"
_PRODUCTS = (torch.ops.aten.linear, torch.ops.aten.mm)


@dataclass(frozen=True)
class Launched:
    """One launch. arguments: by parameter, tensors without data mostly; of torch's products x,
    weight and out. options: Triton's."""

    kernel: str
    arguments: dict[str, Any]
    grid: tuple[int, ...] = (1,)
    options: dict[str, Any] = field(default_factory=dict)

    @property
    def programs(self) -> int:
        count = 1
        for size in self.grid:
            count *= size
        return count

    @property
    def constants(self) -> dict[str, Any]:
        return {k: v for k, v in self.arguments.items() if k.isupper()}

    @property
    def key(self) -> str:
        """The same for launches that Triton compiles once, but for the alignment of numbers."""
        types = {k: v.dtype for k, v in self.arguments.items() if isinstance(v, Tensor)}
        return key(self.kernel, self.constants, types, self.options)


@dataclass(frozen=True, kw_only=True)
class Step:
    """decodes: the contexts of sequences that decode, their new token included. chunks: of each
    prefill chunk, its tokens and those before it. graph: the rows or tokens that it is padded to.
    drafts: of each decode, after its new token, where there are no chunks.
    """

    decodes: tuple[int, ...] = ()
    chunks: tuple[tuple[int, int], ...] = ()
    graph: int | None = None
    drafts: int = 0

    @property
    def num_tokens(self) -> int:
        return len(self.decodes) * (1 + self.drafts) + sum(count for count, _ in self.chunks)


class Model:
    """One of configs/models, as a server with these limits of a step runs it."""

    def __init__(
        self,
        model_dir: Path,
        *,
        max_rows: int = 256,
        max_tokens: int = 8192,
        codes: Codes | None = None,
        kv_dtype: torch.dtype = torch.bfloat16,
    ) -> None:
        """codes: of the weights. kv_dtype: of keys and values; codes in 8 bits."""
        self._codes, self._kv_dtype = codes, kv_dtype
        self.config = ModelConfig.from_dir(model_dir)
        self._max_rows, self._max_tokens = max_rows, max_tokens
        self._built: dict[int, FusedModel] = {}
        self._sampler = DeviceSampler(max_rows, self.config.vocab_size, META)

    def launches(
        self, step: Step, mode: Mode = Mode.PLAIN, *, layers: int | None = None
    ) -> list[Launched]:
        """In their order. layers: fewer than the model has."""
        with launch.overlap(True), torch.inference_mode(), _recorded() as found:
            if step.chunks:
                self._mixed(step, layers)
            elif step.drafts:
                self._drafted(step, mode, layers)
            else:
                self._decodes(step, mode, layers)
        return found

    def _decodes(self, step: Step, mode: Mode, layers: int | None) -> None:
        """As `CudaExecutor._run_decodes`."""
        size = step.graph or len(step.decodes)
        # The padding slot has no token, so that its row's length is 1.
        lens = _ints([*step.decodes, *(1,) * (size - len(step.decodes))])
        device_step = DeviceStep(
            token_ids=_empty(size), positions=_empty(size), kv_slots=_empty(size).long(),
            slots=_ints(range(size)), context_lens=lens, num_decodes=size, chunk_starts=None,
            block_tables=_empty(self._max_rows + 1, 128),
        )  # fmt: skip
        lengths, token_table = _empty(self._max_rows + 1), _empty(self._max_rows + 1, 8193)
        model = self._model(layers)
        gather_decodes(
            device_step.slots, lengths, token_table, device_step.block_tables[None], BLOCK_SIZE,
            device_step.token_ids, device_step.positions, device_step.kv_slots[None], lens,
            _empty(1), 2,
        )  # fmt: skip
        logits = model.logits(model(device_step))
        self._sample(logits, device_step.slots, lens, mode)
        host = _empty(2, self._max_rows), _empty(1)
        store_sampled(_empty(size), device_step.slots, lens, token_table, *host)

    def _drafted(self, step: Step, mode: Mode, layers: int | None) -> None:
        """As `DraftSteps._run`, of a step that needs no padding."""
        num_rows, num_tokens, count = len(step.decodes), step.num_tokens, 1 + step.drafts
        absent = (0,) * (num_tokens - num_rows)
        rows = DraftedRows(
            _ints(range(num_tokens)), _ints([*range(0, num_tokens, count), *absent]),
            _ints([*(count,) * num_rows, *absent]), _empty(num_tokens),
        )  # fmt: skip
        tokens = DraftedTokens(*_empty(4, num_tokens))
        queries = drafted_sizes(self._max_rows, step.drafts).queries
        device_step = DeviceStep(
            token_ids=tokens.token_ids, positions=tokens.positions,
            kv_slots=_empty(num_tokens).long(), slots=rows.slots,
            context_lens=_ints([*(context + step.drafts for context in step.decodes), *absent]),
            num_decodes=num_tokens, chunk_starts=None, block_tables=_empty(self._max_rows + 1, 128),
            queries=DecodeQueries(rows.firsts, rows.counts, queries),
        )  # fmt: skip
        lengths, token_table = _empty(self._max_rows + 1), _empty(self._max_rows + 1, 8193)
        model = self._model(layers)
        gather_drafted(
            rows, queries, lengths, token_table, device_step.block_tables[None], BLOCK_SIZE,
            tokens, device_step.kv_slots[None], device_step.context_lens, _empty(1), 2,
        )  # fmt: skip
        logits = model.logits(model(device_step))
        self._sample(logits, tokens.slots, tokens.next_positions, mode)
        accept_drafts(
            _empty(num_tokens), rows, queries, tokens.positions, lengths, token_table,
            _empty(2, num_tokens), _empty(2, 2 * num_tokens), _empty(1),
        )  # fmt: skip

    def _mixed(self, step: Step, layers: int | None) -> None:
        """As `ChunkSteps._run` where the step is padded to a graph, else as
        `CudaExecutor._launch`."""
        counts = [*(1 for _ in step.decodes), *(count for count, _ in step.chunks)]
        contexts = [*step.decodes, *(count + before for count, before in step.chunks)]
        num_decodes, num_rows, num_tokens = len(step.decodes), len(counts), step.num_tokens
        starts = [sum(counts[:row]) for row in range(num_rows + 1)]
        decode_lens = None
        if step.graph:
            num_rows, num_tokens = self._max_rows, step.graph
            absent = num_rows - len(counts)
            contexts += [0] * absent
            starts += [starts[-1]] * absent
            lens = [*step.decodes, *(0,) * (num_rows - num_decodes)]
            chunk_starts = [max(start, num_decodes) for start in starts]
            num_decodes = min(num_tokens, self._max_rows)
            decode_lens = _ints(lens[:num_decodes])
        else:
            chunk_starts = [start - num_decodes for start in starts[num_decodes:]]
        device_step = DeviceStep(
            token_ids=_empty(num_tokens), positions=_empty(num_tokens),
            kv_slots=_empty(num_tokens).long(), slots=_ints(range(num_rows)),
            context_lens=_ints(contexts), num_decodes=num_decodes,
            chunk_starts=_ints(chunk_starts), block_tables=_empty(self._max_rows + 1, 128),
            decode_lens=decode_lens,
        )  # fmt: skip
        lengths, token_table = _empty(self._max_rows + 1), _empty(self._max_rows + 1, 8193)
        model = self._model(layers)
        gather_chunks(
            device_step.slots, _empty(num_rows), _ints(starts), lengths, token_table,
            device_step.block_tables[None], BLOCK_SIZE, num_tokens if step.graph else max(counts),
            device_step.token_ids, device_step.positions, device_step.kv_slots[None],
            device_step.context_lens, _empty(num_rows) if step.graph else None,
        )  # fmt: skip
        states = model(device_step)
        num_sampling = len(counts)
        slots, lens_ = _empty(num_sampling), _empty(num_sampling)
        self._sample(model.logits(states[:num_sampling]), slots, lens_, Mode.PLAIN)
        store_sampled(_empty(num_sampling), slots, lens_, token_table)

    def _sample(self, logits: Tensor, slots: Tensor, positions: Tensor, mode: Mode) -> None:
        logprobs = torch.empty(len(slots), device=META)
        self._sampler.sample(logits, slots, positions, _empty(len(slots)), logprobs, mode)

    def _model(self, layers: int | None) -> FusedModel:
        count = layers or self.config.num_layers
        if count not in self._built:
            config = replace(self.config, layers=self.config.layers[:count])
            dtype = torch.bfloat16
            llama = LlamaModel(
                config, MetaWeights(config, dtype, self._codes), PlainLinear,
                max_model_len=8192, device=META, maps_tables=False,
            )  # fmt: skip
            pool = KVPool(config.kv_shape, 100, BLOCK_SIZE, self._kv_dtype, META)
            attention = PagedAttention(
                config.attention_windows(BLOCK_SIZE), self._max_rows, self._max_tokens, NUM_SMS,
                _CPU, dtype, drafted=drafted_sizes(self._max_rows, MOST_DRAFTS),
            )  # fmt: skip
            self._built[count] = FusedModel(llama, pool, attention, self._max_rows)
        return self._built[count]


class _Products(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes what torch computes itself on tensors without data."""

    def __init__(self, found: list[Launched]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._found = found

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if func.overloadpacket in _PRODUCTS and out.is_meta:
            x, weight = args[:2]
            self._found.append(Launched(CUBLAS, {"x": x, "weight": weight, "out": out}))
        elif func.overloadpacket is torch.ops.aten._scaled_mm and out.is_meta:
            x, weight = args[:2]
            self._found.append(Launched(FP8_PRODUCT, {"x": x, "weight": weight, "out": out}))
        elif func._schema.is_mutable and isinstance(out, Tensor) and out.is_meta:
            name = f"torch {func.overloadpacket.__name__}"
            self._found.append(Launched(name, {"out": out}))
        return out


@contextmanager
def _recorded() -> Iterator[list[Launched]]:
    found: list[Launched] = []

    def launcher(kernel: Any, grid: tuple[int, ...]) -> Callable[..., None]:
        def run(*args: Any, **kwargs: Any) -> None:
            name = kernel.__name__
            arguments = dict(zip(kernel.arg_names, args, strict=False)) | kwargs
            options = {k: arguments.pop(k) for k in _OPTIONS if k in arguments}
            if name in _PLANS:
                # What the interpreter returns in its tensors may not be the ones given.
                kernel.run(*args, grid=grid, warmup=False, **(kwargs | {"PDL": False}))
            kept = {k: v.clone() if _is_list(k, v) else v for k, v in arguments.items()}
            found.append(Launched(name, kept, grid, options))

        return run

    original = InterpretedFunction.__getitem__
    InterpretedFunction.__getitem__ = launcher
    try:
        with _Products(found):
            yield found
    finally:
        InterpretedFunction.__getitem__ = original


def _is_list(name: str, value: object) -> bool:
    """A later plan overwrites them."""
    return name in ("first_item", "tokens") and isinstance(value, Tensor)


def _ints(values: Iterable[int]) -> Tensor:
    return torch.tensor(list(values), dtype=torch.int32)


def _empty(*shape: int) -> Tensor:
    return torch.empty(shape, dtype=torch.int32, device=META)
