"""The tests' own operators of Triton's interpreter give what its operators do."""

import itertools
import math
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

pytest.importorskip("triton", reason="Triton is not installed; pip install 'penstock[dev]'")

from triton.runtime import interpreter

from tests.support.interpreter_operators import _OPERATORS, _Quickly

pytestmark = pytest.mark.skipif(
    not hasattr(interpreter.interpreter_semantic, "make_tensor"),
    reason="operators of Triton before 3.7 give other types, and are kept",
)

core: Any = interpreter.tl.core
NAMES = [*_OPERATORS, "radd", "rsub", "rmul"]
TYPES = ["int1", "uint8", "int32", "int64", "uint32", "uint64"]
TYPES += ["float16", "bfloat16", "float32", "float64"]
SHAPES: list[tuple[int, ...]] = [(), (1,), (8,), (4, 8), (4, 1), (1, 8), (2, 4, 8)]
NUMBERS: list[float] = [0, 1, -1, 3, 300, 2**31 - 1, 2**31, -(2**31), 2**63, True]
NUMBERS += [0.0, -0.0, 1.5, 1e-40, 1e300, math.inf, math.nan]


def _tensor(dtype: Any, shape: tuple[int, ...], seed: int = 0) -> Any:
    kind = interpreter._get_np_dtype(dtype)
    values = np.random.default_rng(seed).integers(0, 100, shape or (1,)) - 50
    data = (values * (0.25 if kind.kind == "f" else 1)).astype(kind)
    made = core.block_type(dtype, list(shape)) if shape else dtype
    return core.tensor(interpreter.TensorHandle(data, dtype), made)


def _own(name: str) -> Callable[..., Any]:
    member = getattr(core.tensor, f"__{name}__")
    semantic = interpreter.interpreter_semantic
    return lambda *operands: member(*operands, _semantic=semantic)


def _outcome(operator: Callable[..., Any], *operands: Any) -> tuple[Any, ...]:
    """All that a kernel can know of a result, or the sort of the error."""
    try:
        with np.errstate(all="ignore"), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            result = operator(*operands)
    except Exception as error:
        return (type(error),)
    handle = result.handle
    return (
        str(result.type),
        result.dtype.name,
        [each.value for each in result.shape],
        result.numel.value,
        handle.dtype.name,
        handle.data.dtype,
        handle.data.shape,
        handle.data.tobytes(),
    )


def _operands() -> Iterator[tuple[Any, Any]]:
    types = [getattr(core, name) for name in TYPES]
    for one, other in itertools.product(types, types):
        yield _tensor(one, (4, 8)), _tensor(other, (4, 8), seed=1)
    for one, other in itertools.product(SHAPES, SHAPES):
        for dtype in (core.int32, core.float32):
            yield _tensor(dtype, one), _tensor(dtype, other, seed=1)
    for dtype, shape, number in itertools.product(types, [(), (8,)], NUMBERS):
        yield _tensor(dtype, shape), number
        yield _tensor(dtype, shape), core.constexpr(number)


@pytest.mark.parametrize("name", NAMES)
def test_an_operator_gives_what_the_interpreters_gives(name: str) -> None:
    own, slow_calls, num_calls = _own(name), 0, 0

    def slowly(*operands: Any) -> Any:
        nonlocal slow_calls
        slow_calls += 1
        return own(*operands)

    operator = _Quickly(interpreter).operator(name, slowly)
    for operands in _operands():
        num_calls += 1
        assert _outcome(operator, *operands) == _outcome(own, *operands), operands
    assert 0 < slow_calls < 0.9 * num_calls


def _pointers(dtype: Any, shape: tuple[int, ...]) -> Any:
    pointer = core.pointer_type(dtype)
    data = np.full(shape or (1,), 2**40, np.uint64)
    made = core.block_type(pointer, list(shape)) if shape else pointer
    return core.tensor(interpreter.TensorHandle(data, pointer), made)


@pytest.mark.parametrize("element", ["int1", "uint8", "float16", "float32", "int64"])
def test_pointers_advance_as_the_interpreters_do(element: str) -> None:
    own = _own("add")
    operator = _Quickly(interpreter).operator("add", own)
    for mine, other in itertools.product(SHAPES, SHAPES):
        for dtype in (core.int32, core.int64, core.uint32, core.float32):
            operands = _pointers(getattr(core, element), mine), _tensor(dtype, other)
            assert _outcome(operator, *operands) == _outcome(own, *operands), (mine, other)


@pytest.mark.parametrize("shape", SHAPES)
def test_dimensions_are_added_as_the_interpreters_are(shape: tuple[int, ...]) -> None:
    own = _own("getitem")
    operator = _Quickly(interpreter).operator("getitem", own)
    whole = slice(None)
    keys: list[Any] = [None, whole, *itertools.product([None, whole], repeat=2), (0, whole)]
    keys += [*itertools.product([None, whole], repeat=3), (slice(0, 1), None)]
    for key in keys:
        operands = _tensor(core.int32, shape), key
        assert _outcome(operator, *operands) == _outcome(own, *operands), key


def test_what_has_no_conversion_is_not_left_to_the_interpreter() -> None:
    def slowly(*operands: Any) -> Any:
        raise AssertionError(operands)

    quickly = _Quickly(interpreter)
    for name, dtype in itertools.product(("add", "lt", "rsub"), (core.int32, core.float16)):
        operator = quickly.operator(name, slowly)
        operator(_tensor(dtype, (4, 8)), 3)
        if name != "rsub":
            operator(_tensor(dtype, (4, 1)), _tensor(dtype, (1, 8)))
    quickly.operator("add", slowly)(_pointers(core.float16, ()), _tensor(core.int32, (4, 8)))
    quickly.operator("getitem", slowly)(_tensor(core.int32, (8,)), (slice(None), None))
