"""The table of a comparison."""

from __future__ import annotations

import dataclasses

import pytest

from autosplit.compare.settings import Row, comparison_table


@pytest.mark.parametrize(
    ("speedup", "told"), [(1.2, " 1.200x"), (1.1, "~1.100x"), (0.95, "~0.950x")]
)
def test_speedups_within_the_spread_are_marked(speedup: float, told: str) -> None:
    values = dict.fromkeys((field.name for field in dataclasses.fields(Row)), 0.0)
    times = {"split": True, "median_s": 1.0, "spread_s": 0.15, "speedup": speedup}
    row = Row(**{**values, **times, "peak_bytes": []})  # type: ignore[arg-type]
    assert told in comparison_table([row])
