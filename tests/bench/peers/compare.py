"""The comparison of Penstock with its peers: how each is started, so that all do the same work.

All compute in bfloat16 where the processor can, have a KV cache of 16 bits, find shared prefixes in
it, and run up to 32 sequences at a time. Weights are in bfloat16, or in the same number of bits:
quantized by the server or its converter, and for vLLM in a checkpoint, which Penstock is measured
with too.
"""

import os
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from subprocess import CalledProcessError

from penstock.scheduler.errors import PenstockError
from tests.bench.in_turns.table import PENSTOCK
from tests.bench.peers.install import PEERS, install
from tests.bench.peers.models import (
    CHECKPOINTS,
    SHAPES,
    write_checkpoint,
    write_gguf,
    write_model,
    write_openvino,
)

_SERVER = Path(__file__).with_name("openvino_server.py")
_MAX_SEQS = 32
# llama-server divides its context by its slots.
_LLAMA_CONTEXT = _MAX_SEQS * 4096
_KV_GIB = 2
_READY_S = 1800  # vLLM compiles at its first start, for minutes even on a quiet machine
# Random weights repeat themselves, which no peer's default makes use of, so ours does not either.
_PLAIN = """--speculative-config '{"num_speculative_tokens": 0}'"""
_QUIET = "HF_HUB_OFFLINE=1 VLLM_NO_USAGE_STATS=1"


# Penstock with the checkpoint that vLLM loads.
FROM_CHECKPOINT = "penstock-checkpoint"
_TAKE_CHECKPOINTS = ("vllm", "zentorch")


@dataclass(frozen=True, slots=True)
class Weights:
    """The ends of names: of llama.cpp's file, OpenVINO's folder, and vLLM's, empty for the model's.

    exported: what OpenVINO's exporter is told.
    """

    gguf: str
    openvino: str
    exported: tuple[str, ...]
    checkpoint: str


# By --weights.
WEIGHTS = {
    "bf16": Weights(".gguf", "-openvino", ("fp16",), ""),
    "int8": Weights("-q8_0.gguf", "-openvino-int8", ("int8",), "-w8a8"),
    # Groups as llama.cpp's and ours. The default, 128, does not divide the rows of 135m.
    "int4": Weights("-q4_0.gguf", "-openvino-int4", ("int4", "--group-size", "32"), "-w4a16"),
}


@dataclass(frozen=True, slots=True)
class Files:
    """One model, in the formats of all servers. checkpoint: vLLM's, perhaps the model itself."""

    model: Path
    gguf: Path
    openvino: Path
    checkpoint: Path


class NoKernel(PenstockError):
    """A peer that cannot compute with these weights on this processor."""


def file_names(name: str, into: Path, weights: str) -> Files:
    """weights: of WEIGHTS."""
    folder, ends = into / "models", WEIGHTS[weights]
    return Files(
        folder / name,
        folder / f"{name}{ends.gguf}",
        folder / f"{name}{ends.openvino}",
        folder / f"{name}{ends.checkpoint}",
    )


def made_model(name: str, into: Path) -> Path:
    """Makes it if it does not exist. name: of SHAPES."""
    model = into / "models" / name
    if not (model / "config.json").exists():
        print(f"making {model} ...", flush=True)
        write_model(SHAPES[name], model)
    return model


def make_file(peer: str, name: str, into: Path, weights: str) -> None:
    """What this peer reads of a model, if it does not exist.

    Raises CalledProcessError, and NoKernel.
    """
    if peer == "vllm" and weights == "int4" and not vllm_has_int4():
        raise NoKernel(
            "vllm is left out: without AVX-512, which this processor lacks, it has no kernel for "
            "weights of 4 bits in any format"
        )
    files, ends = file_names(name, into, weights), WEIGHTS[weights]
    made_model(name, into)
    if peer == "llama" and not files.gguf.exists():
        write_gguf(files.model, into / "models" / f"{name}.gguf", into / "llama")
    if peer == "openvino" and not files.openvino.exists():
        write_openvino(files.model, files.openvino, into / "openvino", ends.exported)
    if peer in _TAKE_CHECKPOINTS and not files.checkpoint.exists():
        print(f"making {files.checkpoint} ...", flush=True)
        write_checkpoint(files.model, files.checkpoint, CHECKPOINTS[ends.checkpoint[1:]])


