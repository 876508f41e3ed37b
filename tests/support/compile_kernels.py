"""`python -m tests.support.compile_kernels`: compiles every kernel that a model's steps launch.

Needs no GPU: the model runs on tensors without data, its launches are recorded, and Triton compiles
them with its own assembler. Prints a JSON line for each kernel: registers, bytes spilled, shared
memory, whether it follows the rule of `penstock.engine.kernels.launch`, and whether its addresses
are wide enough (`tests.support.address_width`). Run it without TRITON_INTERPRET.
"""

import json
import re
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any

import torch
import triton
from torch import Tensor
from triton._C.libtriton import ir
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, make_backend
from triton.runtime.jit import JITFunction

from penstock.engine.executors.cuda.graphs import drafted_sizes
from penstock.engine.executors.cuda.pool_mover import piece_bytes, words_of
from penstock.engine.kernels import launch
from penstock.engine.kernels.adapters import most_tiles, tile_rows
from penstock.engine.kernels.attention.paged.attention import PagedAttention
from penstock.engine.kernels.blocks import (
    add_checksums,
    copy_blocks,
    gather_blocks,
    scatter_blocks,
    snapshot_states,
)
from penstock.engine.kernels.sample.sampler import DeviceSampler, Mode
from penstock.engine.kernels.tables import (
    DraftedRows,
    DraftedTokens,
    RotaryPositions,
    accept_drafts,
    gather_chunks,
    gather_decodes,
    gather_drafted,
    store_sampled,
    update_table,
)
from penstock.engine.memory.pool.kv_pool import KVPool, KVPools
from penstock.engine.models.config import ModelConfig
from penstock.engine.models.decoder.fused import FusedModel
from penstock.engine.models.decoder.model import LlamaModel
from penstock.engine.models.layers.coded import CodedLinear
from penstock.engine.models.layers.fp8 import Fp8Linear
from penstock.engine.models.layers.grouped import GroupedLinear
from penstock.engine.models.layers.linear import Linear, PlainLinear, StackedLinear
from penstock.engine.models.lora.slots import AdapterSlots
from penstock.engine.models.parts.attention.config import Attention
from penstock.engine.models.parts.delta_net.kernels.chunks import TILE_TOKENS
from penstock.engine.models.parts.reader import TableRows, rows_of
from penstock.engine.step.device_step import (
    AdapterTiles,
    DecodeQueries,
    DeviceStep,
    StateTiles,
)
from penstock.scheduler.types import SamplingParams
from tests.support.address_width import narrow_offsets

META = torch.device("meta")
BLOCK_SIZE = 64
NUM_SMS = 132
# As a server's defaults.
MAX_LORAS, MAX_LORA_RANK = 8, 16
MOST_DRAFTS = 7
_POINTERS = {
    torch.float32: "*fp32",
    torch.bfloat16: "*bf16",
    torch.float16: "*fp16",
    torch.int32: "*i32",
    torch.int64: "*i64",
    torch.int8: "*i8",
    torch.uint8: "*u8",
}
_OPTIONS = ("num_warps", "num_stages", "maxnreg", "launch_pdl")
# Programs of the sampler's kernels: rows of a step, and chunks of a vocabulary.
_SAMPLING = dict.fromkeys(("_scan", "_finish", "_coarse", "_gather", "_select"), ((2**13, 2**8),))
# Tiles of outputs, then of at most 512 rows, and at most 8 parts of the columns.
_PROGRAMS = _SAMPLING | {"_tiled": ((2**16, 2**8),)}
# Prefixes of instructions that read or write memory, except constants (LDC) and the thread's own
# stack (LDL, STL).
_TOUCHES_MEMORY = re.compile(
    r"LD(?!C|L\b)|ST(?!L\b)|ATOM|RED\b|RED\.|UTMA|UBLKCP|UBLKRED|CCTL|SULD|SUST|TEX"
)


