"""What the code of a GPU's step must not contain, since it would wait for the device."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.paths import ROOT

GPU_PATH = ("attention", "executors/cuda", "kernels", "memory", "models", "sampling")


def _is_number(value: ast.expr) -> bool:
    """A literal, or an infinity or a NaN by name."""
    if isinstance(value, ast.UnaryOp):
        return _is_number(value.operand)
    if isinstance(value, ast.Attribute):
        return value.attr in ("inf", "nan", "pi", "e")
    return isinstance(value, ast.Constant) and isinstance(value.value, int | float)


def _is_slice(index: ast.expr) -> bool:
    parts = index.elts if isinstance(index, ast.Tuple) else [index]
    return any(isinstance(part, ast.Slice) for part in parts) and all(
        isinstance(part, ast.Slice) or _is_number(part) for part in parts
    )


def numbers_assigned_by_index(source: str) -> Iterator[ast.stmt]:
    """`x[index] = 1`, but for slices, which torch fills without a copy.

    For an index of a tensor, and for a single element, it makes a tensor of the number on the host,
    and waits for its copy: see github.com/pytorch/pytorch/pull/188330.
    """
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Assign) and _is_number(node.value):
            for target in node.targets:
                if isinstance(target, ast.Subscript) and not _is_slice(target.slice):
                    yield node


def _files() -> list[Path]:
    folders = [ROOT / "engine" / folder for folder in GPU_PATH]
    return sorted(file for folder in folders for file in folder.rglob("*.py"))


def test_no_step_on_a_gpu_assigns_a_number_by_index() -> None:
    """Use `index_fill_`, or a slice. What is no literal is found by `tests.support.pretend_gpu`."""
    found = [
        f"{file.relative_to(ROOT)}:{node.lineno}: {ast.unparse(node)}"
        for file in _files()
        for node in numbers_assigned_by_index(file.read_text(encoding="utf-8"))
    ]
    assert found == []


@pytest.mark.parametrize(
    "line",
    [
        "seen[ids[:num_prompt]] = 1",
        "self._outside[tensor(allowed)] = False",
        "x[rows, 0] = -torch.inf",
        "x[0] = 0.5",
    ],
)
def test_a_number_that_is_assigned_by_index_is_found(line: str) -> None:
    assert [ast.unparse(node) for node in numbers_assigned_by_index(line)] == [line]


@pytest.mark.parametrize(
    "line", ["x[:3] = 0", "x[0, 1:] = 0.0", "x[index] = other", "x.index_fill_(0, index, 1)"]
)
def test_what_does_not_wait_is_allowed(line: str) -> None:
    assert list(numbers_assigned_by_index(line)) == []
