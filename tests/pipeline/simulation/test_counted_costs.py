"""Costs for a search give what costs give, and count."""

from __future__ import annotations

from dataclasses import replace

import pytest

from autosplit.errors import ScheduleError
from autosplit.pipeline.memory import balance, offload, recompute
from autosplit.pipeline.schedule.schedule import Schedule
from autosplit.pipeline.simulation.activation_memory import peak_memory
from autosplit.pipeline.simulation.counted_costs import CountedCosts
from tests.pipeline.memory.costs import FORMS, costs_of, schedule_of
from tests.pipeline.tables import schedule_of as rows_as


@pytest.mark.parametrize("form", range(len(FORMS)))
@pytest.mark.parametrize("early", [False, True])
def test_the_same_steps(form: int, early: bool) -> None:
    plain = schedule_of(form, 2, 4)
    costs = replace(costs_of(plain.stages), early_weights=early, slices=2 if early else 1)
    counted = CountedCosts.of(costs)
    bounds = [0.6 * max(costs.peaks(plain, costs.timeline(plain)))] * 2
    schedules = [plain]
    for each in (balance, offload, recompute):
        schedules.append(each.nearest(schedules[-1], costs, bounds))
    for schedule in schedules:
        timeline = costs.timeline(schedule)
        assert counted.timeline(schedule) == timeline
        assert counted.peaks(schedule, timeline) == peak_memory(schedule, costs.memory)
    assert counted.tally.plays == len(schedules)
    assert counted.tally.actions == sum(len(row) for s in schedules for row in s.ranks)


@pytest.mark.parametrize(
    ("rows", "said"),
    [
        (("0F0 0F0 0B0", "1F0 1B0"), None),
        (("0F0 0B0", "1B0 1F0"), "cannot run to its end"),
        (("0F0 0B0 1F0", "1B0"), "cannot run to its end"),
    ],
)
def test_what_is_no_step_is_as_for_any_costs(rows: tuple[str, str], said: str | None) -> None:
    schedule: Schedule = rows_as(*rows, split_backward=False)
    costs = costs_of(2)
    if said is None:
        assert CountedCosts.of(costs).timeline(schedule) == costs.timeline(schedule)
        return
    for each in (costs, CountedCosts.of(costs)):
        with pytest.raises(ScheduleError, match=said):
            each.timeline(schedule)
