"""Non-negative least squares in a few unknowns, from sums over the samples.

Each coordinate is minimised in turn, which for a non-negative problem converges to a solution
(Franc, Hlavac and Navara 2005, doi:10.1007/11556121_50). It does not mind columns that are
multiples of each other, and one sweep costs the same whatever the number of samples: so a fit that
goes on while a server runs does one a step.
"""

from collections.abc import Sequence
from operator import mul

_MAX_SWEEPS = 20_000
_PRECISION = 1e-10


class NormalEquations:
    """Sums of weighted samples (row, value): all that least squares needs of them."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._matrix = [[0.0] * size for _ in range(size)]
        self._vector = [0.0] * size

    def add(self, row: Sequence[float], value: float, weight: float) -> None:
        """Adds a sample. O(size^2)."""
        vector, matrix = self._vector, self._matrix
        for i, a in enumerate(row):
            if a:
                weighted = weight * a
                vector[i] += weighted * value
                # strict=True would take a third longer, and this runs once for each step served.
                matrix[i] = [b + weighted * c for b, c in zip(matrix[i], row)]  # noqa: B905

    def add_all(self, other: "NormalEquations") -> None:
        for i in range(self._size):
            self._vector[i] += other._vector[i]
            self._matrix[i] = [
                a + b for a, b in zip(self._matrix[i], other._matrix[i], strict=True)
            ]

    def fade(self, factor: float) -> None:
        """Earlier samples count less."""
        self._vector = [factor * a for a in self._vector]
        self._matrix = [[factor * a for a in row] for row in self._matrix]

    def sweep(self, solution: list[float]) -> float:
        """Minimises over each coordinate once, in place. Returns the largest change, as a share of
        the whole that its column explains. O(size^2)."""
        largest = 0.0
        for i, row in enumerate(self._matrix):
            diagonal = row[i]
            if diagonal <= 0.0:
                continue
            gradient = sum(map(mul, row, solution)) - self._vector[i]
            before = solution[i]
            after = max(0.0, before - gradient / diagonal)
            solution[i] = after
            change = abs(after - before) * diagonal
            if self._vector[i] > 0.0 and change / self._vector[i] > largest:
                largest = change / self._vector[i]
        return largest

    def solve(self) -> list[float]:
        """The non-negative coefficients with the least sum of squares."""
        solution = [0.0] * self._size
        for _ in range(_MAX_SWEEPS):
            if self.sweep(solution) < _PRECISION:
                break
        return solution
