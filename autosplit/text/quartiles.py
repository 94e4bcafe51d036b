"""Repeated measurements as figures."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence


def quartiles(values: Sequence[float]) -> tuple[float, float, float]:
    """The lower quartile, the median and the upper quartile, none of which is beyond the values."""
    if len(values) < 2:
        return (values[0],) * 3
    low, middle, high = statistics.quantiles(values, n=4, method="inclusive")
    return low, middle, high


def spread(values: Sequence[float]) -> float:
    """The interquartile range; 0 for a single value, or none."""
    if not values:
        return 0.0
    low, _, high = quartiles(values)
    return high - low


def ratios(mine: Iterable[float], theirs: Iterable[float]) -> list[float]:
    """Of each pair of measurements that were taken one after the other."""
    return [a / b for a, b in zip(mine, theirs, strict=True)]
