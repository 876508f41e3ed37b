"""Every kernel against its reference, then against what the device can move or multiply.

They are timed as in serving: one after another in a graph, where ours may overlap
(`penstock.engine.kernels.launch`).
"""

import math
import sys
import traceback
from itertools import islice
from pathlib import Path

import torch

from penstock.scheduler.errors import InvalidConfig
from tests.bench.engine.attention_cases import decode_attention, prefill_attention
from tests.bench.engine.case import Bench, Case, MakeCases
from tests.bench.engine.coded_cases import coded
from tests.bench.engine.delta_net_cases import delta_net
from tests.bench.engine.expert_cases import experts
from tests.bench.engine.kv_write_cases import kv_write
from tests.bench.engine.linear_cases import linear
from tests.bench.engine.sampling_cases import sampling
from tests.bench.engine.small_cases import small
from tests.bench.engine.table_cases import tables
from tests.bench.engine.timing import report, seconds_per_call, tolerance

# By importance: if time runs out, the last ones are missing.
GROUPS: dict[str, MakeCases] = {
    "decode-attention": decode_attention,
    "prefill-attention": prefill_attention,
    "linear": linear,
    "coded": coded,
    "delta-net": delta_net,
    "experts": experts,
    "small": small,
    "kv-write": kv_write,
    "sampling": sampling,
    "tables": tables,
}


def measure_kernels(
    groups: list[str], tiny: bool, flash_attn_3: Path | None, num_cases: int | None = None
) -> None:
    """num_cases: of each group, the first; None means all."""
    for group in groups:
        if group not in GROUPS:
            raise InvalidConfig(f"there are no kernels {group!r}; choose from {', '.join(GROUPS)}")
    bench = Bench(tiny=tiny, flash_attn_3=flash_attn_3)
    for group in groups or GROUPS:
        for make in islice(GROUPS[group](bench), num_cases):
            try:
                _measure(make(), group, bench)
            except Exception as error:
                traceback.print_exc(file=sys.stderr)
                message = f"{type(error).__name__}: {error}"
                report(part="kernel", group=group, failed=message[:2000])
                if bench.device.type == "cuda":
                    torch.cuda.synchronize()  # raises if the device is lost: stop
            if bench.device.type == "cuda":
                torch.cuda.empty_cache()


def _measure(case: Case, group: str, bench: Bench) -> None:
    error = case.error()
    seconds = seconds_per_call(case.calls)
    report(
        part="kernel",
        group=group,
        kernel=case.kernel,
        **case.at,
        dtype=str(bench.dtype).removeprefix("torch."),
        error=error if math.isfinite(error) else None,
        is_right=error < case.tolerances * tolerance(bench.dtype),
        us=seconds * 1e6,
        bytes_per_s=case.num_bytes / seconds,
        flops_per_s=case.flops / seconds,
        rivals={name: seconds_per_call(calls) * 1e6 for name, calls in case.rivals.items()},
        rival_errors={name: error() for name, error in case.rival_errors.items()},
    )
