"""What a slice of a tower takes, and its operations per second beside those of a plain product, in
one process and by turns:

    OMP_NUM_THREADS=1 python -m tests.bench.engine.towers [patches in a row] [blocks]

The tower has the widths of Qwen3-VL's largest, in bfloat16. Times are the process's own.
"""

import json
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from time import process_time
from types import SimpleNamespace
from typing import Any

import torch

from penstock.engine.config import LoadFormat
from penstock.engine.encoders.vision.families import TOWERS
from penstock.engine.files.json_file import CONFIG, Fields
from penstock.engine.loading.encoder import EncoderLoading
from penstock.engine.process.phases import Phases
from penstock.scheduler.types import Insert

_FAMILY, _MERGED, _PRODUCT = "qwen3_vl", 2, 1024
_VISION = {
    "hidden_size": 1152,
    "intermediate_size": 4304,
    "num_heads": 16,
    "out_hidden_size": 2048,
    "num_position_embeddings": 2304,
    "patch_size": 16,
    "deepstack_visual_indexes": [],
}


def _elapsed_s(run: Callable[[], object]) -> float:
    start = process_time()
    run()
    return process_time() - start


def main(side: int = 64, num_blocks: int = 1) -> None:
    with tempfile.TemporaryDirectory() as name:
        path = Path(name)
        config = {"model_type": _FAMILY, "vision_config": _VISION | {"depth": num_blocks}}
        (path / CONFIG).write_text(json.dumps(config))
        text: Any = SimpleNamespace(hidden_size=2048, attentions=[])
        outer, cpu = Fields.read(path / CONFIG), torch.device("cpu")
        loading = EncoderLoading(TOWERS[_FAMILY], outer, path, text, torch.bfloat16, cpu)
        tower = loading.load(LoadFormat.DUMMY, torch.get_num_threads(), Phases())
    num, num_bytes = side**2, tower.patch.weight.shape[1]
    content = bytes(torch.randint(0, 256, (num * num_bytes,), dtype=torch.uint8).numpy())
    grid, shape = (1, side // _MERGED, side // _MERGED), (num, num_bytes)
    insert = Insert(0, num // _MERGED**2, b"", grid, content, shape, (1, side, side))
    encoding = tower.begin(insert)
    left, right = torch.rand(2, _PRODUCT, _PRODUCT)
    slices: list[float] = []
    products: list[float] = []
    is_complete = False
    while not is_complete:
        start = process_time()
        is_complete = encoding.run(0.0)
        slices.append(process_time() - start)
        if len(slices) % 20 == 1:
            products.append(_elapsed_s(lambda: torch.mm(left, right)))
    median, late = (sorted(slices)[int(len(slices) * share)] for share in (0.5, 0.99))
    rate = tower.info.operations(num) / sum(slices)
    plain = 2 * _PRODUCT**3 / sorted(products)[len(products) // 2]
    print(
        f"{num} patches, {num_blocks} blocks: {len(slices)} slices of {1e3 * median:.1f} ms "
        f"(median), {1e3 * late:.1f} ms (99%); {rate / 1e9:.0f} GFLOP/s beside {plain / 1e9:.0f}: "
        f"{rate / plain:.2f}"
    )


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
