"""The table of a comparison, and what is compared of gradients."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch

from autosplit.compare import run
from autosplit.compare.run import Settings, compare_on_rank, largest_difference, typical_pair
from autosplit.compare.tables import Row, comparison_table
from autosplit.planner import captured_model
from benchmarks.startup.restart import counted
from tests.kept_ranks import Ranks


@pytest.mark.parametrize(
    ("speedup", "told"), [(1.2, " 1.200x"), (1.1, "~1.100x"), (0.95, "~0.950x")]
)
def test_speedups_within_the_spread_are_marked(speedup: float, told: str) -> None:
    values = dict.fromkeys((field.name for field in dataclasses.fields(Row)), 0.0)
    times = {"split": True, "median_s": 1.0, "spread_s": 0.15, "speedup": speedup}
    row = Row(**{**values, **times, "peak_bytes": []})  # type: ignore[arg-type]
    assert told in comparison_table([row])


def test_the_pair_that_is_drawn_is_that_of_the_table() -> None:
    """The speed-up is 1.26x, though the median steps are 1.56x apart, and some are drawn 2.5x."""
    fused, split = [2.5, 2.6, 2.4, 3.0, 2.0], [1.0, 2.1, 1.9, 0.6, 1.6]
    assert typical_pair((fused, split), (fused, split)) == 4
    drawn = [1.0] * 5, [0.4, 0.8, 0.8, 0.4, 0.4]
    assert typical_pair((fused, split), drawn) == 2


def test_a_gradient_that_stages_lack_is_as_far_off_as_can_be() -> None:
    one, other = torch.tensor([1.0, 2.0]), torch.tensor([1.0, 2.5])
    assert largest_difference({"a": one, "b": one}, {"a": other}) == 0.5
    assert largest_difference({"b": one}, {"a": one}) == math.inf


def captures() -> int:
    """The number of captures of the whole model in two comparisons, each of fused and split."""
    cases = [("1f1b", 1), ("1f1b", 2)]
    settings = Settings("tests.failing:dropping", {}, 2, 1, cases, steps=1, profiling=0.1)
    with counted(captured_model, "capture_forward") as calls:
        compare_on_rank(settings)
    return calls.call_count


def test_one_capture_serves_all_that_is_compared(on_ranks: Ranks) -> None:
    assert on_ranks(captures, 1, timeout=60.0) == [1]


def trainers_of_a_failing_model() -> int:
    """The number of models that are cut for trainers before the model's own error ends the
    comparison.
    """
    settings = Settings("tests.failing:untraced", {}, 2, 1, [("1f1b", 1)], steps=1, profiling=0.1)
    with counted(run, "partition") as calls, pytest.raises(ValueError, match="out of memory"):
        compare_on_rank(settings)
    return calls.call_count


def test_an_error_of_the_model_ends_the_comparison_before_trainers_are_built(
    on_ranks: Ranks,
) -> None:
    """Otherwise other ranks would wait in their trainers for rank 0, which runs the model."""
    assert on_ranks(trainers_of_a_failing_model, 1, timeout=60.0) == [0]
