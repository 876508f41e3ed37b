"""Operators of Triton's interpreter for operands that need no conversion, which most have.

They compute what its own do, by the same function of NumPy on the same arrays: those find out again
at each operation which types meet, write a number to as many elements as the other operand has, and
copy what is broadcast. All other operands are left to them.
"""

import inspect
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

_SIGNED = ("int32", "int64")
_INTEGERS = (*_SIGNED, "uint32", "uint64")
_FLOATS = ("fp16", "fp32", "fp64")
_NUMPY_NAMES = {"fp16": "float16", "fp32": "float32", "fp64": "float64"}
_NUMPY_TYPES = {name: np.dtype(_NUMPY_NAMES.get(name, name)) for name in (*_INTEGERS, *_FLOATS)}
_WHOLE = slice(None)
_MOST = 2**31  # what an integer that all types take is below


class _Operator(NamedTuple):
    """types: of both operands. gives_bool: whether the result is of int1."""

    function: np.ufunc
    types: tuple[str, ...]
    gives_bool: bool = False


_NUMBERS = (*_INTEGERS, *_FLOATS)
_OPERATORS = {
    "add": _Operator(np.add, _NUMBERS),
    "sub": _Operator(np.subtract, _NUMBERS),
    "mul": _Operator(np.multiply, _NUMBERS),
    "and": _Operator(np.bitwise_and, (*_INTEGERS, "int1")),
    "or": _Operator(np.bitwise_or, (*_INTEGERS, "int1")),
    "xor": _Operator(np.bitwise_xor, (*_INTEGERS, "int1")),
    "lt": _Operator(np.less, _NUMBERS, gives_bool=True),
    "le": _Operator(np.less_equal, _NUMBERS, gives_bool=True),
    "gt": _Operator(np.greater, _NUMBERS, gives_bool=True),
    "ge": _Operator(np.greater_equal, _NUMBERS, gives_bool=True),
    "eq": _Operator(np.equal, _NUMBERS, gives_bool=True),
    "ne": _Operator(np.not_equal, _NUMBERS, gives_bool=True),
}


def hasten_operators(interpreter: Any) -> None:
    """Lets the interpreter, which is given as its module, put these in the place of its own."""
    core, semantic = interpreter.tl.core, interpreter.interpreter_semantic
    quickly = _Quickly(interpreter)
    checks_semantic = core.builtin(lambda: None).__code__
    replaced: dict[int, list[tuple[str, Any]]] = {}

    def replacement(package: Any, name: str, member: Any) -> Callable[..., Any]:
        function = member.__wrapped__ if member.__code__ is checks_semantic else member

        def call(*args: Any, **kwargs: Any) -> Any:
            kwargs["_semantic"] = semantic
            return function(*args, **kwargs)

        is_operator = package is core.tensor and name.startswith("__")
        return quickly.operator(name.strip("_"), call) if is_operator else call

    def patch_builtin(package: Any, builder: Any, scope: Any) -> None:
        if id(package) not in replaced:  # of triton.language, which is there to the end
            replaced[id(package)] = [
                (name, replacement(package, name, member))
                for name, member in inspect.getmembers(package)
                if core.is_builtin(member)
            ]
        for name, member in replaced[id(package)]:
            scope.set_attr(package, name, member)

    interpreter._patch_builtin = patch_builtin


