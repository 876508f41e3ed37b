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
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import product
from pathlib import Path
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime.jit import JITFunction

from penstock.engine.attention.gathered import gathered_attention
from penstock.engine.attention.paged import PagedAttention
from penstock.engine.device_step import DeviceStep
from penstock.engine.kernels import launch
from penstock.engine.kernels.sample import DeviceSampler, Mode
from penstock.engine.kernels.tables import (
    gather_decodes,
    store_lengths,
    store_sampled,
    update_block_tables,
)
from penstock.engine.memory.kv_pool import KVPool
from penstock.engine.models.config import ModelConfig
from penstock.engine.models.fused import FusedModel
from penstock.engine.models.layers.linear import PlainLinear
from penstock.engine.models.llama import LlamaModel
from tests.support.address_width import narrow_offsets

META = torch.device("meta")
BLOCK_SIZE = 64
NUM_SMS = 132
_POINTERS = {
    torch.float32: "*fp32",
    torch.bfloat16: "*bf16",
    torch.float16: "*fp16",
    torch.int32: "*i32",
    torch.int64: "*i64",
}
_OPTIONS = ("num_warps", "num_stages", "maxnreg", "launch_pdl")
# Programs of the sampler's kernels: rows of a step, and chunks of a vocabulary.
_SAMPLING = dict.fromkeys(("_scan", "_finish", "_coarse", "_gather", "_select"), ((2**13, 2**8),))
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
        self.options = {k: arguments.pop(k) for k in _OPTIONS if k in arguments}
        self.signature: dict[str, str] = {}
        self.constants: dict[str, Any] = {}
        self._aligned: list[int] = []
        for index, parameter in enumerate(kernel.params):
            value = arguments[parameter.name]
            if parameter.is_constexpr:
                self.signature[parameter.name] = "constexpr"
                self.constants[parameter.name] = value
            else:
                self._add(index, parameter, value)

    def _add(self, index: int, parameter: Any, value: Any) -> None:
        if isinstance(value, torch.Tensor):
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
    def key(self) -> str:
        parts = (self.name, self.signature, self.constants, self.options, self._aligned)
        return repr(parts)

    def compile(self, capability: int) -> dict[str, Any]:
        aligned = {(index,): [["tt.divisibility", 16]] for index in self._aligned}
        source = ASTSource(self._kernel, self.signature, self.constants, aligned)
        target = GPUTarget("cuda", capability, 32)
        compiled = triton.compile(source, target=target, options=self.options)
        return {
            "kernel": self.name,
            "capability": capability,
            "constants": self.constants,
            "options": self.options,
            "shared_bytes": compiled.metadata.shared,
            "is_overlapped": self.options.get("launch_pdl", False),
            "narrow_offsets": narrow_offsets(compiled.asm["ttir"], *_SAMPLING.get(self.name, ())),
            "before_wait": before_wait(_tool("nvdisasm", "-c", cubin=compiled.asm["cubin"])),
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


class MetaWeights:
    def __init__(self, dtype: torch.dtype) -> None:
        self._dtype = dtype

    def read(self, shape: tuple[int, ...], *names: str) -> torch.Tensor:
        return torch.empty(shape, dtype=self._dtype, device=META)


class MetaModel:
    """A model of any size on tensors without data."""

    def __init__(
        self,
        model_dir: Path,
        block_size: int = BLOCK_SIZE,
        dtype: torch.dtype = torch.bfloat16,
    ) -> None:
        config = ModelConfig.from_dir(model_dir)
        self.config = config
        self._dtype = dtype
        llama = LlamaModel(
            config,
            MetaWeights(dtype),
            PlainLinear,
            gathered_attention,
            max_model_len=8192,
            device=META,
        )
        pool = KVPool(config.kv_shape, 100, block_size, dtype, META)
        shape = config.attention_shape(block_size)
        attention = PagedAttention(shape, config.windows, 512, 8192, NUM_SMS, META, dtype)
        self.model = FusedModel(llama, pool, attention, max_rows=512)

    def launches(self, num_decodes: int, chunk: int = 0) -> list[Launch]:
        """Of a step with this many decodes, and one prefill chunk of `chunk` tokens if not 0."""
        num_rows, num_tokens = num_decodes + bool(chunk), num_decodes + chunk
        step = DeviceStep(
            token_ids=_ints(num_tokens),
            positions=_ints(num_tokens),
            kv_slots=_ints(num_tokens).long(),
            slots=_ints(num_rows),
            context_lens=_ints(num_rows),
            num_decodes=num_decodes,
            chunk_starts=_ints(2) if chunk else None,
            block_tables=_ints(513, 128),
        )
        lengths, token_table = _ints(513), _ints(513, 8193)
        with recorded() as launches, torch.inference_mode():
            gather_decodes(
                step.slots, lengths, token_table, step.block_tables, BLOCK_SIZE,
                step.token_ids, step.positions, step.kv_slots, step.context_lens,
            )  # fmt: skip
            self.model.logits(self.model(step)[:num_rows])
            store_sampled(_ints(num_rows), step.slots, step.context_lens, token_table)
            store_lengths(step.slots, step.context_lens, lengths)
            update_block_tables(_ints(num_rows, 3), step.block_tables)
        return launches

    def sampling_launches(self) -> list[Launch]:
        """Of the mode that does everything."""
        sampler = DeviceSampler(512, self.config.vocab_size, META)
        sampler.allow_adjustments()
        logits = torch.empty(8, self.config.vocab_size, dtype=self._dtype, device=META)
        ids = _ints(8)
        with recorded() as launches:
            sampler.sample(logits, ids, ids, ids, torch.empty(8, device=META), Mode.ADJUSTED)
        return launches


def _ints(*shape: int) -> torch.Tensor:
    return torch.empty(shape, dtype=torch.int32, device=META)


def launches_in_a_decode_layer(model: MetaModel, num_decodes: int) -> Counter[str]:
    """Of Triton kernels, without the products by cuBLAS at larger sizes."""
    counts = Counter(launch.name for launch in model.launches(num_decodes))
    layers = model.config.num_layers
    return Counter({name: count // layers for name, count in counts.items() if count >= layers})


def main(model_dirs: list[str]) -> None:
    seen = set()
    for model_dir, dtype in product(model_dirs, (torch.bfloat16, torch.float16)):
        model = MetaModel(Path(model_dir), dtype=dtype)
        with launch.overlap(True):
            launches = model.sampling_launches()
            for num_decodes, chunk in ((1, 0), (16, 0), (256, 0), (7, 1024)):
                launches += model.launches(num_decodes, chunk)
        for one in launches:
            if one.key not in seen:
                seen.add(one.key)
                print(json.dumps(one.compile(90)), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
