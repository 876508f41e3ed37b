"""`NativeModel`: a whole step in one call of C++ (step.cpp)."""

import ctypes
import weakref
from collections.abc import Sequence
from ctypes import Array, Structure, c_char_p, c_int64, c_void_p
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from penstock.engine.memory.pool.kv_pool import LayerPools
from penstock.engine.models.decoder.model import LlamaModel
from penstock.engine.models.division.stage import num_passed
from penstock.engine.models.parts.adapter import Adapter
from penstock.engine.models.parts.tensors import Stack
from penstock.engine.native.features import check_features
from penstock.engine.native.inputs import input_to_gather
from penstock.engine.native.packed_model import pack_model, samples
from penstock.engine.native.packing import Packer
from penstock.engine.native.parts.adapters import NativeAdapter, native_runs
from penstock.engine.native.structures import structure
from penstock.engine.native.trial import try_products
from penstock.engine.ranks.shared_memory import SharedMemoryGroup
from penstock.engine.sampling.sampler import INVALID_ID, DrawTables
from penstock.engine.step.model_input import ModelInput
from penstock.scheduler.types import ScheduledBatch

_STEP, _DRAW = structure("Step"), structure("Draw", "native/step/draw.h")


class NativeModel:
    """`LlamaModel` on its weights and one KV pool: see `Model`. The weights are packed where they
    are, so the LlamaModel itself cannot compute any more."""

    def __init__(
        self,
        library: ctypes.CDLL,
        model: LlamaModel,
        pool: LayerPools,
        threads: int,
        target: "NativeModel | None" = None,
    ) -> None:
        """library: see `load_library`. target: the served model, for an `MtpHead`. Raises
        UnsupportedFeature, UnsupportedWeightFormat or WrongProducts, before it packs anything."""
        config = model.config
        assert model.group is None or isinstance(model.group, SharedMemoryGroup), model.group
        self._library, self._group, self._pipeline = library, model.group, model.pipeline
        self._first_layer = model.stage.layers.start
        self._num_passed = num_passed(config)
        self._dtype = model.embedding.dtype
        self._vocab_size = config.vocab_size
        self._inputs = model.per_layer_inputs
        self._embedded = model.embedded if config.is_encoder else None
        tables = {*model.rotary.layers.values()}
        # All layers with attention have it, where images have positions of their own.
        self._angles = next((table for table in tables if table.axes is not None), None)
        assert self._angles is None or len(tables) == 1, tables
        check_features(config, self._dtype)
        try_products(library, samples(model), self._dtype)
        packer = Packer(library, self._dtype)
        self._model: Structure
        shared = None if target is None else target._model
        self._model, layers = pack_model(packer, model, pool, threads, shared)
        self._rows = [_adapted_rows(layer) for layer in layers]
        self._pointed_into = (packer, pool, target)
        self._has_states = any(config.recurrent)
        # The last step, where it had drafts and layers with states, and what it points into.
        self._drafted: tuple[object, ...] | None = None
        # Reused: page faults of new memory take longer than what is written to it.
        self._logits = torch.empty(0, self._vocab_size)
        library.penstock_make.restype = c_void_p
        library.penstock_step.restype = library.penstock_failed.restype = c_int64
        self.num_experts_read: int | None = None
        """By the last step, over all layers; None for a dense model."""
        self._workspace = c_void_p(
            library.penstock_make(ctypes.byref(self._model), c_int64(threads))
        )
        weakref.finalize(self, library.penstock_free, self._workspace)
        self.products = _products(library)
        """Names what multiplies matrices, for people to read."""

    def __call__(self, step: ModelInput, pool: LayerPools) -> Tensor:
        """See `Model`. The logits are those of this step until the next is run."""
        logits = self._room(0 if self._sends else len(step.sample_rows))
        self._step(step, step.sample_rows, logits=_address(logits))
        return logits

    def _room(self, num_rows: int) -> Tensor:
        if len(self._logits) < num_rows:
            self._logits = torch.empty(2 * num_rows, self._vocab_size)
        return self._logits[:num_rows]

    def states(self, step: ModelInput, pool: LayerPools, rows: Tensor) -> Tensor:
        num_rows = 0 if self._sends else len(rows)
        states = torch.empty(num_rows, self._model.hidden, dtype=self._dtype)
        self._step(step, rows, states=_address(states))
        return states

    def logits(self, states: Tensor) -> Tensor:
        logits = torch.empty(len(states), self._vocab_size)
        native_step = _STEP(
            samples=len(states),
            logits=_address(logits),
            states=_address(states),
        )
        self._library.penstock_logits(self._workspace, ctypes.byref(native_step))
        return logits

    def accept(self, nums: Sequence[int]) -> None:
        """Says how many drafts of each of the first sequences of the last step are right: recurrent
        states go on over them."""
        if self._drafted is None or not any(nums):
            return
        native_step, step, *_ = self._drafted
        assert isinstance(native_step, Structure) and isinstance(step, ModelInput)
        accepted = (c_int64 * len(step.context_lens))(*nums)
        self._library.penstock_accept(self._workspace, ctypes.byref(native_step), accepted)

    def packed_adapter(self, adapter: Adapter) -> NativeAdapter:
        """Returns what `ModelInput.adapters` needs."""
        return NativeAdapter(adapter, self._rows)

    def draw(
        self, logits: Tensor, slots: list[int], lengths: list[int], tables: DrawTables
    ) -> Tensor:
        """See `penstock.engine.sampling.sampler.Draw`."""
        logits, ids = logits.contiguous(), torch.empty(len(slots), dtype=torch.int64)
        numbers = c_int64 * len(slots)
        arrays = numbers(*slots), numbers(*lengths)
        wanted = _draw_of(logits, *arrays, tables, ids)
        self._library.penstock_draw(self._workspace, ctypes.byref(wanted))
        return ids

    @property
    def drafts_alone(self) -> bool:
        """Says whether `draft` can be used: each round would need rows of a table otherwise."""
        return self._inputs is None

    def draft(
        self,
        batch: ScheduledBatch,
        token_table: Tensor,
        block_table: Tensor,
        block_size: int,
        nums: list[int],
        tables: DrawTables,
    ) -> list[list[int]]:
        """Computes a step, draws a token of each sequence that samples, computes that, and so on:
        nums of each, which do not increase; those that do not sample are last. They are written to
        the token table, and returned, fewer where logits are invalid. It needs one block table, and
        `drafts_alone`."""
        step, gather, _arrays = input_to_gather(batch, token_table, block_table, block_size)
        native_step, *_kept = self._native_step(step, step.sample_rows)
        num_rows, numbers = len(nums), c_int64 * len(nums)
        logits, ids = self._room(num_rows), torch.empty(num_rows, dtype=torch.int64)
        native_step.logits = _address(logits)
        lengths = numbers(*step.context_lens[:num_rows])
        slots, wanted_nums = numbers(*batch.slots[:num_rows]), numbers(*nums)
        draw = _draw_of(logits, slots, lengths, tables, ids)
        drafts = torch.full((num_rows, max(nums, default=0)), INVALID_ID)
        self._library.penstock_draft(
            self._workspace,
            ctypes.byref(gather),
            ctypes.byref(native_step),
            ctypes.byref(draw),
            c_void_p(_address(token_table)),
            wanted_nums,
            c_void_p(_address(drafts)),
        )
        return [[token_id for token_id in row if token_id != INVALID_ID] for row in drafts.tolist()]

    @property
    def _sends(self) -> bool:
        """Says whether a later stage computes what comes after the layers."""
        return self._pipeline.after is not None

    def _step(
        self,
        step: ModelInput,
        rows: Tensor,
        *,
        logits: int | None = None,
        states: int | None = None,
    ) -> None:
        native_step, *kept = self._native_step(step, rows, logits=logits, states=states)
        self._compute(native_step)
        self._drafted = (native_step, step, *kept) if native_step.draft_starts else None
        if native_step.received:
            self._pipeline.taken()
        if native_step.sent:
            self._pipeline.send()

    def _native_step(
        self,
        step: ModelInput,
        rows: Tensor,
        *,
        logits: int | None = None,
        states: int | None = None,
    ) -> tuple[Any, ...]:
        """Returns the structure, and what it points into beside `step`."""
        query_starts = torch.tensor(step.query_starts, dtype=torch.int32)
        width = max((run.weights.width for run in step.adapters), default=0)
        # None where they change layers of other stages alone.
        runs = native_runs(step.adapters if width else ())
        input_rows = None
        if (table := self._inputs) is not None:
            input_rows = table.rows(step.token_ids_or(table.config.pad_id))
        inserts = self._inserts(step)
        received, sent = self._passed(len(step.token_ids))
        snapshots = [number for snapshot in step.snapshots for number in snapshot]
        numbers = (c_int64 * len(snapshots))(*snapshots)
        drafts = self._draft_starts(step) if self._has_states else None
        native_step = _STEP(
            tokens=len(step.token_ids),
            sequences=len(step.context_lens),
            samples=len(rows),
            max_blocks=step.block_tables.shape[-1],
            token_ids=_address(step.token_ids),
            positions=_address(step.positions),
            kv_slots=_address(step.kv_slots),
            sample_rows=_address(rows),
            block_tables=_address(step.block_tables),
            query_starts=_address(query_starts),
            logits=logits,
            states=states,
            runs=ctypes.addressof(runs),
            num_runs=len(runs),
            width=width,
            timeout_ns=self._group.timeout_ns if self._group else 0,
            snapshots=ctypes.addressof(numbers),
            num_snapshots=len(step.snapshots),
            draft_starts=_address(drafts),
            all_states=_address(step.all_states),
            merged=_address(step.merged),
            input_rows=_address(input_rows),
            received=_address(received),
            sent=_address(sent),
            inserts=len(inserts.get("inserted", ())),
            num_deep=len(inserts.get("deepstack", ())),
            **{name: _address(tensor) for name, tensor in inserts.items()},
        )
        kept = (query_starts, runs, input_rows, received, sent, numbers, drafts, rows, inserts)
        return native_step, *kept

    def _inserts(self, step: ModelInput) -> dict[str, Tensor]:
        """Returns what the structure has only for sequences with inserts, by its names."""
        found = {} if step.reaches is None else {"reaches": step.reaches}
        if self._angles is not None and step.angle_positions is not None:
            angles = self._angles.at(step.positions, step.angle_positions)
            found |= {"cos": angles.cos.contiguous(), "sin": angles.sin.contiguous()}
        if self._embedded is not None:
            rows = self._embedded(step).float().contiguous()
            return found | {"insert_of": torch.arange(len(rows)), "inserted": rows}
        if (inserted := step.inserted) is not None:
            insert_of = torch.full_like(step.token_ids, -1)
            insert_of[inserted.at] = torch.arange(len(inserted.at))
            rows = inserted.rows.float().contiguous()
            found |= {"insert_of": insert_of, "inserted": rows}
            if inserted.deepstack is not None:
                own = inserted.deepstack[self._first_layer :]
                found["deepstack"] = own.float().contiguous()
        return found

    def _draft_starts(self, step: ModelInput) -> Tensor | None:
        if not any(step.num_drafts):
            return None
        nums = (*step.num_drafts, *[0] * (len(step.context_lens) - len(step.num_drafts)))
        return torch.tensor((0, *accumulate(nums)), dtype=torch.int32)

    def _passed(self, num_tokens: int) -> tuple[Tensor | None, Tensor | None]:
        """Returns what the stage before has sent, and room for what the one after receives."""
        pipeline, received, sent = self._pipeline, None, None
        shape = self._num_passed * num_tokens, self._model.hidden
        if pipeline.before is not None:
            received = pipeline.receive(*shape, torch.float32)
        if pipeline.after is not None:
            sent = pipeline.room(*shape, torch.float32)
        return received, sent

    def _compute(self, native_step: Structure) -> None:
        """Raises RankFailed."""
        num_experts = self._library.penstock_step(self._workspace, ctypes.byref(native_step))
        if (group := self._group) is not None:
            layer, outcome = divmod(self._library.penstock_failed(self._workspace), 256)
            if outcome:
                phase = f"layer {self._first_layer + layer - 1}" if layer else "the embedding"
                with group.doing.during(phase):
                    raise group.failed("all_reduce", outcome)
        if self._model.experts.num_experts:
            self.num_experts_read = num_experts


