"""`python -m tests.bench.gpu.rung NAME`: tries one rung of the ladder, and prints what it found.

Without a GPU the same code runs in Triton's interpreter, where nothing is captured and no kernel
starts early: it shows that the rung computes what it should, and no more.
"""

import argparse
import ctypes
import math
import os
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import asdict
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")

from penstock.engine.kernels.launch import overlap, overlapped
from penstock.engine.kernels.linear import Scaled, skinny_linear
from penstock.engine.kernels.norm import add_rms_norm, rms_norm
from penstock.engine.step.executor import PendingTokens
from penstock.scheduler.types import Request, RequestId, SamplingParams, ScheduledBatch
from tests.bench.engine.case import Bench, MakeCase
from tests.bench.engine.driver import Driver
from tests.bench.engine.executors import build_executor
from tests.bench.engine.kernels import GROUPS
from tests.bench.engine.timing import compute_dtype, relative_error, report, the_device, tolerance
from tests.bench.gpu.rungs import RUNGS
from tests.bench.gpu.small_model import SmallModel, compare, two_layers
from tests.support.interpreter import hasten_interpreter
from tests.support.sampling_ways import WAYS

_EPS = 1e-5
_REPLAYS = 20
# Compute capabilities whose kernels may start early, see `penstock.engine.kernels.launch`.
_EARLY = (9, 10)

Found = dict[str, object]
Args = argparse.Namespace


class Chain:
    """Kernels that depend on each other, with memory that is freed and used again between them."""

    def __init__(self, tiny: bool, between: Callable[["Chain"], None] | None = None) -> None:
        device = the_device()
        dtype = compute_dtype(device)
        size, wide, self._depth = (64, 96, 2) if tiny else (4096, 14336, 8)
        torch.manual_seed(0)

        def random(*shape: int, scale: float) -> Tensor:
            return (torch.randn(shape, device=device) * scale).to(dtype)

        self._up = random(2 * wide, size, scale=size**-0.5)
        self._down = random(size, wide, scale=wide**-0.5)
        self._norm = random(size, scale=1.0)
        self._start = random(4, size, scale=1.0)
        self.scratch = random(4, wide, scale=1.0)
        self.residual = torch.empty_like(self._start)
        self.normed = torch.empty_like(self._start)
        self._between = between

    def run(self) -> None:
        self.residual.copy_(self._start)  # a kernel that starts early comes right behind a copy
        norm = self._norm
        rms_norm(self.residual, norm, _EPS, self.normed)
        x: Tensor | Scaled = self.normed
        for _ in range(self._depth):
            active = self.residual.new_empty(len(self.residual), self._down.shape[1])
            skinny_linear(x, self._up, active, eps=_EPS, is_gated=True)
            if self._between:
                self._between(self)
            scaled = skinny_linear(
                active, self._down, self.residual, residual=self.residual, following=norm
            )
            assert scaled is not None
            x = scaled
            del active
        rms_norm(self.residual, norm, _EPS, self.normed)

    def expected(self) -> Tensor:
        """`normed`, by torch alone."""
        norm, up, down = (x.double() for x in (self._norm, self._up, self._down))
        residual = self._start.double()
        for _ in range(self._depth):
            normed = functional.rms_norm(residual, norm.shape, norm, _EPS)
            gate, value = (normed @ up.T).chunk(2, -1)
            residual = residual + (functional.silu(gate) * value) @ down.T
        return functional.rms_norm(residual, norm.shape, norm, _EPS)


def _memsets(chain: Chain) -> None:
    """A fill as torch has it, and a memset as the driver has it."""
    chain.scratch.zero_()
    if chain.scratch.is_cuda:
        driver_memset(chain.scratch)


def driver_memset(tensor: Tensor) -> None:
    stream = ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)
    address, num_bytes = ctypes.c_uint64(tensor.data_ptr()), ctypes.c_size_t(tensor.nbytes)
    driver = ctypes.CDLL("libcuda.so.1")
    status = driver.cuMemsetD8Async(address, ctypes.c_ubyte(0), num_bytes, stream)
    assert status == 0, f"cuMemsetD8Async: {status}"


