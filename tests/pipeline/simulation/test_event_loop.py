"""The core against an oracle that works a step out in the plainest way."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from autosplit.pipeline.builders.build import SCHEDULES
from autosplit.pipeline.schedule.schedule import Schedule
from tests.pipeline.schedule.random_schedules import random_schedule
from tests.pipeline.simulation.random_costs import costs_of
from tests.pipeline.simulation.reference import Reference
from tests.pipeline.tables import small

NAMED = st.builds(small, st.sampled_from(list(SCHEDULES)), st.integers(1, 4), st.integers(1, 5))
RANDOM = st.builds(random_schedule, st.integers(0, 10**6), copies=st.sampled_from([1, 2]))


@settings(deadline=None, max_examples=150)
@given(st.data(), st.one_of(NAMED, RANDOM))
def test_a_step_is_as_it_is_defined(data: st.DataObject, schedule: Schedule) -> None:
    """Every schedule, copy, wiring and link, with Ws where they are and in waits: to the bit."""
    costs = data.draw(costs_of(schedule.stages))
    timeline = costs.timeline(schedule)
    for rank, spans in enumerate(Reference(schedule, costs).spans()):
        assert [span for span in timeline.spans if span.rank == rank] == spans
