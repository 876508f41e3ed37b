"""Fits a `StepModel` to steps that ran, and checks it on steps that it did not see.

Errors are relative, so that a short step counts as much as a long one. Steps that something else
held up are many times as long as their like and count less (Huber's weights). Several knees are
tried.
"""

from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import groupby
from math import log2
from operator import mul
from statistics import median

from penstock.scheduler.errors import PenstockError
from penstock.scheduler.stats import StepClass
from penstock.scheduler.step_model.amounts import (
    DEVICE_UNITS,
    HOST_UNITS,
    device_row,
    host_row,
)
from penstock.scheduler.step_model.least_squares import NormalEquations
from penstock.scheduler.step_model.model import (
    QUANTILES,
    ClassError,
    StepModel,
    ranges_of,
)
from penstock.scheduler.step_model.samples import StepSample

MIN_STEPS = 50
KNEES = (1, 4, 8, 16, 32, 64, 128, 256)
_NUM_FOLDS = 5
# Neighbours are alike, so a held-out step says little if the steps beside it were seen.
_BLOCK = 16
_NUM_REWEIGHTINGS = 3
# Relative errors above this count only in proportion: some three times the usual spread.
_HUBER = 0.1
_MIN_TO_CORRECT = 12

_Row = tuple[Sequence[float], float]  # of an equation, and its value


class TooFewSteps(PenstockError):
    """There is not enough to fit."""

    def __init__(self, num: int) -> None:
        super().__init__(
            f"{num} steps are too few to fit a step model, which needs at least {MIN_STEPS}; "
            "send the server some load first"
        )


def fit(samples: Sequence[StepSample], *, runs_ahead: bool) -> StepModel:
    """Raises TooFewSteps. Takes about a second for two thousand samples."""
    if len(samples) < MIN_STEPS:
        raise TooFewSteps(len(samples))
    folds = _folds(samples)
    host: list[list[_Row]] = [[(host_row(s.amounts), s.host_s) for s in fold] for fold in folds]
    host_fits = _fits(host, len(HOST_UNITS))
    constant = _constant_columns(samples)
    best: tuple[float, StepModel] | None = None
    for knee in KNEES:
        starts = [
            StepModel(device=device, host=host_fit, knee=knee, runs_ahead=runs_ahead)
            for device, host_fit in zip(_device_fits(folds, knee, constant), host_fits, strict=True)
        ]
        # One without each fold, and one with all of them.
        seen = [[s for fold in folds if fold is not left for s in fold] for left in (*folds, None)]
        *models, whole = map(_corrected, starts, seen)
        errors = _errors(folds, models)
        score = sum(error.mape for error in errors.values()) / len(errors)
        # A knee must earn its place: noise alone makes one of eight look a little better.
        if best is None or score < 0.99 * best[0]:
            best = (score, replace(whole, errors=errors))
    assert best is not None
    kinds = dict.fromkeys(sample.kind for sample in samples)
    covered = {kind: ranges_of([s.amounts for s in samples if s.kind is kind]) for kind in kinds}
    return replace(best[1], covered=covered)


def _device_fits(
    folds: list[list[StepSample]], knee: int, constant: set[int]
) -> list[tuple[float, ...]]:
    rows: list[list[_Row]] = [
        [
            (_without(device_row(s.amounts, knee), constant), s.device_s)
            for s in fold
            if s.device_s is not None
        ]
        for fold in folds
    ]
    return _fits(rows, len(DEVICE_UNITS))


def _corrected(model: StepModel, samples: Sequence[StepSample]) -> StepModel:
    """With the medians of measured over predicted device time, by class and magnitude."""
    ratios: dict[StepClass, dict[int, list[float]]] = {}
    for sample in samples:
        if sample.device_s is not None:
            predicted = model.time_of(sample.amounts).device_s
            nearest = round(log2(sample.amounts.tokens))
            by_size = ratios.setdefault(sample.kind, {})
            by_size.setdefault(nearest, []).append(sample.device_s / max(predicted, 1e-9))
    return replace(model, corrections={kind: _factors(by_size) for kind, by_size in ratios.items()})


