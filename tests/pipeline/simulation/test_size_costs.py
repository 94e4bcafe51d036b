"""Seconds by size: exact without noise, near with outliers and few points, never negative."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autosplit.pipeline.simulation.size_costs import Terms, fit_terms, seconds_of_size


@pytest.mark.parametrize(
    "terms", [(0.0, 2e-6, 0.0), (3e-3, 2e-6, 0.0), (0.0, 2e-6, 1e-9), (3e-3, 2e-6, 1e-9)]
)
def test_terms_are_found_again(terms: Terms) -> None:
    points = [(size, seconds_of_size(terms, size)) for size in (64, 200, 512, 1000, 3000)]
    assert fit_terms(points) == pytest.approx(terms, rel=1e-3, abs=1e-12)


def test_outliers_hardly_count() -> None:
    """As of a step during which another process has run."""
    terms, draw = (1e-3, 4e-6, 2e-9), random.Random(0)
    sizes = [draw.randint(30, 2000) for _ in range(40)]
    points = [(n, seconds_of_size(terms, n) * draw.uniform(0.98, 1.02)) for n in sizes]
    points[::7] = [(size, 20 * seconds) for size, seconds in points[::7]]
    fitted = fit_terms(points)
    for size in (50, 500, 1500):
        expected = seconds_of_size(terms, size)
        assert seconds_of_size(fitted, size) == pytest.approx(expected, rel=0.05)


def test_of_one_size_seconds_are_proportional() -> None:
    assert fit_terms([(10.0, 3.0), (10.0, 1.0), (10.0, 2.0)]) == pytest.approx((0.0, 0.2, 0.0))
    assert fit_terms([(10.0, 0.0)]) == (0.0, 0.0, 0.0)


@settings(deadline=None, max_examples=40)
@given(st.lists(st.tuples(st.integers(1, 10**9), st.floats(0.0, 100.0)), min_size=1, max_size=12))
def test_no_term_is_negative(points: list[tuple[float, float]]) -> None:
    """Whatever was measured: a longer microbatch never takes less."""
    assert min(fit_terms(points)) >= 0.0
