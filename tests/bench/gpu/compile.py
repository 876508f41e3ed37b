"""`python -m tests.bench.gpu.compile WHAT... [--share K/N]`: fills Triton's cache on all cores.

Compiles what the parts of the suite will launch, without launching it: each of N processes takes
every Nth kernel, and of `tests` every Nth file. Without a GPU it compiles for Hopper, which shows
what compiles and how long it takes. A kernel that it misses is compiled when it is first launched,
a second or two later. `make gpu-cache` compiles all of it without a GPU, for `make gpu-bundle`.
"""

import argparse
import json
import os
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from triton.backends.compiler import GPUTarget
from triton.runtime import driver

from penstock.engine.kernels.launch import overlap, overlapped
from penstock.engine.kernels.sample.sampler import Mode
from tests.bench.engine.linear_tiles import meta_launches
from tests.bench.engine.models import model_fields
from tests.bench.engine.timing import report
from tests.bench.gpu import triton_cache
from tests.bench.gpu.goals import LLAMA, QWEN, SMALL
from tests.bench.gpu.kernel_tests import FILES
from tests.support.compile_kernels import NUM_SMS, Launch, MetaModel, recorded

if TYPE_CHECKING:
    from tests.bench.gpu.recorded_tests import Recorded

WHAT = ("probe", "models", "tiles", "tests")
_OF_KERNELS = ("tests/engine/kernels/", "tests/engine/attention/")
# Rows of a step, which decide between kernels: few, at most 16, and many. And a chunk beside them.
_STEPS = ((1, 0), (16, 0), (256, 0), (0, 512), (7, 1024))


class HopperDriver:
    """For Triton, where there is no GPU."""

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


def launches(what: str) -> Iterator[Launch]:
    """May have a kernel more than once."""
    if what == "probe":
        for enabled in sorted({False, overlapped()["PDL"]}):  # its rungs try both
            with overlap(enabled):
                yield from _of_model(LLAMA, num_layers=2, max_rows=18, max_tokens=256)
                yield from _of_model(LLAMA, num_layers=2, max_rows=16, max_tokens=512)
    elif what == "models":
        for model in (LLAMA, SMALL, QWEN):
            for max_rows in (256, 512):
                yield from _of_model(model, num_layers=1, max_rows=max_rows, max_tokens=8192)
    else:
        with recorded() as found:
            for call in meta_launches(LLAMA):
                call()
        yield from found


def _of_model(model: str, num_layers: int, max_rows: int, max_tokens: int) -> Iterator[Launch]:
    num_sms = NUM_SMS
    if torch.cuda.is_available():
        num_sms = torch.cuda.get_device_properties(0).multi_processor_count
    with tempfile.TemporaryDirectory() as directory:
        fields = model_fields(model, tiny=False) | {"num_hidden_layers": num_layers}
        Path(directory, "config.json").write_text(json.dumps(fields), encoding="utf-8")
        meta = MetaModel(Path(directory), max_rows=max_rows, max_tokens=max_tokens, num_sms=num_sms)
    for mode in Mode:
        yield from meta.sampling_launches(mode)
    for num_decodes, chunk in _STEPS:
        if num_decodes <= max_rows and num_decodes + chunk <= max_tokens:
            yield from meta.launches(num_decodes, chunk)


def _chosen(
    what: list[str], share: int, num_shares: int, most: int | None
) -> "Iterator[Launch | Recorded]":
    """What one of num_shares processes compiles."""
    # Where there is no GPU, with PDL, as on a Hopper.
    enabled = overlapped()["PDL"] or not torch.cuda.is_available()
    with overlap(enabled):
        found = (launch for kind in what if kind != "tests" for launch in launches(kind))
        unique = {launch.key: launch for launch in found}
    yield from list(unique.values())[share:most:num_shares]
    if "tests" in what:
        from tests.bench.gpu.recorded_tests import launches_of

        # The others load models, whose numbers the stand-in for a GPU has not.
        files = [file.name for file in FILES if file.name.startswith(_OF_KERNELS)]
        for name in files[share:most:num_shares]:
            yield from launches_of(name)


def compile_share(what: list[str], share: int, num_shares: int, most: int | None) -> None:
    if not torch.cuda.is_available():
        driver.set_active(HopperDriver())
    for launch in _chosen(what, share, num_shares, most):
        started_s = time.perf_counter()
        try:
            launch.warm_up()
        except Exception as error:
            traceback.print_exc(file=sys.stderr)
            message = f"{type(error).__name__}: {error}"[:500]
            report(part="compile", kernel=launch.name, failed=message)
            continue
        report(part="compile", kernel=launch.name, seconds=time.perf_counter() - started_s)


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.bench.gpu.compile")
    parser.add_argument("what", nargs="+", choices=WHAT)
    parser.add_argument("--share", default="0/1", metavar="K/N")
    parser.add_argument("--most", type=int, metavar="N", help="the first N kernels alone")
    parser.add_argument(
        "--pack", type=Path, metavar="FILE", help="what TRITON_CACHE_DIR has then, for a bundle"
    )
    args = parser.parse_args(argv)
    if "tests" in args.what and torch.cuda.is_available():
        parser.error("tests: only where there is no GPU, as they run on a stand-in of one")
    share, num_shares = map(int, args.share.split("/"))
    compile_share(args.what, share, num_shares, args.most)  # rows say what failed
    if args.pack and not triton_cache.pack(Path(os.environ["TRITON_CACHE_DIR"]), args.pack):
        print("what was compiled is too large to be packed", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
