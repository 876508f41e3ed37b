"""A GPU that computes nothing: torch's CUDA surface over fake tensors, with CUDA's rules enforced.

All of our own code runs unchanged under `PretendGpu.installed`. Torch's is replaced: tensors have a
device and a shape but no data; streams, events, graphs, pinned memory and `mem_get_info` are
arithmetic; and Triton's launches are recorded with the key by which Triton would compile them.
`BrokenRule` is raised for what a real device would refuse or get wrong:

- a kernel's tensor that is on the host, has gaps, or was overwritten by a later graph;
- in a capture: a transfer, a wait for the device, a kernel that was not compiled before, a
  collective of NCCL's that has not run before;
- a replay after its memory was freed; host memory read or written before its copy has run;
- more memory than the device has.

Needs g++ for two lines of C++: a build of torch without CUDA cannot index a CUDA tensor otherwise.
"""

import ctypes
import subprocess
import sys
import tempfile
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from triton.backends.compiler import GPUTarget
from triton.compiler.compiler import make_backend
from triton.runtime.jit import JITFunction, create_function_from_signature

from penstock.engine.executors.cuda import block_tier
from penstock.engine.memory.tiers.host_tier import HostTier
from penstock.engine.models.decoder import model as llama
from penstock.engine.ranks.torch_group import ALL_GATHER
from tests.support.paths import ROOT

_GUARD = """
#include <c10/core/impl/DeviceGuardImplInterface.h>
namespace c10::impl { C10_REGISTER_GUARD_IMPL(CUDA, NoOpDeviceGuardImpl<DeviceType::CUDA>) }
"""
_ALIGNMENT = 512  # of torch's allocator
_MAX_GRID_Y = 65535
_COLLECTIVES = ("all_reduce", "broadcast", ALL_GATHER)
_ENGINE = str(ROOT / "penstock" / "engine")
_aten = torch.ops.aten
_PUTS = (_aten.index_put_.default, _aten.index_put.default)


class BrokenRule(AssertionError):
    """An operation that a GPU forbids, or would get wrong."""


@dataclass(eq=False)
class Memory:
    """One storage. busy: for ranges of its bytes, when, on the stream's clock, the device has
    finished using them."""

    address: int
    num_bytes: int
    on_gpu: bool
    owner: "Graph | None" = None
    is_pinned: bool = False
    is_alive: bool = True
    is_stale: bool = False
    busy: dict[tuple[int, int], int] = field(default_factory=dict)

    def is_busy(self, start: int, stop: int, at: int) -> bool:
        return any(
            until > at for (first, end), until in self.busy.items() if first < stop and start < end
        )


@dataclass(frozen=True)
class Launch:
    """key: Triton compiles the kernel once for each. run: what it changes that is modelled here."""

    name: str
    key: str
    grid: tuple[int, ...]
    pointers: tuple[int, ...]
    integers: dict[str, int]
    run: Callable[[], None] = field(default=lambda: None, compare=False, repr=False)


class Pointer:
    """What Triton reads of a tensor."""

    def __init__(self, dtype: torch.dtype, address: int) -> None:
        self.dtype = dtype
        self._address = address

    def data_ptr(self) -> int:
        return self._address


class Graph:
    """Stands in for torch.cuda.CUDAGraph."""

    def __init__(self, gpu: "PretendGpu") -> None:
        self._gpu = gpu
        self.pool: object = None
        self.outside: dict[int, Memory] = {}
        self.launches: list[Launch] = []
        self.operations: list[str] = []  # torch's own

    def replay(self) -> None:
        gpu = self._gpu
        if any(not memory.is_alive for memory in self.outside.values()):
            raise BrokenRule("a graph is replayed whose memory has been freed")
        for memory in gpu.memories.values():
            if memory.owner and memory.owner.pool == self.pool:
                memory.is_stale = memory.owner is not self
        gpu.clock += 1
        gpu.replays.append(self)
        for launch in self.launches:
            launch.run()


