"""Triton's interpreter without the work that it repeats, which was half of the time of its tests.

At each launch it replaces the functions of `triton.language` by its own, and again at each call of
a function inside of a kernel, where they are replaced already. Each operation makes the types of
its result anew, with the same few shapes, and whether integers overflow is computed for an
assertion that is off. A version of Triton that has another shape keeps all.
"""

import sys
from types import ModuleType
from typing import Any

from tests.support.interpreter_operators import hasten_operators


def hasten_interpreter() -> None:
    """Does nothing where Triton's interpreter has not been imported, nor a second time."""
    interpreter = sys.modules.get("triton.runtime.interpreter")
    names = ("_patch_lang", "_LangPatchScope", "_patch_builtin", "_get_np_dtype")
    if interpreter is None or hasattr(interpreter, "is_hastened"):
        return
    if all(hasattr(interpreter, name) for name in names):
        interpreter.is_hastened = True  # type: ignore[attr-defined]
        if hasattr(interpreter.interpreter_semantic, "make_tensor"):  # since 3.7
            hasten_operators(interpreter)
        _patch_once(interpreter)
        _unwrap_quickly(interpreter.tl.core)
        _remember_numpy_types(interpreter)
        _remember_block_types(interpreter.tl.core)
        semantic = sys.modules["triton.language.semantic"].TritonSemantic
        _broadcast_quickly(semantic, interpreter.tl.core)
        _check_no_overflow_in_vain(semantic)
        _remember_computation_types(semantic)


def _patch_once(interpreter: Any) -> None:
    patch_lang, scope_class = interpreter._patch_lang, interpreter._LangPatchScope
    modules = (interpreter.tl, interpreter.tl.core)
    patched: set[str] = set()
    languages_of: dict[int, frozenset[str]] = {}

    class Scope(scope_class):  # type: ignore[misc, valid-type]
        languages: frozenset[str] = frozenset()

        def restore(self) -> None:
            super().restore()
            patched.difference_update(self.languages)

    def patch(fn: Any) -> Any:
        languages = languages_of.get(id(fn.__globals__))  # of a module, which is there to the end
        if languages is None:
            found = [each for each in modules if any(each is v for v in fn.__globals__.values())]
            languages = frozenset(each.__name__ for each in found)
            languages_of[id(fn.__globals__)] = languages
        if languages and languages <= patched:
            return Scope()
        scope = patch_lang(fn)
        scope.languages = languages - patched
        patched.update(languages)
        return scope

    interpreter._LangPatchScope, interpreter._patch_lang = Scope, patch


def _unwrap_quickly(core: Any) -> None:
    """What is unwrapped is seldom a constexpr, and seldomer a tuple of some."""
    unwrap, bare = core._unwrap_if_constexpr, {core.tensor, core.dtype, int, float, bool, str}
    bare |= {core.block_type, core.pointer_type, type(None)}

    def unwrapped(value: Any) -> Any:
        return value if type(value) in bare else unwrap(value)

    core._unwrap_if_constexpr = unwrapped


def _remember_computation_types(semantic: Any) -> None:
    find = semantic.computation_type_impl
    types: dict[tuple[Any, ...], Any] = {}

    def computation_type_impl(self: Any, a: Any, *rest: Any) -> Any:
        key = (a.name, rest[0], rest[1].name, *rest[2:])
        if key not in types:
            types[key] = find(self, a, *rest)
        return types[key]

    semantic.computation_type_impl = computation_type_impl


def _remember_numpy_types(interpreter: Any) -> None:
    language, find = interpreter.tl, interpreter._get_np_dtype
    types: dict[str, Any] = {}

    def numpy_type(dtype: Any) -> Any:
        scalar = dtype.element_ty if isinstance(dtype, language.block_type) else dtype
        key = "pointer" if isinstance(scalar, language.pointer_type) else scalar.name
        if key not in types:
            types[key] = find(dtype)
        return types[key]

    interpreter._get_np_dtype = numpy_type


def _remember_block_types(core: ModuleType) -> None:
    make_block, make_tensor = core.block_type.__init__, core.tensor.__init__
    attributes: dict[tuple[Any, ...], dict[str, Any]] = {}

    def block_init(self: Any, element_ty: Any, shape: Any) -> None:
        sizes = tuple(getattr(size, "value", size) for size in shape)
        key = (element_ty.name, getattr(element_ty, "const", None), sizes)
        if key not in attributes:
            make_block(self, element_ty, shape)
            self.known_sizes = sizes
            attributes[key] = self.__dict__
        else:
            self.__dict__.update(attributes[key])

    def tensor_init(self: Any, handle: Any, type: Any) -> None:
        known = type.__dict__.get("known_shape")
        if known is None:
            make_tensor(self, handle, type)
            type.known_shape = self.shape, self.numel
        else:
            self.handle, self.type, self.dtype = handle, type, type.scalar
            self.shape, self.numel = known

    core.block_type.__init__, core.tensor.__init__ = block_init, tensor_init
    core.dtype.known_sizes, core.block_type.known_sizes = (), None  # None: made before this


def _broadcast_quickly(semantic: Any, core: Any) -> None:
    """Most operands have one shape, or one of each rank."""
    broadcast = semantic.broadcast_impl_value

    def widened(self: Any, operand: Any, sizes: tuple[int, ...]) -> Any:
        if operand.type.known_sizes == sizes:
            return operand
        handle = self.builder.create_broadcast(operand.handle, sizes)
        return core.tensor(handle, core.block_type(operand.type.scalar, list(sizes)))

    def broadcast_impl_value(self: Any, lhs: Any, rhs: Any) -> Any:
        left = lhs.type.__dict__.get("known_sizes", ())
        right = rhs.type.__dict__.get("known_sizes", ())
        if left == right and (left or not (lhs.type.is_block() or rhs.type.is_block())):
            return lhs, rhs
        pairs = list(zip(left, right, strict=False)) if len(left) == len(right) else []
        if pairs and all(a == b or 1 in (a, b) for a, b in pairs):
            sizes = tuple(map(max, left, right))
            return widened(self, lhs, sizes), widened(self, rhs, sizes)
        return broadcast(self, lhs, rhs)

    semantic.broadcast_impl_value = broadcast_impl_value


def _check_no_overflow_in_vain(semantic: Any) -> None:
    """The eight operations of the check end in an assertion, which needs debug."""
    check = semantic.binary_op_sanitize_overflow_impl

    def binary_op_sanitize_overflow_impl(self: Any, *operands: Any) -> None:
        if self.builder.options.debug:
            check(self, *operands)

    semantic.binary_op_sanitize_overflow_impl = binary_op_sanitize_overflow_impl
