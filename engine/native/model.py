"""`NativeModel`: a whole step in one call of C++ (step.cpp), if a compiler is installed.

The library is compiled for this processor when it is first needed, and kept in the user's cache
directory; if that cannot be written, it is compiled at every start. Without a compiler,
`load_library` logs a warning and returns None, and `penstock.engine.models.llama` computes the same
in torch.
"""

import contextlib
import ctypes
import functools
import hashlib
import logging
import os
import platform
import shutil
import subprocess
import tempfile
import time
from ctypes import POINTER, Structure, c_double, c_int64, c_void_p
from pathlib import Path

import torch
from torch import Tensor

from penstock.engine.memory.kv_pool import KVPool
from penstock.engine.model_input import ModelInput
from penstock.engine.models.config import ModelConfig
from penstock.engine.models.layers.linear import LinearProducts, PlainLinear
from penstock.engine.models.llama import LlamaModel

logger = logging.getLogger(__name__)

_PATH = "the compiled CPU step"
# Of ModelConfig.
_FEATURES = {"tied_embeddings", "qkv_bias", "output_bias", "mlp_bias", "qk_norm"}
_SOURCE = Path(__file__).with_name("step.cpp")
_COMPILE = ("-std=c++20", "-O3", "-march=native", "-fopenmp", "-fPIC", "-c")
_SCRATCH = "compiling-"
_COMPILER_TIMEOUT_S = 120
_STALE_S = 3 * _COMPILER_TIMEOUT_S  # both calls of the compiler, and a reserve


class _Linear(Structure):
    _fields_ = (
        ("weight", c_void_p),
        ("bias", c_void_p),
        ("rows", c_int64),
        ("columns", c_int64),
    )


class _Layer(Structure):
    _fields_ = (
        ("input_norm", c_void_p),
        ("query_norm", c_void_p),
        ("key_norm", c_void_p),
        ("mlp_norm", c_void_p),
        ("qkv", _Linear),
        ("output", _Linear),
        ("gate_up", _Linear),
        ("down", _Linear),
        ("keys", c_void_p),
        ("values", c_void_p),
        ("window", c_int64),
    )


class _Model(Structure):
    _fields_ = (
        ("num_layers", c_int64),
        ("hidden", c_int64),
        ("heads", c_int64),
        ("kv_heads", c_int64),
        ("head_dim", c_int64),
        ("mlp", c_int64),
        ("block_size", c_int64),
        ("eps", c_double),
        ("layers", POINTER(_Layer)),
        ("embedding", c_void_p),
        ("norm", c_void_p),
        ("lm_head", _Linear),
        ("cos", c_void_p),
        ("sin", c_void_p),
    )


class _Step(Structure):
    _fields_ = (
        ("tokens", c_int64),
        ("sequences", c_int64),
        ("samples", c_int64),
        ("max_blocks", c_int64),
        ("threads", c_int64),
        ("token_ids", c_void_p),
        ("positions", c_void_p),
        ("kv_slots", c_void_p),
        ("sample_rows", c_void_p),
        ("block_tables", c_void_p),
        ("query_starts", c_void_p),
        ("logits", c_void_p),
        ("states", c_void_p),
    )


class NativeModel:
    """`LlamaModel` on its weights and one KV pool: see `Model`."""

    def __init__(self, library: ctypes.CDLL, model: LlamaModel, pool: KVPool, threads: int) -> None:
        """Raises UnsupportedFeature or UnsupportedWeightFormat."""
        config = model.config
        check_features(config)
        name = str(model.embedding.dtype).removeprefix("torch.")
        self._run_step = getattr(library, f"penstock_step_{name}")
        self._run_logits = getattr(library, f"penstock_logits_{name}")
        self._dtype = model.embedding.dtype
        self._threads = threads
        self._vocab_size = config.vocab_size
        # Kept alive, because the pointers below point into them.
        self._kept = (model, pool)
        layers = (_Layer * config.num_layers)(
            *(
                _Layer(
                    input_norm=_address(layer.input_norm),
                    query_norm=_address(layer.query_norm),
                    key_norm=_address(layer.key_norm),
                    mlp_norm=_address(layer.mlp_norm),
                    qkv=_LINEARS.of(layer.qkv),
                    output=_LINEARS.of(layer.output),
                    gate_up=_LINEARS.of(layer.gate_up),
                    down=_LINEARS.of(layer.down),
                    keys=_address(keys),
                    values=_address(values),
                    window=layer.window or 0,
                )
                for layer, keys, values in zip(model.layers, pool.keys, pool.values, strict=True)
            )
        )
        self._model = _Model(
            num_layers=config.num_layers,
            hidden=config.hidden_size,
            heads=config.num_heads,
            kv_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            mlp=config.intermediate_size,
            block_size=pool.keys.shape[2],
            eps=config.rms_norm_eps,
            layers=layers,
            embedding=_address(model.embedding),
            norm=_address(model.norm),
            lm_head=_LINEARS.of(model.lm_head),
            cos=_address(model.cos),
            sin=_address(model.sin),
        )

    def __call__(self, step: ModelInput, pool: KVPool) -> Tensor:
        logits = torch.empty(len(step.sample_rows), self._vocab_size)
        self._step(step, step.sample_rows, logits=_address(logits))
        return logits

    def states(self, step: ModelInput, pool: KVPool, rows: Tensor) -> Tensor:
        states = torch.empty(len(rows), self._model.hidden, dtype=self._dtype)
        self._step(step, rows, states=_address(states))
        return states

    def logits(self, states: Tensor) -> Tensor:
        logits = torch.empty(len(states), self._vocab_size)
        native_step = _Step(
            samples=len(states),
            threads=self._threads,
            logits=_address(logits),
            states=_address(states),
        )
        self._run_logits(ctypes.byref(self._model), ctypes.byref(native_step))
        return logits

    def _step(
        self,
        step: ModelInput,
        rows: Tensor,
        *,
        logits: int | None = None,
        states: int | None = None,
    ) -> None:
        query_starts = torch.tensor(step.query_starts, dtype=torch.int32)
        native_step = _Step(
            tokens=len(step.token_ids),
            sequences=len(step.context_lens),
            samples=len(rows),
            max_blocks=step.block_tables.shape[1],
            threads=self._threads,
            token_ids=_address(step.token_ids),
            positions=_address(step.positions),
            kv_slots=_address(step.kv_slots),
            sample_rows=_address(rows),
            block_tables=_address(step.block_tables),
            query_starts=_address(query_starts),
            logits=logits,
            states=states,
        )
        self._run_step(ctypes.byref(self._model), ctypes.byref(native_step))


