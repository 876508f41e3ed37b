"""The command line of `tests.bench.engine`. A part is imported when it runs."""

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from penstock.engine.config import AttentionBackend, Dtype, Quantization
from penstock.scheduler.errors import InvalidConfig, PenstockError
from tests.support.interpreter import hasten_interpreter


def main(argv: Sequence[str]) -> int:
    args = _parser().parse_args(argv)
    try:
        _run(args)
    except PenstockError as error:
        print(f"tests.bench.engine: {error}", file=sys.stderr)
        return 1
    return 0


def _run(args: argparse.Namespace) -> None:
    import torch

    if args.part == "cpu-decode":
        from tests.bench.engine.cpu_decode import cpu_decode

        torch.set_num_threads(args.threads)
        cpu_decode(args.dtype, args.threads, args.num_seqs, args.rounds, args.steps)
        return
    if args.part == "all-reduce":
        from tests.bench.engine.all_reduce import all_reduce

        all_reduce(args.rounds)
        return
    if args.part == "cpu-prefill":
        from tests.bench.engine.cpu_prefill import cpu_prefill

        torch.set_num_threads(args.threads)
        cpu_prefill(args.dtype, args.threads, args.num_rows, args.rounds)
        return
    if args.part == "cpu-delta-nets":
        from tests.bench.engine.cpu_delta_nets import cpu_delta_nets

        torch.set_num_threads(args.threads)
        sizes = (args.num_rows, args.rounds, args.steps)
        cpu_delta_nets(args.dtype, args.threads, *sizes, has_torch=args.torch)
        return
    if not torch.cuda.is_available():
        if not args.tiny:
            raise InvalidConfig(
                "torch finds no GPU here; --tiny runs the same code on the CPU, in small"
            )
        # Before a kernel is imported: Triton then runs it in its interpreter.
        os.environ["TRITON_INTERPRET"] = "1"
        import triton.runtime.interpreter  # noqa: F401

        hasten_interpreter()
    if args.enforce_eager:
        from tests.bench.engine.timing import time_without_graphs

        time_without_graphs()
    if args.part == "device":
        from tests.bench.engine.device import measure_device

        measure_device(args.tiny)
    elif args.part == "kernels":
        from tests.bench.engine.kernels import measure_kernels

        measure_kernels(args.groups, args.tiny, args.flash_attn_3, args.first)
    elif args.part == "steps":
        from tests.bench.engine.steps import Points, measure_steps

        points, codes = Points(args.points), args.quantization
        of_model = args.model, args.tiny, points, args.enforce_eager, codes
        measure_steps(*of_model, args.attention_backend)
    elif args.part == "offline":
        from tests.bench.engine.offline import measure_offline

        measure_offline(args.model, args.tiny, args.enforce_eager)
    elif args.part == "ranks":
        from penstock.engine.ranks.layout import RankLayout
        from tests.bench.engine.offline import measure_ranks

        layout = RankLayout(args.tensor_parallel_size, args.pipeline_parallel_size)
        measure_ranks(args.model, args.tiny, args.enforce_eager, layout)
    elif args.part == "offload":
        from tests.bench.engine.offload import measure_offload

        measure_offload(args.model, args.tiny, args.enforce_eager)
    elif args.part == "linear-tiles":
        from tests.bench.engine.linear_tiles import measure_linear_tiles

        measure_linear_tiles(args.tiny)
    elif args.part == "model-dir":
        from tests.bench.engine.models import write_model_dir

        write_model_dir(args.model, args.tiny, args.directory, with_weights=args.weights)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m tests.bench.engine")
    parts = parser.add_subparsers(dest="part", required=True)

    cpu = parts.add_parser("cpu-decode", help="a decode step on the CPU against its memory")
    cpu.add_argument("--threads", type=int, default=max(1, (os.cpu_count() or 2) - 1))
    cpu.add_argument("--dtype", type=Dtype, choices=list(Dtype), default=Dtype.BFLOAT16)
    cpu.add_argument("--num-seqs", type=int, default=1)
    cpu.add_argument("--rounds", type=int, default=7)
    cpu.add_argument("--steps", type=int, default=20, help="decode steps in a round")

    ranks = parts.add_parser("all-reduce", help="the sum of two ranks' tensors, against gloo")
    ranks.add_argument("--rounds", type=int, default=5)
    prefill = parts.add_parser("cpu-prefill", help="a prefill step on the CPU against oneDNN")
    prefill.add_argument("--threads", type=int, default=max(1, os.cpu_count() or 2))
    prefill.add_argument("--dtype", type=Dtype, choices=list(Dtype), default=Dtype.BFLOAT16)
    prefill.add_argument("--num-rows", type=int, default=512, help="tokens of the prompt")
    prefill.add_argument("--rounds", type=int, default=7)
    nets = parts.add_parser(
        "cpu-delta-nets", help="Qwen3.5 on the CPU against a Llama of as many bytes, and torch"
    )
    nets.add_argument("--threads", type=int, default=max(1, os.cpu_count() or 2))
    nets.add_argument("--dtype", type=Dtype, choices=list(Dtype), default=Dtype.BFLOAT16)
    nets.add_argument("--num-rows", type=int, default=256, help="tokens of the prompt")
    nets.add_argument("--rounds", type=int, default=7)
    nets.add_argument("--steps", type=int, default=20, help="decode steps in a round")
    nets.add_argument("--torch", action="store_true", help="torch too, which takes minutes")

    def add(name: str, text: str) -> argparse.ArgumentParser:
        part = parts.add_parser(name, help=text)
        part.add_argument("--tiny", action="store_true", help="the same code at toy sizes")
        part.add_argument("--enforce-eager", action="store_true", help="without CUDA graphs")
        return part

    add("device", "copy bandwidth and matrix rate, versions")
    kernels = add("kernels", "each kernel against its reference and the peak")
    kernels.add_argument("groups", nargs="*", help="default: all", default=[])
    kernels.add_argument("--first", type=int, metavar="N", help="cases of each group, not all")
    kernels.add_argument(
        "--flash-attn-3",
        type=Path,
        metavar="DIR",
        help="folder with _vllm_fa3_C.abi3.so and flash_attn_interface.py, to compare with",
    )
    add("linear-tiles", "tiles of the linear layers for few rows, against torch's product")
    steps = add("steps", "decode steps by batch and context, and the time to a first token")
    offline = add("offline", "256 requests of mixed lengths through scheduler and executor")
    of_ranks = add("ranks", "the same by several GPUs, where there are so many")
    of_ranks.add_argument("--tensor-parallel-size", type=int, default=1)
    of_ranks.add_argument("--pipeline-parallel-size", type=int, default=1)
    offload = add("offload", "blocks to the host's memory and back, and what a prefix there saves")
    for part in (steps, offline, of_ranks, offload):
        part.add_argument("model", help="a folder of configs/models")
    steps.add_argument(
        "--points",
        choices=("goals", "sweep", "overlap", "codes", "prefill", "drafts"),
        default="sweep",
        help="what is measured",
    )
    steps.add_argument(
        "--quantization", type=Quantization, choices=list(Quantization), help="of the weights"
    )
    steps.add_argument(
        "--attention-backend",
        type=AttentionBackend,
        choices=list(AttentionBackend),
        default=AttentionBackend.AUTO,
    )
    model_dir = add("model-dir", "writes a model's directory")
    model_dir.add_argument("model", help="a folder of configs/models")
    model_dir.add_argument("directory", type=Path)
    model_dir.add_argument("--weights", action="store_true", help="also write random safetensors")
    return parser


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
