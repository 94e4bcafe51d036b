"""The chain of actions that a step waits for."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autosplit.pipeline.builders.build import SCHEDULES, build
from autosplit.pipeline.simulation.critical_path import critical_path
from autosplit.pipeline.simulation.simulate import simulate
from autosplit.pipeline.simulation.timeline import Timeline
from tests.pipeline.tables import schedule_of, seconds, small


def test_through_both_ranks() -> None:
    schedule = schedule_of("0F0 0I0 0W0", "1F0 1I0 1W0", microbatches=1)
    path = critical_path(simulate(schedule, seconds(1, 2, 4), transfer=0.5))
    assert [str(span.action) for span in path] == ["0F0", "1F0", "1I0", "0I0", "0W0"]


def test_a_busy_rank_is_its_own_path() -> None:
    path = critical_path(simulate(build("1f1b", 1, 2), seconds(1, 1, 1)))
    assert [str(span.action) for span in path] == ["0F0", "0I0", "0W0", "0F1", "0I1", "0W1"]


def test_nothing_ran() -> None:
    assert critical_path(Timeline(1, ())) == ()


@settings(deadline=None, max_examples=40)
@given(st.sampled_from(list(SCHEDULES)), st.integers(1, 4), st.integers(1, 6), st.booleans())
def test_its_actions_and_transfers_fill_the_step(
    name: str, ranks: int, microbatches: int, moving: bool
) -> None:
    schedule = small(name, ranks, microbatches)
    transfer = 0.25 if moving else 0.0
    timeline = simulate(schedule, seconds(3, 2, 1), transfer=transfer)
    path = critical_path(timeline)
    assert path[0].start == 0.0
    crossings = sum(one.rank != other.rank for one, other in itertools.pairwise(path))
    working = sum(span.end - span.start for span in path)
    assert timeline.makespan == pytest.approx(working + transfer * crossings)


def test_slices_that_take_no_time_are_no_circle() -> None:
    """Two of one W are equal spans."""
    schedule = schedule_of("0F0 0I0 0W0", "1F0 1I0 1W0", microbatches=1)
    timeline = simulate(schedule, seconds(1, 1, 0), early_weights=True, slices=2)
    path = [str(span.action) for span in critical_path(timeline)]
    assert list(dict.fromkeys(path)) == ["0F0", "1F0", "1I0", "0I0"]
