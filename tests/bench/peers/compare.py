"""The comparison of Penstock with its peers: how each is started, so that all do the same work.

All compute in bfloat16 where the processor can, have a KV cache of 16 bits, find shared prefixes in
it, and run up to 32 sequences at a time. Weights are in bfloat16, or in the same number of bits.
"""

import os
import sys
from dataclasses import dataclass
from pathlib import Path

from tests.bench.peers.models import SHAPES, write_gguf, write_model, write_openvino

_SERVER = Path(__file__).with_name("openvino_server.py")
_MAX_SEQS = 32
# llama-server divides its context by its slots.
_LLAMA_CONTEXT = _MAX_SEQS * 4096
_KV_GIB = 2
_READY_S = 1800  # vLLM compiles at its first start, for minutes even on a quiet machine
_QUIET = "HF_HUB_OFFLINE=1 VLLM_NO_USAGE_STATS=1"


# By --weights: the end of llama.cpp's file, and of OpenVINO's folder; what its exporter is told.
WEIGHTS = {
    "bf16": (".gguf", "openvino", ("fp16",)),
    "int8": ("-q8_0.gguf", "openvino-int8", ("int8",)),
    # Groups as llama.cpp's and ours. The default, 128, does not divide the rows of 135m.
    "int4": ("-q4_0.gguf", "openvino-int4", ("int4", "--group-size", "32")),
}


@dataclass(frozen=True, slots=True)
class Files:
    """One model, in the formats of all servers."""

    model: Path
    gguf: Path
    openvino: Path


def made_files(name: str, into: Path, peers: list[str], weights: str) -> Files:
    """Makes those of them that `peers` need and that do not exist. weights: of WEIGHTS."""
    folder = into / "models"
    gguf, openvino, exported = WEIGHTS[weights]
    files = Files(folder / name, folder / f"{name}{gguf}", folder / f"{name}-{openvino}")
    if not (files.model / "config.json").exists():
        print(f"making {files.model} ...", flush=True)
        write_model(SHAPES[name], files.model)
    if "llama" in peers and not files.gguf.exists():
        write_gguf(files.model, folder / f"{name}.gguf", into / "llama")
    if "openvino" in peers and not files.openvino.exists():
        write_openvino(files.model, files.openvino, into / "openvino", exported)
    return files


def commands(files: Files, into: Path, cores: list[int], *, has_bf16: bool) -> dict[str, str]:
    """Of each peer, as --server takes it. cores: those that compute."""
    vllm, openvino, llama = (into / name for name in ("vllm", "openvino", "llama"))
    listed = ",".join(map(str, cores))
    # Without a list, vLLM leaves one core to its scheduler, and every second thread of a core.
    bound = f"VLLM_CPU_OMP_THREADS_BIND={listed} LD_PRELOAD={vllm}/lib/libiomp5.so"
    precision = "bf16" if has_bf16 else "f32"
    kv_precision = "bf16" if has_bf16 else "f16"
    return {
        "llama": (
            f"{llama}/build/bin/llama-server -m {files.gguf} --port {{port}} -t {{threads}} "
            f"-np {_MAX_SEQS} -c {_LLAMA_CONTEXT}"
        ),
        # Not `vllm serve`, which asks for the version of a package `vllm`; this one is `vllm-cpu`.
        "vllm": (
            f"env {_QUIET} {bound} VLLM_CACHE_ROOT={vllm}/cache {vllm}/bin/python "
            "-m vllm.entrypoints.openai.api_server --model {model} --host 127.0.0.1 "
            f"--port {{port}} --dtype bfloat16 --max-num-seqs {_MAX_SEQS} "
            f"--kv-cache-memory-bytes {_KV_GIB * 2**30} --enable-prefix-caching"
        ),
        "openvino": (
            f"{openvino}/bin/python {_SERVER} {files.openvino} --port {{port}} "
            f"--threads {{threads}} --precision {precision} --kv-precision {kv_precision} "
            f"--max-num-seqs {_MAX_SEQS} --cache-gb {_KV_GIB}"
        ),
    }


def comparison(
    name: str, into: Path, peers: list[str], threads: int, weights: str, more: list[str]
) -> list[str]:
    """The command line of `tests.bench.in_turns`, after the files that it needs are made."""
    files = made_files(name, into, peers, weights)
    cores = sorted(os.sched_getaffinity(0))[:threads]
    servers = commands(files, into, cores, has_bf16=has_bf16())
    flags = ["--model", str(files.model), "--threads", str(threads)]
    flags += ["--ready-timeout", str(_READY_S)]
    if weights != "bf16":
        ours = f"{sys.executable} -m penstock serve {{model}} --port {{port}}"
        own = f"penstock={ours} --num-threads {{threads}} --quantization {weights}"
        flags += ["--server", own]
    for peer in peers:
        flags += ["--server", f"{peer}={servers[peer]}"]
    return ["tests.bench.in_turns", *flags, *more]


def has_bf16(cpuinfo: Path = Path("/proc/cpuinfo")) -> bool:
    """Whether the processor multiplies bfloat16: elsewhere OpenVINO computes in float32."""
    words = cpuinfo.read_text(encoding="utf-8").split()
    return not {"avx512_bf16", "amx_bf16", "bf16"}.isdisjoint(words)
