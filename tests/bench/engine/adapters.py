"""What LoRA adapters cost a CPU: steps of 8 decodes of a 135M shape, without adapters, with
--enable-lora but none in the step, and with 8 different ones of rank 16 on all linear layers.

    python -m tests.bench.engine.adapters [--threads 2] [--rounds 5]
"""

import argparse
import json
import statistics
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

from penstock.engine.config import (
    AdapterSource,
    Device,
    Dtype,
    EngineConfig,
    LoadFormat,
    LoraConfig,
)
from penstock.engine.executors.cpu import CpuExecutor
from penstock.engine.models.config import ModelConfig
from penstock.scheduler.config import SchedulerConfig
from penstock.scheduler.types import Request, RequestId, SamplingParams
from tests.bench.peers.models import SHAPES
from tests.support.adapters import LinearShapes, save_adapter
from tests.support.stepping import SteppedEngine

_STREAMS, _RANK = 8, 16


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--tokens", type=int, default=48)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        _measure(Path(folder), options)


def _measure(directory: Path, options: argparse.Namespace) -> None:
    (directory / "config.json").write_text(json.dumps(SHAPES["135m"]))
    plain, adapted = (_engine(directory, options.threads, lora) for lora in (None, LoraConfig()))
    assert isinstance(adapted.executor, CpuExecutor)
    ids: list[str | None] = []
    shapes = LinearShapes(ModelConfig.from_dir(directory))
    for seed in range(_STREAMS):
        path = save_adapter(shapes, directory / str(seed), rank=_RANK, seed=seed)
        source = AdapterSource(name=str(seed), path=str(path))
        ids.append(adapted.executor.adapters.load(source).result().id)
    none: list[str | None] = [None] * _STREAMS
    cases = {
        "without --enable-lora": (plain, none),
        "with it, no adapter in the step": (adapted, none),
        "one adapter": (adapted, ids[:1] * _STREAMS),
        f"{_STREAMS} adapters of rank {_RANK}": (adapted, ids),
    }
    times: dict[str, list[_Times]] = {name: [] for name in cases}
    for number in range(options.rounds + 1):
        for name, (engine, adapters) in cases.items():
            measured = _times(engine, adapters, options.tokens)
            if number:  # the first warms up
                times[name].append(measured)
    first = _median(times["without --enable-lora"])
    for name, each in times.items():
        wall_s, cpu_s = _median(each)
        rate = _STREAMS * options.tokens / wall_s
        print(
            f"{name:34} {rate:7.1f} tokens/s; of the first: {first.wall_s / wall_s:.3f}, by the "
            f"processor's time {first.cpu_s / cpu_s:.3f}"
        )


class _Times(NamedTuple):
    wall_s: float
    cpu_s: float


def _median(each: list[_Times]) -> _Times:
    return _Times(*map(statistics.median, zip(*each, strict=True)))


def _engine(directory: Path, threads: int, lora: LoraConfig | None) -> SteppedEngine:
    return SteppedEngine(
        EngineConfig(
            model=str(directory),
            device=Device.CPU,
            dtype=Dtype.BFLOAT16,
            load_format=LoadFormat.DUMMY,
            max_model_len=1024,
            kv_cache_memory_bytes=512 * 2**20,
            num_threads=threads,
            lora=lora,
            scheduler=SchedulerConfig(max_num_seqs=_STREAMS, enable_prefix_caching=False),
        )
    )


def _times(engine: SteppedEngine, adapters: list[str | None], num_tokens: int) -> _Times:
    """Of answers of so many tokens, to prompts of one."""
    sampling = SamplingParams(max_tokens=num_tokens, temperature=0.0)
    requests = [
        Request(
            id=RequestId(str(index)),
            prompt_token_ids=(5 + index,),
            sampling=sampling,
            arrival_s=0.0,
            adapter=adapter,
        )
        for index, adapter in enumerate(adapters)
    ]
    start_s, start_cpu_s = time.perf_counter(), time.process_time()
    engine.run(requests)
    return _Times(time.perf_counter() - start_s, time.process_time() - start_cpu_s)


if __name__ == "__main__":
    main()