@dataclass
class PretendGpu:
    """name, capability, total_bytes: those of an H200. answer: the value of every id read.
    maps_pinned: whether kernels reach pinned memory."""

    name: str = "NVIDIA H200"
    capability: tuple[int, int] = (9, 0)
    total_bytes: int = 150_000_000_000
    answer: int = 97
    maps_pinned: bool = True
    clock: int = 0
    known: int = 0  # the time on the clock that the host knows the device has reached
    waits: list[str] = field(default_factory=list)  # where the host waited for the device
    uploads: list[str] = field(default_factory=list)
    downloads: list[str] = field(default_factory=list)
    launches: list[Launch] = field(default_factory=list)
    replays: list[Graph] = field(default_factory=list)
    graphs: list[Graph] = field(default_factory=list)
    compiled: dict[str, str] = field(default_factory=dict)  # by key, the place of its first launch
    memories: dict[int, Memory] = field(default_factory=dict)
    # The collectives that have run, and of which groups.
    connected: set[tuple[str, object]] = field(default_factory=set)
    collectives: list[str] = field(default_factory=list)  # those outside of graphs
    turns: dict[int, int] = field(default_factory=dict)  # the one number by address that has data
    capturing: Graph | None = None
    forbids_waits: bool = False  # torch.cuda.set_sync_debug_mode
    live_bytes: int = 0
    reserved_bytes: int = 0
    peak_bytes: int = 0

    def __post_init__(self) -> None:
        self._next_address = _ALIGNMENT
        self._pool_live: Counter[object] = Counter()
        self._pool_peak: Counter[object] = Counter()
        self._binders: dict[str, Any] = {}
        self._backend: Any = make_backend(
            GPUTarget("cuda", self.capability[0] * 10 + self.capability[1], 32)
        )

    # Memory.

    def adopt(self, tensor: Tensor) -> Memory:
        storage = tensor.untyped_storage()
        key = storage._cdata
        memory = self.memories.get(key)
        if memory is None:
            num_bytes = -(-storage.nbytes() // _ALIGNMENT) * _ALIGNMENT
            memory = Memory(self._next_address, num_bytes, tensor.is_cuda)
            self._next_address += num_bytes + _ALIGNMENT
            self.memories[key] = memory
            weakref.finalize(storage, self._free, key, memory).atexit = False
            if memory.on_gpu:
                self._take(memory)
        return memory

    def _take(self, memory: Memory) -> None:
        memory.owner = self.capturing
        if self.capturing:
            pool = self.capturing.pool
            self._pool_live[pool] += memory.num_bytes
            self._pool_peak[pool] = max(self._pool_peak[pool], self._pool_live[pool])
        else:
            self.live_bytes += memory.num_bytes
            self.reserved_bytes = max(self.reserved_bytes, self.live_bytes)
        self.peak_bytes = max(self.peak_bytes, self.used_bytes)
        if self.used_bytes > self.total_bytes:
            raise torch.OutOfMemoryError(f"CUDA out of memory. {self.used_bytes} bytes")

    def _free(self, key: int, memory: Memory) -> None:
        memory.is_alive = False
        if self.memories.get(key) is memory:
            del self.memories[key]
        if memory.on_gpu and memory.owner:
            self._pool_live[memory.owner.pool] -= memory.num_bytes
        elif memory.on_gpu:
            self.live_bytes -= memory.num_bytes

    @property
    def used_bytes(self) -> int:
        return self.reserved_bytes + sum(self._pool_peak.values())

    def _empty_cache(self) -> None:
        self.reserved_bytes = self.live_bytes

    # The host against the device.

    def wait(self, why: str) -> None:
        if self.capturing:
            raise BrokenRule(f"{why} in a capture")
        if self.forbids_waits:
            raise BrokenRule(f"{why} where none may be, at {_place()}")
        self.waits.append(f"{why} at {_place()}")
        self.known = self.clock

    def check_host(self, tensor: Tensor, what: str) -> None:
        start = int(tensor.storage_offset()) * tensor.itemsize
        if self.adopt(tensor).is_busy(start, start + tensor.nbytes, self.known):
            raise BrokenRule(f"host memory is {what} before its copy has run, at {_place()}")

    def transfer(self, host: Tensor, *, non_blocking: bool, is_upload: bool) -> None:
        memory = self.adopt(host)
        if self.capturing:
            raise BrokenRule(f"a transfer in a capture, at {_place()}")
        (self.uploads if is_upload else self.downloads).append(_place())
        self.clock += 1
        if not (memory.is_pinned and non_blocking):
            self.wait("a transfer of memory that is not pinned")
        memory.busy[0, memory.num_bytes] = self.clock

    def use(self, tensor: Tensor) -> Memory:
        """The device reads or writes it."""
        memory = self.adopt(tensor)
        if memory.is_stale:
            raise BrokenRule(f"memory of a graph that a later one has overwritten, at {_place()}")
        if self.capturing and memory.owner is not self.capturing:
            self.capturing.outside[memory.address] = memory
        return memory

    # Triton.

    def launch(self, kernel: JITFunction[Any], grid: Any, args: Any, kwargs: Any) -> None:
        name = kernel.__name__
        names = [parameter.name for parameter in kernel.params]
        given = dict(zip(names, args, strict=False)) | kwargs
        pointers: list[int] = []
        tensors = {key: value for key, value in given.items() if isinstance(value, Tensor)}
        for argument, value in given.items():
            if isinstance(value, Tensor):
                is_reached = value.is_cuda or self._reaches(value, name, argument)
                if not is_reached or not value.is_contiguous():
                    raise BrokenRule(f"{name}'s {argument}: {value.device}, {value.stride()}")
                pointers.append(
                    self.use(value).address + int(value.storage_offset()) * value.itemsize
                )
                given[argument] = Pointer(value.dtype, pointers[-1])
        if name not in self._binders:
            self._binders[name] = create_function_from_signature(
                kernel.signature, kernel.params, self._backend
            )
        _bound, specialization, options = self._binders[name](**given)
        constants = [given[p.name] for p in kernel.params if p.is_constexpr]
        key = f"{name} {specialization} {constants} {options}"
        if any(size > _MAX_GRID_Y for size in grid[1:]):
            raise BrokenRule(f"{name}'s grid is {grid}")
        integers = {k: v for k, v in given.items() if type(v) is int}
        run = self._run_of(given, tensors)
        launch = Launch(name, key, tuple(grid), tuple(pointers), integers, run)
        if self.capturing:
            if key not in self.compiled:
                raise BrokenRule(f"{key} would be compiled in a capture")
            self.capturing.launches.append(launch)
        else:
            self.clock += 1
            self.launches.append(launch)
            run()
        if key not in self.compiled:
            self.compiled[key] = _place()

    def _reaches(self, host: Tensor, name: str, argument: str) -> bool:
        """Whether a kernel may have it, as Triton asks the driver: pinned, in the kernels of which
        `_run_of` knows what they write."""
        known = ("_store_sampled", "host_ids"), ("_accept_drafts", "host")
        if not self.adopt(host).is_pinned or (name, argument) not in known:
            return False
        if not self.maps_pinned:
            raise ValueError("Pointer argument cannot be accessed from Triton (cpu tensor?)")
        return True

    def _run_of(self, given: dict[str, Any], tensors: dict[str, Tensor]) -> Callable[[], None]:
        """What a launch does to the host's memory, and to the number that says where."""
        if (turn := tensors.get("turn")) is None:
            return lambda: None
        at = self.adopt(turn).address
        host = tensors.get("host_ids", tensors.get("host"))
        if host is None:
            num_turns = given["num_turns"]

            def count() -> None:
                self.turns[at] = (self.turns.get(at, 0) + 1) % num_turns

            return count
        # Of drafts, how many each row has, and all ids.
        num_numbers = 2 * given.get("accepted_stride", 0) or given["num_rows"]
        memory, num_bytes = self.adopt(host), 4 * num_numbers
        assert num_numbers <= host.shape[1], host.shape

        def write() -> None:
            start = 4 * self.turns.get(at, 0) * given["host_stride"]
            assert start + num_bytes <= host.nbytes, (start, host.shape)
            memory.busy[start, start + num_bytes] = self.clock

        return write

    @contextmanager
    def installed(self) -> Iterator[None]:
        """Torch finds this GPU in this context. Release all that was made on it before it ends."""
        _load_guard()
        with ExitStack() as stack:
            fake = FakeTensorMode(allow_non_fake_inputs=True)
            watch = _Watch(self)
            for target, name, new in self._stand_ins(fake, watch):
                stack.enter_context(mock.patch.object(target, name, new))
            # Else a list of numbers would be made on the device out of the modes' sight.
            torch._C._set_only_lift_cpu_tensors(True)
            stack.callback(torch._C._set_only_lift_cpu_tensors, False)
            stack.enter_context(fake)
            stack.enter_context(watch)
            yield

    def _stand_ins(self, fake: FakeTensorMode, watch: "_Watch") -> list[tuple[Any, str, Any]]:
        gpu, cuda = self, torch.cuda

        class Event:
            def __init__(self, enable_timing: bool = False, blocking: bool = False) -> None:
                self.at = 0

            def record(self, stream: object = None) -> None:
                self.at = gpu.clock

            def synchronize(self) -> None:
                if gpu.capturing:
                    raise BrokenRule("a wait for an event in a capture")
                gpu.known = max(gpu.known, self.at)

            def query(self) -> bool:
                """The device goes on while the host asks."""
                gpu.known = max(gpu.known, (gpu.known + self.at + 1) // 2)
                return gpu.known >= self.at

            def elapsed_time(self, other: "Event") -> float:
                return 1.0

        class Stream:
            """There is one order here, that of launches: `tests.support.simulated_device` has
            streams."""

            def __init__(self, device: object = None) -> None:
                pass

            def wait_event(self, event: Event) -> None:
                assert event.at, "it waits for an event that was not recorded"

        @contextmanager
        def capture(
            graph: Graph, *, pool: object = None, capture_error_mode: str = "global"
        ) -> Iterator[None]:
            if capture_error_mode == "global":
                raise BrokenRule("another thread may break a capture")
            gpu.wait("a capture")
            gpu._empty_cache()
            graph.pool, gpu.capturing = pool or object(), graph
            try:
                yield
            finally:
                gpu.capturing = None
            gpu.graphs.append(graph)

        def without_threads(*args: Any, **kwargs: Any) -> HostTier:
            return HostTier(*args, **kwargs | {"has_threads": False})

        def pin(memory: Tensor) -> None:
            gpu.adopt(memory).is_pinned = True

        def set_sync_debug_mode(mode: str) -> None:
            gpu.forbids_waits = mode == "error"

        class Threads(ThreadPoolExecutor):
            """Dispatch modes are per thread: threads that load weights need them, one at a time."""

            def __init__(self, max_workers: int | None = None, *args: Any) -> None:
                super().__init__(1, *args)

            def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
                def run() -> Any:
                    with fake, watch:
                        return fn(*args, **kwargs)

                return super().submit(run)

        def collective(name: str) -> Callable[..., None]:
            def run(*arguments: object, group: object = None, **_: object) -> None:
                for each in (each for each in arguments if isinstance(each, Tensor)):
                    if not each.is_cuda or not each.is_contiguous():
                        raise BrokenRule(f"{name} of a tensor of {each.device}, {each.stride()}")
                    gpu.use(each)
                gpu.clock += 1
                if gpu.capturing is None:
                    gpu.connected.add((name, group))
                    gpu.collectives.append(name)
                elif (name, group) not in gpu.connected:
                    raise BrokenRule(f"{name} connects the ranks in a capture")
                else:
                    gpu.capturing.operations.append(name)

            return run

        def triton_run(kernel: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> None:
            gpu.launch(kernel, grid, args, kwargs)

        make_tensor = torch.tensor

        def tensor(
            data: Any, *, device: Any = "cpu", pin_memory: bool = False, **kwargs: Any
        ) -> Tensor:
            made = make_tensor(data, **kwargs)
            gpu.adopt(made).is_pinned = pin_memory
            if isinstance(made, FakeTensor):
                made.constant = None  # see `_Watch`
            return made.to(device)

        def tolist(self: Tensor) -> Any:
            watch.read(self)
            return gpu._made_up(list(self.shape), self.dtype)

        def to_numpy(self: Tensor) -> Any:
            name = str(self.dtype).removeprefix("torch.")
            return np.array(self.tolist(), dtype=name).reshape(self.shape)

        properties = SimpleNamespace(
            multi_processor_count=132,
            L2_cache_size=60_000_000,
            total_memory=self.total_bytes,
            shared_memory_per_block_optin=227 * 1024,
        )
        return [
            (cuda, "is_available", lambda: True),
            (cuda, "current_device", lambda: 0),
            (cuda, "get_device_name", lambda device=None: self.name),
            (cuda, "get_device_capability", lambda device=None: self.capability),
            (cuda, "get_device_properties", lambda device=None: properties),
            (cuda, "is_bf16_supported", lambda including_emulation=True: True),
            (
                cuda,
                "mem_get_info",
                lambda device=None: (self.total_bytes - self.used_bytes, self.total_bytes),
            ),
            (cuda, "synchronize", lambda device=None: self.wait("synchronize")),
            (cuda, "empty_cache", self._empty_cache),
            (cuda, "set_sync_debug_mode", set_sync_debug_mode),
            (cuda, "Event", Event),
            (cuda, "Stream", Stream),
            (cuda, "current_stream", Stream),
            (cuda, "stream", nullcontext),
            # Dispatch modes are per thread, and here `work` does what the tier's threads would.
            (block_tier, "pin", pin),
            (block_tier, "HostTier", without_threads),
            (cuda, "CUDAGraph", lambda: Graph(self)),
            (cuda, "graph_pool_handle", object),
            (cuda, "graph", capture),
            *((torch.distributed, name, collective(name)) for name in _COLLECTIVES),
            (torch.distributed, "init_process_group", lambda *_, **__: None),
            (torch.distributed, "new_group", lambda *_, **__: object()),
            (torch, "Generator", lambda device="cpu": torch._C.Generator("cpu")),
            (torch, "tensor", tensor),
            (FakeTensor, "tolist", tolist),
            (FakeTensor, "numpy", to_numpy),
            (torch._subclasses.fake_tensor, "init_gpu_context", lambda device: None),
            (JITFunction, "run", triton_run),
            (llama, "ThreadPoolExecutor", Threads),
            # It would read the numbers of states, which are made up here.
            (llama, "segments_of", lambda step: ()),
        ]

    def _made_up(self, shape: list[int], dtype: torch.dtype) -> Any:
        if shape:
            return [self._made_up(shape[1:], dtype) for _ in range(shape[0])]
        return self.answer if dtype in (torch.int32, torch.int64) else dtype.is_floating_point * 0.0


class _Watch(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Intercepts every operation of torch before the fake tensors do."""

    def __init__(self, gpu: PretendGpu) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._gpu = gpu

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func.namespace == "prim":
            return func(*args, **kwargs)
        if _is_composite(func):  # its parts are intercepted instead
            with self:
                return func.decompose(*args, **kwargs)
        if func.is_view:
            return func(*args, **kwargs)
        if func is _aten._local_scalar_dense.default:
            self.read(args[0])
            return self._gpu._made_up([], args[0].dtype)
        if func is _aten.equal.default:
            for tensor in args:
                self.read(tensor)
            return True
        if func is _aten.nonzero.default:  # the host learns how many; here it is one
            self.read(args[0])
            found = args[0].new_zeros(1, args[0].ndim, dtype=torch.int64)
            self._gpu.adopt(found)
            return found
        if func is _aten._pin_memory.default:
            pinned = args[0].clone()
            self._gpu.adopt(pinned).is_pinned = True
            return pinned
        self._check(func, args, kwargs)
        out = func(*args, **kwargs)
        for tensor in tree_leaves(out):
            if isinstance(tensor, Tensor):
                memory = self._gpu.adopt(tensor)
                memory.is_pinned |= bool(kwargs.get("pin_memory"))
            if isinstance(tensor, FakeTensor):
                tensor.constant = None  # otherwise a single number would continue as a real tensor
        return out

    def read(self, tensor: Tensor) -> None:
        """The host reads its content."""
        if tensor.is_cuda:
            self._gpu.use(tensor)
            self._gpu.wait("a read")
        else:
            self._gpu.check_host(tensor, "read")

    def _check(self, func: Any, args: Any, kwargs: Any) -> None:
        gpu = self._gpu
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        for tensor in tensors:
            if tensor.is_cuda:
                gpu.use(tensor)
        if func is _aten.zero_.default:
            gpu.turns.pop(gpu.adopt(args[0]).address, None)
        if func is _aten._to_copy.default:
            source, target = args[0], torch.device(kwargs.get("device") or args[0].device)
            non_blocking = bool(kwargs.get("non_blocking"))
            if target.type != source.device.type:
                if source.is_cuda:  # to new memory, which is not pinned
                    gpu.wait("a copy to the host")
                else:
                    gpu.transfer(source, non_blocking=non_blocking, is_upload=True)
        elif func is _aten.copy_.default and args[0].is_cuda != args[1].is_cuda:
            host = args[1] if args[0].is_cuda else args[0]
            blocking = not (len(args) > 2 and args[2])
            gpu.transfer(host, non_blocking=not blocking, is_upload=args[0].is_cuda)
        elif func in _PUTS and args[0].is_cuda and not args[2].is_cuda:
            # `x[index] = 1`: torch makes a host tensor of the number, and waits for its copy.
            gpu.transfer(args[2], non_blocking=False, is_upload=True)
        elif any(tensor.is_cuda for tensor in tensors) or _is_on_gpu(kwargs.get("device")):
            gpu.clock += 1
            name = func.overloadpacket.__name__
            if gpu.capturing and "empty" not in name:
                gpu.capturing.operations.append(name)
        elif func._schema.is_mutable:
            gpu.check_host(args[0], "written")


def _is_on_gpu(device: torch.device | None) -> bool:
    return device is not None and device.type == "cuda"


@cache
def _is_composite(func: Any) -> bool:
    has_kernel = torch._C._dispatch_has_kernel_for_dispatch_key
    return bool(has_kernel(func.name(), "CompositeImplicitAutograd"))


def _place() -> str:
    """The innermost line of our own code."""
    frame = sys._getframe(1)
    while frame.f_back and not frame.f_code.co_filename.startswith(_ENGINE):
        frame = frame.f_back
    return f"{_stem(frame.f_code.co_filename)}.{frame.f_code.co_name}:{frame.f_lineno}"


@cache
def _stem(path: str) -> str:
    return Path(path).stem


def _load_guard() -> None:
    root = Path(torch.__file__).parent
    with tempfile.TemporaryDirectory() as directory:
        source, library = Path(directory, "guard.cpp"), Path(directory, "guard.so")
        source.write_text(_GUARD, encoding="utf-8")
        subprocess.run(
            ["g++", "-std=c++20", "-shared", "-fPIC", f"-I{root / 'include'}", str(source),
             "-o", str(library), f"-L{root / 'lib'}", "-lc10"],
            check=True,
        )  # fmt: skip
        ctypes.CDLL(str(library))
