"""The core against an oracle that works a step out in the plainest way; orders made in time."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from autosplit.pipeline.builders.build import SCHEDULES
from autosplit.pipeline.schedule.schedule import Schedule
from autosplit.pipeline.schedule.wiring import Feeds
from autosplit.pipeline.simulation.playing import ListScheduler, play, rows_of
from autosplit.pipeline.simulation.step_graph import StepGraph
from autosplit.pipeline.simulation.transfer import Transfer
from tests.pipeline.schedule.random_schedules import random_schedule
from tests.pipeline.simulation.random_costs import costs_of
from tests.pipeline.simulation.reference import Reference
from tests.pipeline.tables import schedule_of, small

NAMED = st.builds(small, st.sampled_from(list(SCHEDULES)), st.integers(1, 4), st.integers(1, 5))
RANDOM = st.builds(random_schedule, st.integers(0, 10**6), copies=st.sampled_from([1, 2]))


@settings(deadline=None, max_examples=150)
@given(st.data(), st.one_of(NAMED, RANDOM))
def test_a_step_is_as_it_is_defined(data: st.DataObject, schedule: Schedule) -> None:
    """Every schedule, copy, wiring and link: to the bit."""
    costs = data.draw(costs_of(schedule.stages))
    timeline = costs.timeline(schedule)
    for rank, spans in enumerate(Reference(schedule, costs).spans()):
        assert [span for span in timeline.spans if span.rank == rank] == spans


def test_a_rank_waits_or_starts_what_its_policy_chooses() -> None:
    """Rank 1 takes the microbatch that has come first, whatever its row says."""
    schedule = schedule_of("0F0 0F1", "1F1 1F0")
    graph = StepGraph(schedule, transfer=Transfer(latency=0.5))
    scheduler = ListScheduler(graph, [2.0] * 4, ranks=2)
    left = [[0, 1], [2, 3]]

    def choose(rank: int, now: float) -> int | None:
        able = [action for action in left[rank] if scheduler.ready(action) <= now]
        if not able:
            return None
        left[rank].remove(able[0])
        return able[0]

    scheduler.run(choose)
    texts = [[str(graph.actions[number]) for number in row] for row in scheduler.rows]
    assert texts == [["0F0", "0F1"], ["1F0", "1F1"]]
    assert play(graph, scheduler.rows, [2.0] * 4).starts == [0.0, 2.0, 4.5, 2.5]
    assert scheduler.ends == [4.0, 6.5]


@settings(deadline=None, max_examples=50)
@given(st.data(), st.builds(random_schedule, st.integers(0, 10**6), copies=st.sampled_from([1, 2])))
def test_a_given_order_takes_as_long_as_in_the_core(
    data: st.DataObject, schedule: Schedule
) -> None:
    costs = data.draw(costs_of(schedule.stages))
    feeds = None if costs.wiring is None else Feeds(schedule.stages, costs.wiring)
    graph = StepGraph(schedule, feeds=feeds, transfer=costs.transfer)
    seconds, rows = list(map(costs.seconds, graph.actions)), rows_of(schedule)
    scheduler = ListScheduler(graph, seconds, len(rows))
    left = [list(row) for row in rows]

    def choose(rank: int, now: float) -> int | None:
        ready = left[rank] and scheduler.ready(left[rank][0]) <= now
        return left[rank].pop(0) if ready else None

    scheduler.run(choose)
    assert scheduler.rows == [list(row) for row in rows]
    assert max(scheduler.ends) == play(graph, rows, seconds).makespan