class _Quickly:
    def __init__(self, interpreter: Any) -> None:
        self._core, self._handle = interpreter.tl.core, interpreter.TensorHandle
        self._types: dict[tuple[str, tuple[int, ...]], Any] = {}
        self._constants: dict[tuple[int | float | str, str], np.ndarray] = {}

    def operator(self, name: str, slowly: Callable[..., Any]) -> Callable[..., Any]:
        """slowly: the interpreter's own."""
        if name in _OPERATORS:
            made = self._operator(*_OPERATORS[name], slowly)
            return self._with_pointers(made, slowly) if name == "add" else made
        if name.startswith("r") and name[1:] in ("add", "sub", "mul"):
            return self._operator(*_OPERATORS[name[1:]], slowly, is_reflected=True)
        return self._with_dimensions(slowly) if name == "getitem" else slowly

    def _operator(
        self,
        function: np.ufunc,
        types: tuple[str, ...],
        gives_bool: bool,
        slowly: Callable[..., Any],
        *,
        is_reflected: bool = False,
    ) -> Callable[..., Any]:
        constexpr, tensor, int1 = self._core.constexpr, self._core.tensor, self._core.int1

        def operate(left: Any, right: Any) -> Any:
            kind, name = type(right), left.dtype.name
            if name not in types or left.type.known_sizes is None:
                return slowly(left, right)
            number = right.value if kind is constexpr else right
            if kind is tensor:
                of_result = self._common_type(left, right) if right.dtype.name == name else None
                values = right.handle.data
            else:
                of_result, values = left.type, self._constant(number, name)
            mine = left.handle.data
            if of_result is None or values is None or mine.dtype != values.dtype:
                return slowly(left, right)
            if gives_bool:
                of_result = self._type(int1, of_result.known_sizes)
            data = function(values, mine) if is_reflected else function(mine, values)
            of_handle = left.dtype if is_reflected else left.handle.dtype.scalar
            return tensor(self._handle(data, of_handle), of_result)

        return operate

    def _with_pointers(
        self, add: Callable[..., Any], slowly: Callable[..., Any]
    ) -> Callable[..., Any]:
        tensor = self._core.tensor

        def add_pointers(left: Any, right: Any) -> Any:
            pointer = left.dtype
            if not pointer.is_ptr():
                return add(left, right)
            if (
                type(right) is not tensor
                or right.dtype.name not in _SIGNED
                or pointer.address_space != "global"
                or (of_result := self._common_type(left, right)) is None
            ):
                return slowly(left, right)
            handle = left.handle
            width = max(1, handle.get_element_ty().primitive_bitwidth // 8)
            data = handle.data + width * right.handle.data.astype(np.uint64)
            return tensor(self._handle(data, handle.dtype), of_result)

        return add_pointers

    def _with_dimensions(self, slowly: Callable[..., Any]) -> Callable[..., Any]:
        tensor = self._core.tensor

        def getitem(operand: Any, key: Any) -> Any:
            sizes = operand.type.known_sizes
            if (
                not sizes
                or type(key) is not tuple
                or key.count(_WHOLE) != len(sizes)
                or key.count(None) != len(key) - len(sizes)
            ):
                return slowly(operand, key)
            handle, left = operand.handle, iter(sizes)
            shape = tuple(1 if each is None else next(left) for each in key)
            made = self._handle(handle.data[key], handle.dtype.scalar)
            return tensor(made, self._type(operand.dtype, shape))

        return getitem

    def _common_type(self, left: Any, right: Any) -> Any:
        """Returns the type of elements of `left` in the shape of both; None for those that the
        interpreter refuses, or gives more dimensions."""
        mine, other = left.type.known_sizes, right.type.known_sizes
        if mine is None or other is None:
            return None
        if mine == other or not other:
            return left.type
        if not mine:
            return self._type(left.dtype, other)
        if len(mine) != len(other):
            return None
        pairs = list(zip(mine, other, strict=True))
        if not all(a == b or 1 in (a, b) for a, b in pairs):
            return None
        return self._type(left.dtype, tuple(map(max, mine, other)))

    def _type(self, dtype: Any, shape: tuple[int, ...]) -> Any:
        if not shape:
            return dtype
        key = dtype.name, shape
        if key not in self._types:
            self._types[key] = self._core.block_type(dtype, list(shape))
        return self._types[key]

    def _constant(self, number: Any, name: str) -> np.ndarray | None:
        """Returns it in an array of one element that nothing may change; None if it has not that
        type beside a tensor of it."""
        kind = type(number)
        if kind is int:
            least = 0 if name.startswith("uint") else -_MOST
            is_taken = name in _NUMPY_TYPES and least <= number < _MOST
        else:
            is_taken = kind is float and name in _FLOATS
        if not is_taken:
            return None
        key = (number or repr(number), name)  # two zeros are equal
        if key not in self._constants:
            array = np.array([number], _NUMPY_TYPES[name])
            array.flags.writeable = False
            self._constants[key] = array
        return self._constants[key]