def _captured(run: Callable[[], None]) -> Callable[[], object]:
    """A graph's replay; without a GPU, the call itself."""
    if not torch.cuda.is_available():
        return run
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        run()
    return graph.replay


def _kernel(args: Args) -> Found:
    device = the_device()
    dtype = compute_dtype(device)
    size = 64 if args.tiny else 4096
    x, residual = torch.randn(2, 3, size, device=device).to(dtype)
    weight = torch.randn(size, device=device).to(dtype)
    total = residual + x
    normed = torch.full_like(x, float("nan"))
    with overlap(False):
        add_rms_norm(x, residual, weight, _EPS, normed)
    expected = functional.rms_norm(total.double(), weight.shape, weight.double(), _EPS)
    error = relative_error(normed, expected)
    return {"error": error, "is_right": error < tolerance(dtype)}


def _kernels(args: Args, *, groups: Sequence[str]) -> Found:
    """Each case of these by itself, one by one and not started early."""
    bench = Bench(tiny=args.tiny, is_timed=False)
    wrong: dict[str, object] = {}
    num_cases = 0
    with overlap(False):
        for group in groups:
            for make in GROUPS[group](bench):
                num_cases += 1
                wrong |= wrong_of(make, f"{group}, number {num_cases}", bench)
    return {"wrong": wrong, "num_cases": num_cases, "is_right": not wrong}


def wrong_of(make: MakeCase, name: str, bench: Bench) -> dict[str, object]:
    """Its error by its name, or why it has none. Raises if the device is lost."""
    try:
        case = make()
        name, error = case.name, case.error()
    except Exception as failure:
        traceback.print_exc(file=sys.stderr)
        if bench.device.type == "cuda":
            torch.cuda.synchronize()
        return {name: f"{type(failure).__name__}: {failure}"[:500]}
    if error < case.tolerances * tolerance(bench.dtype):
        return {}
    return {name: error if math.isfinite(error) else str(error)}


def _chain(args: Args, *, early: bool, in_graph: bool, memsets: bool = False) -> Found:
    """The same bits as one by one, and those that torch computes, again and again."""
    chain = Chain(args.tiny, _memsets if memsets else None)
    with overlap(False):
        chain.run()
    expected = chain.normed.clone()
    error = relative_error(expected, chain.expected())
    with _launched(early):
        chain.run()  # compiles
        again = _captured(chain.run) if in_graph else chain.run
        num_different = 0
        for _ in range(1 if args.tiny else _REPLAYS):
            chain.normed.fill_(float("nan"))
            again()
            num_different += not torch.equal(chain.normed, expected)
    is_right = num_different == 0 and error < 5 * tolerance(chain.normed.dtype)
    return {"error": error, "num_different": num_different, "is_right": is_right}


def _model(args: Args, *, early: bool, graphs: bool, chunk_graphs: bool = False) -> Found:
    """Ids against the reference; and steps of decodes alone may not wait for the device."""
    with _launched(early):
        model = SmallModel(args.tiny, graphs=graphs, chunk_graphs=chunk_graphs)
        requests, num_steady = model.greedy(), 0

        def launch(batch: ScheduledBatch) -> PendingTokens:
            nonlocal num_steady
            is_steady = batch.num_decodes == len(batch.slots) and not batch.assignments
            num_steady += is_steady
            with _no_waits(is_steady):
                return model.executor.execute(batch)

        if torch.cuda.is_available():
            model.serve(requests)  # compiles
        compared = compare(model, requests, model.serve(requests, launch))
    return {**asdict(compared), "steady_steps": num_steady}


def _waits(args: Args) -> Found:
    """Requests of all kinds but those whose logprobs the host has to read."""
    model = SmallModel(
        args.tiny, graphs=not args.enforce_eager, chunk_graphs=not args.enforce_eager
    )
    ways = [way for way in WAYS if not {"num_logprobs", "num_prompt_logprobs"} & way.keys()]
    requests = [_request(model, index, way) for index, way in enumerate(ways)]
    for request in requests:
        compiled = model.executor.prepare(request)
        if compiled:
            compiled.result()

    def launch(batch: ScheduledBatch) -> PendingTokens:
        with _no_waits():
            return model.executor.execute(batch)

    if torch.cuda.is_available():
        model.serve(requests)  # compiles
    ids = model.serve(requests, launch)
    counts = [len(ids[request.id]) for request in requests]
    return {"num_requests": len(requests), "is_right": min(counts) > 0}


