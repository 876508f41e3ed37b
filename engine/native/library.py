"""Chooses the C++ sources that a model needs, and loads the library that they make.

It is compiled when it is first needed (see `penstock.engine.native.compiler`). Without a compiler,
`load_library` logs a warning and returns None, and `engine/models/decoder/model.py` computes the
same in torch.
"""

import ctypes
import functools
import itertools
import logging
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path

import torch

from penstock.engine.models.layers.weight_formats import (
    FP8_FORMAT,
    LEVELS_FORMAT,
    block_format,
    integer_format,
)
from penstock.engine.native import compiler
from penstock.engine.native.compiler import Source

logger = logging.getLogger(__name__)

_WEIGHTS = {torch.float32: "float", torch.bfloat16: "bf16", torch.float16: "f16"}
# The formats of weights that the C++ multiplies as codes, by the source that does so: in the order
# of `Formats` (products/formats.h), which counts them from 1.
_FORMATS_BY_SOURCE = {
    "grouped": (
        *(
            integer_format(bits, is_symmetric=symmetric)
            for bits in (8, 4)
            for symmetric in (True, False)
        ),
        LEVELS_FORMAT,
    ),
    "blocks": (
        block_format(4, has_minima=False),
        block_format(4, has_minima=True),
        block_format(5, has_minima=False),
        block_format(5, has_minima=True),
        block_format(6, has_minima=False),
    ),
    "fp8": (FP8_FORMAT,),
}
CODE_FORMATS = tuple(itertools.chain.from_iterable(_FORMATS_BY_SOURCE.values()))


def format_number(weight_format: str) -> int:
    """Returns the `Linear::format` of structs.h; 0 where the weights are plain."""
    sources = enumerate(_FORMATS_BY_SOURCE.values(), 1)
    return next((number for number, each in sources if weight_format in each), 0)


@functools.cache
def load_library(
    dtype: torch.dtype, formats: frozenset[str] = frozenset(), has_coded_kv: bool = False
) -> ctypes.CDLL | None:
    """Returns the library for weights of this type, or None if it cannot be compiled; then it logs
    why.

    formats: of weights; those of `CODE_FORMATS` are compiled besides plain ones. has_coded_kv:
    whether keys and values are of 8 bits.
    """
    weights = f"-DPENSTOCK_WEIGHTS={_WEIGHTS[dtype]}"
    # With float32, activations are not rounded.
    activations = "-DPENSTOCK_FLOAT32" if dtype is torch.float32 else ""
    coded = [name for name in ("grouped", "blocks") if formats & {*_FORMATS_BY_SOURCE[name]}]
    # They are compiled at the same time; those that take longest come first.
    sources = [
        Source("native/step/step"),
        Source("native/attention/attention", "-DPENSTOCK_CODED_KV" if has_coded_kv else weights),
        *(Source(f"native/products/{name}", activations) for name in coded),
        Source("native/products/plain", weights),
        *([Source("native/products/fp8", weights)] if FP8_FORMAT in formats else []),
    ]
    try:
        return _load(sources)
    except (OSError, subprocess.SubprocessError) as error:
        logger.warning(
            "the CPU step could not be compiled, so torch's operators are used instead, which are "
            "slower for small batches; install g++ to fix it (%s)",
            getattr(error, "stderr", None) or error,
        )
        return None


@functools.cache
def load_ranks_library() -> ctypes.CDLL:
    """Loads the collectives of `ranks.cpp`, and `links.cpp`. Raises OSError, or SubprocessError of
    the compiler."""
    return _load([Source("native/ranks/ranks"), Source("native/ranks/links")])


def _load(sources: Sequence[Source]) -> ctypes.CDLL:
    try:
        return ctypes.CDLL(str(compiler.compiled(compiler.cache_directory(), sources)))
    except OSError as error:
        logger.info(
            "the CPU step is compiled at every start, because it cannot be cached: %s", error
        )
    with tempfile.TemporaryDirectory() as directory:  # a loaded library outlives its file
        return ctypes.CDLL(str(compiler.compiled(Path(directory), sources)))