def _factors(ratios: dict[int, list[float]]) -> tuple[float, ...]:
    """At each magnitude; where too few steps were seen, that of the next smaller one, or 1."""
    factors: list[float] = []
    for size in range(max(ratios) + 1):
        seen = ratios.get(size, [])
        before = factors[-1] if factors else 1.0
        factors.append(median(seen) if len(seen) >= _MIN_TO_CORRECT else before)
    return tuple(factors)


def _folds(samples: Sequence[StepSample]) -> list[list[StepSample]]:
    """Blocks of neighbours, dealt out in turn; none is empty of a class that has many blocks."""
    folds: list[list[StepSample]] = [[] for _ in range(_NUM_FOLDS)]
    by_class = sorted(samples, key=lambda sample: (sample.kind, sample.number))
    for _, group in groupby(by_class, key=lambda sample: sample.kind):
        for index, sample in enumerate(group):
            folds[index // _BLOCK % _NUM_FOLDS].append(sample)
    return folds


def _fits(folds: list[list[_Row]], size: int) -> list[tuple[float, ...]]:
    """The coefficients without each fold, and with all of them, which come last."""
    whole = [0.0] * size
    for number in range(_NUM_REWEIGHTINGS):
        parts = [_sums(fold, size, whole if number else None) for fold in folds]
        total = _total(parts, size)
        whole = total.solve()
    without = [_total(parts[:i] + parts[i + 1 :], size) for i in range(len(parts))]
    return [*(tuple(equations.solve()) for equations in without), tuple(whole)]


def _sums(rows: Iterable[_Row], size: int, solution: list[float] | None) -> NormalEquations:
    equations = NormalEquations(size)
    for row, value in rows:
        weight = 1.0 / max(value, 1e-7) ** 2
        if solution is not None:
            error = abs(sum(map(mul, row, solution)) / max(value, 1e-9) - 1.0)
            weight *= min(1.0, _HUBER / max(error, 1e-9))
        equations.add(row, value, weight)
    return equations


def _total(parts: list[NormalEquations], size: int) -> NormalEquations:
    total = NormalEquations(size)
    for part in parts:
        total.add_all(part)
    return total


def _constant_columns(samples: Sequence[StepSample]) -> set[int]:
    """Columns besides the first that are the same in every step: the first stands for them too."""
    rows = [device_row(sample.amounts, 0) for sample in samples]
    return {i for i in range(1, len(DEVICE_UNITS)) if len({row[i] for row in rows}) == 1}


def _without(row: tuple[int, ...], columns: set[int]) -> Sequence[float]:
    return [0 if i in columns else value for i, value in enumerate(row)] if columns else row


def _errors(folds: list[list[StepSample]], models: list[StepModel]) -> dict[StepClass, ClassError]:
    """models: of each fold, one that has not seen it."""
    ratios: dict[StepClass, list[list[float]]] = {}
    for number, (fold, model) in enumerate(zip(folds, models, strict=True)):
        for sample in fold:
            predicted = model.cycle_s(sample.amounts)
            by_fold = ratios.setdefault(sample.kind, [[] for _ in folds])
            by_fold[number].append(sample.cycle_s / max(predicted, 1e-9))
    return {kind: _error([fold for fold in by_fold if fold]) for kind, by_fold in ratios.items()}


def _error(ratios: list[list[float]]) -> ClassError:
    """ratios: measured over predicted, by fold."""
    every = sorted(ratio for fold in ratios for ratio in fold)
    num = len(every)
    last = num - 1
    return ClassError(
        num_steps=num,
        mape=sum(abs(1 / ratio - 1) for ratio in every) / num,
        bias=max(abs(1 / _trimmed_mean(fold) - 1) for fold in ratios),
        ratios=tuple(every[round(share * last)] for share in QUANTILES),
    )


def _trimmed_mean(values: list[float]) -> float:
    """Without a twentieth at each end: one step that was stopped for seconds is no bias."""
    ordered = sorted(values)
    cut = len(ordered) // 20
    inner = ordered[cut : len(ordered) - cut]
    return sum(inner) / len(inner)