def _request(model: SmallModel, index: int, way: dict[str, object]) -> Request:
    sampling = SamplingParams(**({"max_tokens": model.sizes.output} | way))  # type: ignore[arg-type]
    prompt = tuple(3 + (index + i) % 89 for i in range(model.sizes.prompts[-1] // 4))
    return Request(
        id=RequestId(str(index)), prompt_token_ids=prompt, sampling=sampling, arrival_s=0
    )


def _start(args: Args) -> Found:
    sizes = (64, 4, 32) if args.tiny else (512, 16, 512)
    with two_layers(args.tiny) as directory:
        executor = build_executor(
            directory,
            max_model_len=sizes[0],
            max_num_seqs=sizes[1],
            max_num_batched_tokens=sizes[2],
            kv_cache_memory_bytes=2**28,
            enforce_eager=args.enforce_eager,
        )
    driver = Driver(executor)
    driver.fill(sizes[0] // 2)
    driver.begin(sizes[1] // 2, 16, 16)
    times = driver.decode(3 if args.tiny else 12)
    return {
        "is_right": True,
        "step_ms": times.step_s * 1e3,
        "phases": executor.info.load_seconds,
        "launched": overlapped(),
    }


def _launched(early: bool) -> AbstractContextManager[None]:
    """In the interpreter, kernels start one by one."""
    return overlap(early and torch.cuda.is_available())


@contextmanager
def _no_waits(enabled: bool = True) -> Iterator[None]:
    """An operation in this context that waits for the device raises RuntimeError."""
    if not (enabled and torch.cuda.is_available()):
        yield
        return
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


_RUNGS: dict[str, Callable[[Args], Found]] = {
    "kernel": _kernel,
    **{rung.name: partial(_kernels, groups=rung.kernels) for rung in RUNGS if rung.kernels},
    "kernel-pdl": lambda args: _chain(args, early=True, in_graph=False),
    "graph": lambda args: _chain(args, early=False, in_graph=True),
    "graph-pdl": lambda args: _chain(args, early=True, in_graph=True),
    "graph-memset-pdl": lambda args: _chain(args, early=True, in_graph=True, memsets=True),
    "model": lambda args: _model(args, early=False, graphs=False),
    "model-pdl": lambda args: _model(args, early=True, graphs=False),
    "decode-graphs": lambda args: _model(args, early=False, graphs=True),
    "decode-graphs-pdl": lambda args: _model(args, early=True, graphs=True),
    "chunk-graphs": lambda args: _model(args, early=False, graphs=True, chunk_graphs=True),
    "chunk-graphs-pdl": lambda args: _model(args, early=True, graphs=True, chunk_graphs=True),
    "waits": _waits,
    "start": _start,
}
assert list(_RUNGS) == [rung.name for rung in RUNGS]


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.bench.gpu.rung")
    parser.add_argument("name", choices=list(_RUNGS))
    parser.add_argument("--tiny", action="store_true", help="the same code at toy sizes")
    parser.add_argument("--enforce-eager", action="store_true", help="without CUDA graphs")
    args = parser.parse_args(argv)
    hasten_interpreter()
    if not torch.cuda.is_available() and not args.tiny:
        print("torch finds no GPU here; --tiny runs the same code on the CPU", file=sys.stderr)
        return 1
    if args.name.endswith("-pdl") and not _starts_early():
        report(part="probe", rung=args.name, is_right=True, skipped="no kernel starts early here")
        return 0
    started_s = time.perf_counter()
    found = _RUNGS[args.name](args)
    report(part="probe", rung=args.name, **found, seconds=time.perf_counter() - started_s)
    return 0


def _starts_early() -> bool:
    """Without a GPU too: there the rung computes what it should, one kernel after the other."""
    if not torch.cuda.is_available():
        return True
    return torch.cuda.get_device_capability()[0] in _EARLY


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