class Launch:
    """One kernel launch, as Triton specialises it."""

    def __init__(self, kernel: JITFunction[Any], arguments: dict[str, Any]) -> None:
        self.name = kernel.__name__
        self._kernel = kernel
        self._given = dict(arguments)
        self.options = {k: arguments.pop(k) for k in _OPTIONS if k in arguments}
        self.signature: dict[str, str] = {}
        self.constants: dict[str, Any] = {}
        self._aligned: list[int] = []
        for index, parameter in enumerate(kernel.params):
            value = arguments[parameter.name]
            if parameter.is_constexpr:
                self.signature[parameter.name] = "constexpr"
                is_wrapped = isinstance(value, triton.language.constexpr)
                self.constants[parameter.name] = value.value if is_wrapped else value
            else:
                self._add(index, parameter, value)

    def _add(self, index: int, parameter: Any, value: Any) -> None:
        if value is None:  # which the kernel's code tests when it is compiled
            self.signature[parameter.name] = "constexpr"
            self.constants[parameter.name] = None
        elif isinstance(value, torch.Tensor):
            self.signature[parameter.name] = _POINTERS[value.dtype]
            self._aligned.append(index)
        elif isinstance(value, float):
            self.signature[parameter.name] = "fp32"
        elif value == 1 and not parameter.do_not_specialize:
            self.signature[parameter.name] = "constexpr"
            self.constants[parameter.name] = value
        else:
            self.signature[parameter.name] = "i32"
            if value % 16 == 0 and not parameter.do_not_specialize:
                self._aligned.append(index)

    @property
    def types(self) -> dict[str, torch.dtype]:
        """Of the tensors."""
        return {k: v.dtype for k, v in self._given.items() if isinstance(v, torch.Tensor)}

    @property
    def key(self) -> str:
        parts = (self.name, self.signature, self.constants, self.options, self._aligned)
        return repr(parts)

    def warm_up(self) -> None:
        """Compiles it for the device at hand, into Triton's cache, as its launch would."""
        self._kernel.run(**self._given, grid=(1,), warmup=True)

    def assembly(self, capability: int) -> str:
        """Machine code, as nvdisasm prints it."""
        return _tool("nvdisasm", "-c", cubin=self._compiled(capability).asm["cubin"])

    def ptx(self, capability: int) -> str:
        """Without the assembler, which takes as long as all before it. No cache has it."""
        target, source = GPUTarget("cuda", capability, 32), self._source()
        backend = make_backend(target)
        options = backend.parse_options(dict(self.options))
        stages: dict[str, Callable[[Any, dict[str, Any]], Any]] = {}
        backend.add_stages(stages, options, source.language)
        context = ir.context()
        ir.load_dialects(context)
        backend.load_dialects(context)
        functions, modules = backend.get_codegen_implementation(options), backend.get_module_map()
        code = source.make_ir(target, options, functions, modules, context)
        metadata = {"target": target, **vars(options)}
        for stage in ("ttir", "ttgir", "llir", "ptx"):
            code = stages[stage](code, metadata)
        return str(code)

    def _compiled(self, capability: int) -> Any:
        target = GPUTarget("cuda", capability, 32)
        return triton.compile(self._source(), target=target, options=self.options)

    def _source(self) -> ASTSource:
        aligned = {(index,): [["tt.divisibility", 16]] for index in self._aligned}
        return ASTSource(self._kernel, self.signature, self.constants, aligned)

    def compile(self, capability: int) -> dict[str, Any]:
        compiled = self._compiled(capability)
        machine_code = _tool("nvdisasm", "-c", cubin=compiled.asm["cubin"])
        return {
            "kernel": self.name,
            "capability": capability,
            "constants": self.constants,
            "options": self.options,
            "shared_bytes": compiled.metadata.shared,
            "is_overlapped": self.options.get("launch_pdl", False),
            "narrow_offsets": narrow_offsets(compiled.asm["ttir"], *_PROGRAMS.get(self.name, ())),
            "before_wait": before_wait(machine_code),
            "types": {name: kind for name, kind in self.signature.items() if kind[0] == "*"},
            "warps": compiled.metadata.num_warps,
            **instructions(machine_code),
            **_resources(compiled.asm["cubin"]),
        }


def _tool(name: str, *options: str, cubin: bytes) -> str:
    tool = Path(triton.__path__[0], "backends", "nvidia", "bin", name)
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [str(tool), *options, file.name]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
    return done.stdout + done.stderr