def check_features(config: ModelConfig) -> None:
    """Raises UnsupportedFeature for a model that step.cpp does not compute."""
    config.check_features(_PATH, _FEATURES)


@functools.cache
def load_library() -> ctypes.CDLL | None:
    """The compiled library, or None if it cannot be compiled; then it logs the reason."""
    try:
        return _load()
    except (OSError, subprocess.SubprocessError) as error:
        reason = getattr(error, "stderr", None) or error
        logger.warning(
            "step.cpp could not be compiled, so torch's operators are used instead, which are "
            "slower for small batches; install g++ to fix it (%s)",
            reason,
        )
        return None


def _load() -> ctypes.CDLL:
    try:
        return ctypes.CDLL(str(_compiled(_cache())))
    except OSError as error:
        logger.info("step.cpp is compiled at every start, because it cannot be cached: %s", error)
    with tempfile.TemporaryDirectory() as directory:  # a loaded library outlives its file
        return ctypes.CDLL(str(_compiled(Path(directory))))


def _cache() -> Path:
    """The directory that keeps it. Raises OSError for a user without a home, as in containers."""
    try:
        return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "penstock"
    except RuntimeError as error:
        raise OSError(str(error)) from None


def _compiled(cache: Path) -> Path:
    """The path of the library in that directory, compiled if it is not there yet.

    Raises OSError if it cannot be written there, SubprocessError if it cannot be compiled.
    """
    compiler = os.environ.get("CXX", "g++")
    key = hashlib.sha256(_SOURCE.read_bytes())
    for part in (compiler, *_COMPILE, platform.machine(), _processor(), torch.__version__):
        key.update(part.encode())
    library = cache / f"native-{key.hexdigest()[:16]}.so"
    if library.exists():
        return library
    cache.mkdir(mode=0o700, parents=True, exist_ok=True)
    _remove_stale(cache)
    logger.info(
        "compile: %s compiles step.cpp for this processor, into %s",
        compiler,
        cache,
    )
    with tempfile.TemporaryDirectory(prefix=_SCRATCH, dir=cache) as scratch:
        built, linked = Path(scratch, "native.o"), Path(scratch, "native.so")
        _run_compiler(compiler, *_COMPILE, str(_SOURCE), "-o", str(built))
        # Linked without -fopenmp: the OpenMP calls then resolve to the runtime that torch has
        # loaded, and two runtimes never compete for the cores.
        _run_compiler(compiler, "-shared", str(built), "-o", str(linked))
        linked.replace(library)  # atomic, so that another process sees all of it or nothing
    return library


def _remove_stale(cache: Path) -> None:
    """What processes left that were killed while they compiled."""
    for scratch in cache.glob(f"{_SCRATCH}*"):
        with contextlib.suppress(OSError):  # another process removes it at the same time
            if time.time() - scratch.stat().st_mtime > _STALE_S:
                shutil.rmtree(scratch)


def _run_compiler(*command: str) -> None:
    try:
        subprocess.run(
            command, check=True, capture_output=True, text=True, timeout=_COMPILER_TIMEOUT_S
        )
    except OSError as error:
        raise subprocess.SubprocessError(str(error)) from None


def _processor() -> str:
    """What -march=native depends on: different machines may share a home directory."""
    with Path("/proc/cpuinfo").open(encoding="utf-8") as cpuinfo:
        return next((line for line in cpuinfo if line.startswith(("flags", "Features"))), "")


def _address(tensor: Tensor | None) -> int | None:
    if tensor is None:
        return None
    assert tensor.is_contiguous(), tensor.stride()
    return tensor.data_ptr()


def _plain_linear(linear: PlainLinear) -> _Linear:
    rows, columns = linear.weight.shape
    return _Linear(_address(linear.weight), _address(linear.bias), rows, columns)


_LINEARS = LinearProducts[_Linear](_PATH, {PlainLinear.weight_format: _plain_linear})
