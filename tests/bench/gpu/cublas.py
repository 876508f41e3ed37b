"""How long a product in bfloat16 or FP8 takes on an H200, as others measured it.

cublas_h200.csv has microseconds of `torch.nn.functional.linear` and its like in three frameworks,
from the tables `gemm_perf` of the Python package aiconfigurator-core 0.12.0 (NVIDIA, Apache-2.0):
SGLang 0.5.14, TensorRT-LLM 1.3.0rc20, vLLM 0.24.0. Its collectors replay a CUDA graph of up to six
such products in a row, so a time includes the launch. No product adds to its output, or has a bias.

What to doubt, by the collectors' sources: vLLM's weights are memory as it comes, and a product of
equal bits takes less power (from 1,024 rows on vLLM's are mostly 2 to 8 % faster than the others',
whose weights are random); TensorRT-LLM's weights of more than 50 MB are read again and again, a
part of them from the cache. So no framework is taken alone. At 256 rows the median of an 8B layer's
products is TensorRT-LLM's to 1 %.

FP8 (fp8 in those tables) is a product with activations in FP8: in vLLM and SGLang by kernels of
CUTLASS, as that of torch is which we call (`_scaled_mm` with scales by row).
"""

import csv
from enum import Enum
from functools import cache
from pathlib import Path
from statistics import median

_FILE = Path(__file__).with_name("cublas_h200.csv")
_FRAMEWORKS = ("sglang", "trtllm", "vllm")


class Of(Enum):
    """Which of the frameworks' times."""

    MEDIAN = "the median"
    SLOWEST = "the slowest"


def product_us(rows: int, outputs: int, columns: int, of: Of, *, is_fp8: bool = False) -> float:
    """Of (rows, columns) by (columns, outputs): linear between the measured sizes.

    In proportion beyond the largest; below the smallest, the smallest's.
    """
    by_columns = {
        known: _between(
            outputs, {size: _between(rows, points) for size, points in by_outputs.items()}
        )
        for known, by_outputs in _measured(of, is_fp8).items()
    }
    return _between(columns, by_columns)


@cache
def _measured(of: Of, is_fp8: bool) -> dict[int, dict[int, dict[int, float]]]:
    """Microseconds by columns, outputs, rows."""
    found: dict[int, dict[int, dict[int, float]]] = {}
    end = "_fp8" if is_fp8 else ""
    choose = median if of is Of.MEDIAN else max
    with _FILE.open(encoding="utf-8", newline="") as lines:
        for line in csv.DictReader(lines):
            by_outputs = found.setdefault(int(line["columns"]), {})
            points = by_outputs.setdefault(int(line["outputs"]), {})
            points[int(line["rows"])] = choose([float(line[name + end]) for name in _FRAMEWORKS])
    return found


def _between(size: int, points: dict[int, float]) -> float:
    if size in points:
        return points[size]
    below = [known for known in points if known < size]
    above = [known for known in points if known > size]
    if not below:
        return points[min(above)]
    if not above:
        return points[max(below)] * size / max(below)
    low, high = max(below), min(above)
    return points[low] + (points[high] - points[low]) * (size - low) / (high - low)
