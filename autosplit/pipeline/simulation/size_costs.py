"""Seconds of an action as a function of a microbatch's size, fitted to measured steps.

    seconds = constant + linear * size + quadratic * size ** 2

The constant is the overhead of calls, the quadratic term that of attention.
"""

from __future__ import annotations

import math
import statistics
from collections import defaultdict
from collections.abc import Iterable

import torch
from torch import Tensor

Terms = tuple[float, float, float]
"""The constant, linear and quadratic terms; none is negative."""

_SUBSETS = [(1,), (0, 1), (1, 2), (0, 1, 2), (0,), (2,), (0, 2)]
"""The terms that are not zero. Earlier subsets are preferred where they fit as well."""
_BETTER = 0.95  # the error of a later subset over that of the best earlier one, at most
_ROUNDS = 10


def fit_terms(points: Iterable[tuple[float, float]]) -> Terms:
    """Return (constant, linear, quadratic) with the least sum of relative errors at points (size,
    seconds).

    Of points with the same size, the median counts. An outlier hardly changes the result, because
    errors are not squared. If all points have one size, seconds are proportional to the size.

    Args:
        points: at least one pair (size, seconds), with a size above 0.
    """
    seconds_of = defaultdict(list)
    for size, seconds in points:
        seconds_of[size].append(seconds)
    sizes = torch.tensor([*seconds_of], dtype=torch.float64, device="cpu")
    medians = [*map(statistics.median, seconds_of.values())]
    measured = torch.tensor(medians, dtype=torch.float64, device="cpu")
    scale = sizes.max() ** torch.arange(3)
    powers = sizes[:, None] ** torch.arange(3) / scale
    best, least = torch.zeros_like(scale), math.inf
    for subset in _SUBSETS:
        terms, error = _least_errors(powers[:, subset], measured)
        if terms.min() >= 0.0 and error < _BETTER * least:
            best, least = torch.zeros_like(scale), error
            best[[*subset]] = terms
    constant, linear, quadratic = (best / scale).tolist()
    return constant, linear, quadratic


def _least_errors(powers: Tensor, measured: Tensor) -> tuple[Tensor, float]:
    """Minimize the sum of relative errors, by least squares with weights that follow the errors."""
    floor = measured.clamp_min(1e-9)
    weights = 1.0 / floor
    for _ in range(_ROUNDS):
        rows, values = weights[:, None] * powers, weights * measured
        terms = torch.linalg.lstsq(rows, values[:, None]).solution[:, 0]
        errors = (powers @ terms - measured).abs() / floor
        weights = errors.clamp_min(1e-4).rsqrt() / floor
    return terms, float(errors.sum())


def seconds_of_size(terms: Terms, size: float) -> float:
    """The seconds of an action on a microbatch of a size; plain arithmetic, equal on all ranks."""
    constant, linear, quadratic = terms
    return constant + size * (linear + size * quadratic)