def _resources(cubin: bytes) -> dict[str, int]:
    found = dict(re.findall(r"(REG|STACK):(\d+)", _tool("cuobjdump", "-res-usage", cubin=cubin)))
    return {"registers": int(found["REG"]), "stack_bytes": int(found["STACK"])}


# Copies to shared memory that nobody waits for (a software pipeline), and products on the matrix
# units; what lets the next kernel start, and what waits for those before.
_COUNTED = ("LDGSTS", "UTMALDG", "HMMA", "HGMMA")
_WAIT = ("PREEXIT", "ACQBULK")


def instructions(machine_code: str) -> dict[str, Any]:
    """How many of these kinds a kernel has, and in which order it waits; how many of any kind are
    in the last loop that multiplies matrices, and in the shortest; and how many in that, or in a
    kernel without one, read or write registers that are spilled."""
    operations = re.findall(r"^\s+/\*\w+\*/\s+(?:@!?U?P\w+ )?(\w+)", machine_code, re.MULTILINE)
    counts = {name: operations.count(name) for name in _COUNTED if name in operations}
    waits = [name for name in operations if name in _WAIT]
    loops = _loops(machine_code)
    inner = min(loops, key=len, default=operations)
    sizes = [len(loop) for loop in loops] or [0]
    return {
        "instructions": counts,
        "wait": waits,
        "loop": sizes[-1],
        "inner": min(sizes),
        "spills": sum(bool(re.search(r"\b(LDL|STL)\b", one)) for one in inner),
    }


def _loops(machine_code: str) -> list[list[str]]:
    """The instructions from a label to each jump back to it, with a product between them."""
    lines = re.findall(r"^(\.L\w+)(?=:)|^\s+/\*\w+\*/\s+(.+?) ;", machine_code, re.MULTILINE)
    starts = dict[str, int]()
    codes, loops = list[str](), list[list[str]]()
    for label, code in lines:
        if label:
            starts[label] = len(codes)
            continue
        codes.append(code)
        target = re.search(r"BRA.*?(\.L\w+)", code)
        if target and target[1] in starts:
            body = codes[starts[target[1]] :]
            if any("MMA." in one for one in body):
                loops.append(body)
    return loops


def before_wait(machine_code: str) -> list[str] | None:
    """Instructions that are forbidden before a program waits (ACQBULK): memory accesses, exits, and
    jumps beyond the wait.

    machine_code: of one kernel, as nvdisasm prints it. None if it does not always wait.
    """
    lines = re.findall(r"^(\.L\w+)(?=:)|^\s+/\*\w+\*/\s+(.+?) ;", machine_code, re.MULTILINE)
    if ("", "ACQBULK") not in lines:
        return None
    first = lines[: lines.index(("", "ACQBULK"))]
    labels = {label for label, _ in first if label}
    return [code for _, code in first if code and _is_early(code, labels)]


def _is_early(instruction: str, labels_before: set[str]) -> bool:
    operation, *operands = re.sub(r"^@!?U?P\w+ ", "", instruction).split(maxsplit=1)
    if operation.startswith(("BRA", "JMP", "BRX", "CALL")):
        target = re.search(r"\.L\w+", " ".join(operands))
        return target is None or target[0] not in labels_before
    return operation.startswith(("EXIT", "RET")) or bool(_TOUCHES_MEMORY.match(operation))


@contextmanager
def recorded() -> Iterator[list[Launch]]:
    """Records the kernels that are launched in this context instead of running them."""
    launches: list[Launch] = []

    def run(self: JITFunction[Any], *args: Any, grid: object, warmup: bool, **kwargs: Any) -> None:
        names = [parameter.name for parameter in self.params]
        launches.append(Launch(self, dict(zip(names, args, strict=False)) | kwargs))

    original = JITFunction.run
    JITFunction.run = run
    try:
        yield launches
    finally:
        JITFunction.run = original


