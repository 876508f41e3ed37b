"""The command line of `penstock.engine.sizing`.

python -m penstock.engine.sizing configs/models/Llama-3.1-8B --device H100 --memory-gb 80
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from penstock.engine.config import Dtype, KVCacheDtype, LoraConfig, Quantization
from penstock.engine.loading.devices import check_rounding_on_gpu
from penstock.engine.memory.dtypes import TORCH_DTYPES
from penstock.engine.memory.hardware import peak_bandwidth
from penstock.engine.models.config import ModelConfig
from penstock.engine.sizing.sizing import CONTEXTS, GB, Machine, Sizing, table
from penstock.scheduler.errors import InvalidConfig, PenstockError


def main(argv: Sequence[str]) -> int:
    options = _parser().parse_args(argv)
    try:
        dtype = TORCH_DTYPES[Dtype(options.dtype)]
        quantization = Quantization(options.quantization) if options.quantization else None
        kv_cache_dtype = KVCacheDtype(options.kv_cache_dtype)
        model = ModelConfig.from_dir(options.model)
        check_rounding_on_gpu(model, quantization)
        lora = None
        if options.enable_lora:
            lora = LoraConfig(max_loras=options.max_loras, max_rank=options.max_lora_rank)
        sizing = Sizing(model, _machine(options), dtype, quantization, kv_cache_dtype, lora)
    except PenstockError as error:
        print(f"penstock: error: {error}", file=sys.stderr)
        return 2
    print(table([sizing], [options.model.name], options.context), end="")
    max_len = sizing.model.max_model_len
    if sizing.model.experts is not None:
        print(_experts_line(sizing))
    if lora is not None:
        print(
            f"{lora.max_loras} LoRA adapters of rank {lora.max_rank}: "
            f"{sizing.adapter_bytes / GB:.2f} GB"
        )
    print(
        f"one sequence of {max_len:,} tokens, the model's longest: "
        f"{sizing.bytes_of_one(max_len) / GB:.1f} GB of the KV cache\n"
        f"one more of --max-num-seqs at that length: {sizing.slot_bytes(max_len) / 1e6:.2f} MB"
    )
    if options.tpot_ms:
        for context in options.context:
            num = sizing.num_within(options.tpot_ms / 1e3, context, options.mbu)
            fit = min(num, sizing.num_sequences(context))
            print(
                f"TPOT {options.tpot_ms:g} ms at MBU {options.mbu:g}, {context:,} tokens each: "
                f"{fit:,} together"
            )
    return 0


def _experts_line(sizing: Sizing) -> str:
    """Tells what batching costs a mixture that it does not cost a dense model."""
    read = ", ".join(
        f"{(sizing.step_weight_bytes + sizing.routed_bytes(num)) / GB:.1f} GB with {num}"
        for num in (1, 4, 16, 64)
    )
    return f"weights that a decode step reads, if all experts are equally likely: {read} sequences"


def _machine(options: argparse.Namespace) -> Machine:
    """Raises InvalidConfig."""
    if options.memory_gb <= 0 or not 0 < options.gpu_memory_utilization <= 1:
        raise InvalidConfig(
            "--memory-gb must be positive, and --gpu-memory-utilization a share from 0 to 1"
        )
    if any(context < 1 for context in options.context):
        raise InvalidConfig("--context must be at least 1")
    if not 0 < options.mbu <= 1 or (options.tpot_ms is not None and options.tpot_ms <= 0):
        raise InvalidConfig("--mbu must be from 0 to 1, and --tpot-ms positive")
    if options.tpot_ms and not peak_bandwidth(options.device):
        raise InvalidConfig(
            f"--tpot-ms needs the bandwidth of --device {options.device}, which is not in "
            "configs/hardware.toml; add it there"
        )
    return Machine(
        name=options.device,
        memory_bytes=int(options.memory_gb * GB),
        utilization=options.gpu_memory_utilization,
    )


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m penstock.engine.sizing",
        description="How many sequences of a model fit a GPU, and what TPOT they have at best.",
    )
    flag = parser.add_argument
    flag("model", type=Path, help="a directory with a config.json, as configs/models/Qwen3-8B")
    flag("--device", default="H200", help="as in configs/hardware.toml (default: %(default)s)")
    flag("--memory-gb", type=float, default=141, metavar="GB", help="(default: %(default)s)")
    flag("--dtype", choices=list(TORCH_DTYPES), default=Dtype.BFLOAT16,
         help="the server's flag (default: %(default)s)")  # fmt: skip
    flag("--quantization", choices=list(Quantization),
         help="the server's flag (default: none)")  # fmt: skip
    flag("--kv-cache-dtype", choices=list(KVCacheDtype), default=KVCacheDtype.AUTO,
         help="the server's flag (default: %(default)s)")  # fmt: skip
    flag("--enable-lora", action="store_true", help="the server's flag (default: off)")
    flag("--max-loras", type=int, default=LoraConfig().max_loras, metavar="N",
         help="the server's flag (default: %(default)s)")  # fmt: skip
    flag("--max-lora-rank", type=int, default=LoraConfig().max_rank, metavar="RANK",
         help="the server's flag (default: %(default)s)")  # fmt: skip
    flag("--gpu-memory-utilization", type=float, default=0.9, metavar="SHARE",
         help="the server's flag (default: %(default)s)")  # fmt: skip
    flag("--context", type=int, nargs="+", default=CONTEXTS, metavar="TOKENS",
         help="of one sequence, prompt and output (default: 2048 8192 32768)")  # fmt: skip
    flag(
        "--tpot-ms",
        type=float,
        metavar="MS",
        help="also print how many sequences meet this TPOT (default: none)",
    )
    flag("--mbu", type=float, default=0.66, metavar="SHARE",
         help="of the peak bandwidth that decode steps reach, for --tpot-ms; /metrics reports a "
         "server's own (default: %(default)s)")  # fmt: skip
    return parser


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