def _adapted_rows(layer: Structure) -> dict[Stack, list[int]]:
    """Returns the rows of the linear layers that each stack of adapters changes."""
    attention, net, mlp = layer.attention, layer.delta_net, layer.mlp
    *inputs, beta, decay = [linear.rows for linear in net.projections]
    return {
        Stack.QKV: [linear.rows for linear in attention.qkv if linear.rows] or inputs,
        Stack.GATES: [0, 0, beta, decay],  # numbered after the inputs
        Stack.OUTPUT: [attention.output.rows or net.output.rows],
        Stack.GATE_UP: [mlp.size, mlp.size],
        Stack.DOWN: [mlp.down.rows],
    }


def _products(library: ctypes.CDLL) -> str:
    library.penstock_products.restype = library.penstock_code_products.restype = c_char_p
    plain = library.penstock_products().decode()
    codes = library.penstock_code_products()
    return plain if codes is None else f"{plain} (codes: {codes.decode()})"


def _draw_of(
    logits: Tensor, slots: Array[c_int64], lengths: Array[c_int64], tables: DrawTables, ids: Tensor
) -> Structure:
    rows, size = logits.shape
    return _DRAW(
        rows=rows,
        size=size,
        logits=_address(logits),
        slots=ctypes.addressof(slots),
        lengths=ctypes.addressof(lengths),
        seeds=_address(tables.seed),
        top_k=_address(tables.top_k),
        inverse_temperatures=_address(tables.inverse_temperature),
        top_p=_address(tables.top_p),
        log_min_p=_address(tables.log_min_p),
        ids=_address(ids),
    )


def _address(tensor: Tensor | None) -> int | None:
    if tensor is None:
        return None
    assert tensor.is_contiguous(), tensor.stride()
    return tensor.data_ptr()