@dataclass(frozen=True, slots=True, kw_only=True)
class Codes:
    """What weights are rounded to. bits_of_values: of the layer that makes values, which may have
    more. bits_of_head: of the output layer, which is plain if it is None. is_fp8: with a scale for
    each row, whatever group_size."""

    bits: int
    group_size: int
    levels: tuple[int, ...] | None = None
    bits_of_values: int = 8
    bits_of_head: int | None = 8
    is_fp8: bool = False

    def linear(self, rows: int, columns: int, bits: int, bias: Tensor | None) -> CodedLinear:
        if self.is_fp8:
            codes = torch.empty(rows, columns, dtype=torch.float8_e4m3fn, device=META)
            scales = torch.empty(rows, 1, device=META)
            fp8 = Fp8Linear(codes, scales, bias, block=(1, columns)).on_gpu(META)
            assert fp8 is not None
            return fp8
        kind = torch.int8 if bits == 8 else torch.uint8
        has_levels = bits == 4 and self.levels is not None
        stored = GroupedLinear(
            torch.empty(rows, columns * bits // 8, dtype=kind, device=META),
            torch.empty(rows, columns // self.group_size, dtype=torch.float16, device=META),
            bias,
            group_size=self.group_size,
            in_features=columns,
            levels=torch.tensor(self.levels, dtype=torch.int8) if has_levels else None,
        )
        coded = stored.on_gpu(META)
        assert coded is not None
        return coded


# As `--quantization` rounds weights at load; and as most checkpoints of 4 bits are.
QUANTIZED = {
    "int8": Codes(bits=8, group_size=32),
    "int4": Codes(
        bits=4,
        group_size=32,
        levels=(-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113),
    ),
    "fp8": Codes(bits=8, group_size=0, is_fp8=True),
    "int4 in groups of 128": Codes(bits=4, group_size=128, bits_of_values=4, bits_of_head=None),
}


class MetaWeights:
    """codes: of linear layers, which are plain if it is None."""

    def __init__(self, config: ModelConfig, dtype: torch.dtype, codes: Codes | None = None) -> None:
        first = config.attentions[0]
        self._value_rows = first.kv_size if isinstance(first, Attention) else 0
        self._dtype = dtype
        self._codes = codes

    def read(self, shape: tuple[int, ...], *names: str, dtype: torch.dtype | None = None) -> Tensor:
        return torch.empty(shape, dtype=self._dtype, device=META)

    def table(self, shape: tuple[int, int], name: str) -> TableRows:
        return rows_of(self.read(shape, name))

    def quantized(self, shape: tuple[int, int], bias: Tensor | None, *names: str) -> Linear | None:
        codes = self._codes
        if codes is None:
            return None
        rows, columns = shape
        if names == ("lm_head",):
            bits = codes.bits_of_head
            return None if bits is None else codes.linear(rows, columns, bits, bias)
        if names[-1].endswith("v_proj") and codes.bits_of_values != codes.bits:
            assert bias is None
            values = self._value_rows
            first = codes.linear(rows - values, columns, codes.bits, None)
            return StackedLinear([first, codes.linear(values, columns, codes.bits_of_values, None)])
        return codes.linear(rows, columns, codes.bits, bias)


class MetaModel:
    """A model of any size on tensors without data."""

    def __init__(
        self,
        model_dir: Path,
        block_size: int = BLOCK_SIZE,
        dtype: torch.dtype = torch.bfloat16,
        *,
        kv_dtype: torch.dtype | None = None,
        max_rows: int = 512,
        max_tokens: int = 8192,
        num_sms: int = NUM_SMS,
        codes: Codes | None = None,
    ) -> None:
        """kv_dtype: of the pool, by default dtype. max_rows, max_tokens: of one step. codes: of the
        weights."""
        config = ModelConfig.from_dir(model_dir)
        self.config = config
        self._dtype = dtype
        llama = LlamaModel(
            config,
            MetaWeights(config, dtype, codes),
            PlainLinear,
            max_model_len=8192,
            device=META,
            maps_tables=False,
        )
        layout = config.kv_layout(8192)
        num_blocks = [100] * len(layout.pools(config.kv_shape, block_size, 1))
        pool = KVPools(config.kv_shape, layout, num_blocks, block_size, kv_dtype or dtype, META)
        windows = config.attention_windows(block_size)
        self._drafted = drafted_sizes(max_rows, MOST_DRAFTS)
        attention = PagedAttention(
            windows, max_rows, max_tokens, num_sms, META, dtype, drafted=self._drafted
        )
        slots = AdapterSlots(config, MAX_LORAS, MAX_LORA_RANK, dtype, META)
        self.model = FusedModel(llama, pool, attention, max_rows, slots)
        self._pool, self._max_rows, self._block_size = pool, max_rows, block_size

    def launches(
        self,
        num_decodes: int,
        chunk: int = 0,
        *,
        has_adapters: bool = False,
        has_inserts: bool = False,
    ) -> list[Launch]:
        """Of a step with this many decodes, and one prefill chunk of `chunk` tokens if not 0.
        has_adapters: its tokens have LoRA adapters. has_inserts: its sequences have inserts."""
        num_rows, num_tokens = num_decodes + bool(chunk), num_decodes + chunk
        num_slots = self._max_rows + 1
        step = DeviceStep(
            token_ids=_ints(num_tokens),
            positions=_ints(num_tokens),
            kv_slots=_ints(num_tokens).long(),
            slots=_ints(num_rows),
            context_lens=_ints(num_rows),
            num_decodes=num_decodes,
            chunk_starts=_ints(2) if chunk else None,
            block_tables=_ints(num_slots, 128),
            more_groups=tuple(
                (_ints(num_tokens).long(), _ints(num_slots, 128)) for _ in self._pool.all_groups[1:]
            ),
            adapters=_tiles(num_tokens) if has_adapters else None,
            state_tiles=_state_tiles(chunk) if chunk else None,
        )
        lengths, token_table = _ints(num_slots), _ints(num_slots, 8193)
        rotary = RotaryPositions(lengths, _ints(num_tokens)) if has_inserts else None
        if rotary is not None:
            step = replace(step, rotary_positions=rotary.of_tokens)
        with recorded() as launches, torch.inference_mode():
            if chunk:
                for decode_lens in (None, _ints(num_rows)):  # launched one by one, and in a graph
                    gather_chunks(
                        step.slots, _ints(num_rows), _ints(num_rows + 1), lengths, token_table,
                        step.block_tables[None], self._block_size, chunk, step.token_ids,
                        step.positions, step.kv_slots[None], step.context_lens, decode_lens,
                        rotary,
                    )  # fmt: skip
            else:
                gather_decodes(
                    step.slots, lengths, token_table, step.block_tables[None], self._block_size,
                    step.token_ids, step.positions, step.kv_slots[None], step.context_lens,
                    _ints(1), 2, rotary,
                )  # fmt: skip
            self.model.logits(self.model(step)[:num_rows])
            host = () if chunk else (_ints(2, num_slots), _ints(1))
            store_sampled(_ints(num_rows), step.slots, step.context_lens, token_table, *host)
            update_table(_ints(num_rows, 3), step.block_tables)
            for pool in self._pool.groups:
                for pair in pool.pairs():
                    copy_blocks(_ints(1, 2), *pair)
                self._move(pool)
            if (states := self._pool.recurrent) is not None:
                copy_blocks(_ints(1, 2), states.matrices)
                copy_blocks(_ints(1, 2), states.inputs)
                tables = step.group_steps[-1].block_tables
                snapshot_states(_ints(1, 2), tables, states.matrices, states.inputs)
        return launches

    def drafted_launches(self, num_tokens: int, num_drafts: int = MOST_DRAFTS) -> list[Launch]:
        """Of a step of decodes with drafts, of so many tokens. num_drafts: the most of a row."""
        queries = drafted_sizes(self._max_rows, num_drafts).queries
        rows = DraftedRows(*_ints(4, num_tokens))
        tokens = DraftedTokens(*_ints(4, num_tokens))
        num_slots, num_groups = self._max_rows + 1, len(self._pool.all_groups)
        kv_slots, tables = _ints(num_groups, num_tokens).long(), _ints(num_groups, num_slots, 128)
        step = DeviceStep(
            token_ids=tokens.token_ids,
            positions=tokens.positions,
            kv_slots=kv_slots[0],
            slots=rows.slots,
            context_lens=_ints(num_tokens),
            num_decodes=num_tokens,
            chunk_starts=None,
            block_tables=tables[0],
            more_groups=tuple(zip(kv_slots[1:], tables[1:], strict=True)),
            queries=DecodeQueries(rows.firsts, rows.counts, queries),
        )
        lengths, token_table = _ints(num_slots), _ints(num_slots, 8193)
        with recorded() as launches, torch.inference_mode():
            gather_drafted(
                rows, queries, lengths, token_table, tables, self._block_size, tokens, kv_slots,
                step.context_lens, _ints(1), 2,
            )  # fmt: skip
            self.model.logits(self.model(step))
            accept_drafts(
                _ints(num_tokens), rows, queries, tokens.positions, lengths, token_table,
                _ints(2, num_tokens), _ints(2, 2 * num_tokens), _ints(1),
            )  # fmt: skip
        return launches

    def _move(self, pool: KVPool) -> None:
        """Blocks to the host's memory and back."""
        pieces = _ints(1, piece_bytes(pool) // 4)
        checksums = torch.empty(1, dtype=torch.int64, device=META)
        for words in words_of(pool):
            gather_blocks(_ints(1), words, 0, pieces, checksums)
            scatter_blocks(_ints(1), words, 0, pieces, checksums, checksums)
        add_checksums(pieces, checksums)

    def sampling_launches(self, mode: Mode = Mode.ADJUSTED) -> list[Launch]:
        """Of a request's settings, and of a step. Many rows have logits of the model's type."""
        sampler = DeviceSampler(self._max_rows, self.config.vocab_size, META)
        sampler.allow_adjustments()
        ids = _ints(8)
        with recorded() as launches:
            sampler.assign(0, SamplingParams(max_tokens=1), 0, [1], 1)
            sampler.flush()
            for dtype in (torch.float32, self._dtype):
                logits = torch.empty(8, self.config.vocab_size, dtype=dtype, device=META)
                sampler.sample(logits, ids, ids, ids, torch.empty(8, device=META), mode)
        return launches


def _ints(*shape: int) -> torch.Tensor:
    return torch.empty(shape, dtype=torch.int32, device=META)


def _tiles(num_tokens: int) -> AdapterTiles:
    num_tiles = most_tiles(num_tokens, MAX_LORAS)
    slots, firsts, counts = _ints(3, num_tiles).unbind()
    return AdapterTiles(_ints(num_tokens), slots, firsts, counts, tile_rows(num_tokens))


def _state_tiles(num_tokens: int) -> StateTiles:
    num_tiles = -(-num_tokens // TILE_TOKENS)
    return StateTiles(TILE_TOKENS, _ints(4), _ints(1, 4), _ints(num_tiles, 4))


def launches_in_a_decode_layer(model: MetaModel, num_decodes: int) -> Counter[str]:
    """Of Triton kernels, without the products by cuBLAS at larger sizes."""
    counts = Counter(launch.name for launch in model.launches(num_decodes))
    layers = model.config.num_layers
    return Counter({name: count // layers for name, count in counts.items() if count >= layers})


def main(model_dirs: list[str], *, has_codes: bool) -> None:
    """has_codes: of weights or of keys and values; else neither."""
    seen = set()
    all_steps = ((1, 0), (16, 0), (256, 0), (7, 1024))
    kinds: list[tuple[dict[str, Any], tuple[tuple[int, int], ...]]] = [
        ({}, all_steps),
        ({"dtype": torch.float16}, all_steps),
    ]
    if has_codes:
        kinds = [
            ({"kv_dtype": torch.float8_e4m3fn}, ((1, 0), (7, 1024))),
            ({"codes": QUANTIZED["int4"]}, ((1, 0), (256, 0))),
        ]
    for model_dir, (options, steps) in product(model_dirs, kinds):
        model = MetaModel(Path(model_dir), **options)
        with launch.overlap(True):
            launches = model.sampling_launches()
            for num_decodes, chunk in steps:
                launches += model.launches(num_decodes, chunk)
                launches += model.launches(num_decodes, chunk, has_adapters=True)
            for num_drafts in (3, MOST_DRAFTS):
                launches += model.drafted_launches(64, num_drafts)
        for one in launches:
            if one.key not in seen:
                seen.add(one.key)
                print(json.dumps(one.compile(90)), flush=True)


if __name__ == "__main__":
    main([name for name in sys.argv[1:] if name != "--codes"], has_codes="--codes" in sys.argv)
