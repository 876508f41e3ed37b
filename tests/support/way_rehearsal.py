"""`python -m tests.support.way_rehearsal`: a start in each way on `tests.support.pretend_gpu`.

Prints one JSON object for each: the way that the engine says, how many graphs it has, how many
kernels of ours were launched, and how many of these start early. Run it without TRITON_INTERPRET.
"""

import json
import tempfile
from pathlib import Path
from typing import Any

from penstock.engine.config import Device, EngineConfig, GpuWay, LoadFormat
from penstock.engine.kernels.launch import device_overlaps
from penstock.engine.loading.devices import choose_device
from penstock.engine.loading.load import load_executor
from penstock.engine.process.phases import Phases
from penstock.scheduler.config import SchedulerConfig
from tests.support.cuda_rehearsal import MODELS, write_model
from tests.support.pretend_gpu import PretendGpu


def start(model: Path, gpu: PretendGpu, **changes: Any) -> dict[str, object]:
    settings: dict[str, Any] = {
        "model": str(model),
        "device": Device.CUDA,
        "load_format": LoadFormat.DUMMY,
        "num_threads": 1,
        "scheduler": SchedulerConfig(max_num_seqs=4, max_num_batched_tokens=64),
        "kv_cache_memory_bytes": 2**20,
        "block_size": 16,
    }
    config = EngineConfig(**(settings | changes))
    device_overlaps.cache_clear()  # of the GPU before
    executor = load_executor(config, model, None, choose_device(config.device), Phases())
    return {
        "way": executor.info.gpu_way,
        "graphs": len(gpu.graphs),
        "launches": len(gpu.launches),
        "early": sum("'launch_pdl': True" in launch.key for launch in gpu.launches),
    }


def main() -> None:
    changes: list[dict[str, Any]] = [
        *({"gpu_way": way} for way in GpuWay),
        {"enforce_eager": True, "gpu_way": GpuWay.GRAPHS},
    ]
    cases = [(PretendGpu(answer=65), each) for each in changes]
    ampere = PretendGpu(name="NVIDIA A100", capability=(8, 0), answer=65)
    for gpu, settings in (*cases, (ampere, {})):
        with gpu.installed(), tempfile.TemporaryDirectory() as directory:
            model = write_model(Path(directory), **MODELS["llama"])
            print(json.dumps(start(model, gpu, **settings)))


if __name__ == "__main__":
    main()
