"""The table of a comparison, and what is compared of gradients."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch

from autosplit.compare.run import Row, comparison_table, largest_difference


@pytest.mark.parametrize(
    ("speedup", "told"), [(1.2, " 1.200x"), (1.1, "~1.100x"), (0.95, "~0.950x")]
)
def test_speedups_within_the_spread_are_marked(speedup: float, told: str) -> None:
    values = dict.fromkeys((field.name for field in dataclasses.fields(Row)), 0.0)
    times = {"split": True, "median_s": 1.0, "spread_s": 0.15, "speedup": speedup}
    row = Row(**{**values, **times, "peak_bytes": []})  # type: ignore[arg-type]
    assert told in comparison_table([row])


def test_a_gradient_that_stages_lack_is_as_far_off_as_can_be() -> None:
    one, other = torch.tensor([1.0, 2.0]), torch.tensor([1.0, 2.5])
    assert largest_difference({"a": one, "b": one}, {"a": other}) == 0.5
    assert largest_difference({"b": one}, {"a": one}) == math.inf