def usable(
    peers: Iterable[str], into: Path, make: Callable[[str], None] = lambda _: None
) -> tuple[list[str], dict[str, str]]:
    """Those that are installed, perhaps now, and whose files `make` makes; why the others are not.

    The reasons are printed too.
    """
    found, left_out = [], {}
    for peer in peers:
        try:
            install(peer, PEERS[peer], into)
            make(peer)
        except (PenstockError, CalledProcessError) as error:
            left_out[peer] = str(error)
            print(error, file=sys.stderr, flush=True)
        else:
            found.append(peer)
    return found, left_out


def commands(files: Files, into: Path, cores: list[int], *, has_bf16: bool) -> dict[str, str]:
    """Of each peer, as --server takes it. cores: those that compute."""
    openvino, llama = into / "openvino", into / "llama"
    precision = "bf16" if has_bf16 else "f32"
    kv_precision = "bf16" if has_bf16 else "f16"
    return {
        "llama": (
            f"{llama}/build/bin/llama-server -m {files.gguf} --port {{port}} -t {{threads}} "
            f"-np {_MAX_SEQS} -c {_LLAMA_CONTEXT}"
        ),
        "vllm": _vllm(into / "vllm", files.checkpoint, cores),
        # It finds zentorch in its environment.
        "zentorch": _vllm(into / "zentorch", files.checkpoint, cores),
        "openvino": (
            f"{openvino}/bin/python {_SERVER} {files.openvino} --port {{port}} "
            f"--threads {{threads}} --precision {precision} --kv-precision {kv_precision} "
            f"--max-num-seqs {_MAX_SEQS} --cache-gb {_KV_GIB}"
        ),
    }


def _vllm(home: Path, model: Path, cores: list[int]) -> str:
    listed = ",".join(map(str, cores))
    # Without a list, vLLM leaves one core to its scheduler, and every second thread of a core.
    bound = f"VLLM_CPU_OMP_THREADS_BIND={listed} LD_PRELOAD={home}/lib/libiomp5.so"
    # Not `vllm serve`, which asks for the version of a package `vllm`; this one is `vllm-cpu`.
    return (
        f"env {_QUIET} {bound} VLLM_CACHE_ROOT={home}/cache {home}/bin/python "
        f"-m vllm.entrypoints.openai.api_server --model {model} --host 127.0.0.1 "
        f"--port {{port}} --dtype bfloat16 --max-num-seqs {_MAX_SEQS} "
        f"--kv-cache-memory-bytes {_KV_GIB * 2**30} --enable-prefix-caching "
        "--enable-prompt-tokens-details"
    )


def comparison(
    name: str, into: Path, peers: list[str], threads: int, weights: str, more: list[str]
) -> list[str]:
    """The command line of `tests.bench.in_turns`. peers: those whose files are made."""
    files = file_names(name, into, weights)
    cores = sorted(os.sched_getaffinity(0))[:threads]
    servers = commands(files, into, cores, has_bf16=has_bf16())
    flags = ["--model", str(files.model), "--threads", str(threads)]
    flags += ["--ready-timeout", str(_READY_S)]
    own = f"{sys.executable} -m penstock serve %s --port {{port}} --num-threads {{threads}}"
    own += f" {_PLAIN}"
    quantized = "" if weights == "bf16" else f" --quantization {weights}"
    flags += ["--server", f"{PENSTOCK}={own % '{model}'}{quantized}"]
    if quantized and not {*_TAKE_CHECKPOINTS}.isdisjoint(peers):
        flags += ["--server", f"{FROM_CHECKPOINT}={own % files.checkpoint}"]
    for peer in peers:
        flags += ["--server", f"{peer}={servers[peer]}"]
    return ["tests.bench.in_turns", *flags, *more]


def has_bf16(cpuinfo: Path = Path("/proc/cpuinfo")) -> bool:
    """Whether the processor multiplies bfloat16: elsewhere OpenVINO computes in float32."""
    words = cpuinfo.read_text(encoding="utf-8").split()
    return not {"avx512_bf16", "amx_bf16", "bf16"}.isdisjoint(words)


def vllm_has_int4(cpuinfo: Path = Path("/proc/cpuinfo")) -> bool:
    """Its library for AVX2 (`_C_AVX2`) has no `cpu_gemm_wna16`, which all its formats end in."""
    words = {*cpuinfo.read_text(encoding="utf-8").split()}
    return "avx2" not in words or {"avx512f", "avx512bw", "avx512dq", "avx512vl"} <= words
