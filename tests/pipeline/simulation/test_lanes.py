"""Moves of memory in simulated steps: who waits for what, and what each carries."""

from __future__ import annotations

from dataclasses import replace

import pytest

from autosplit.errors import ScheduleError
from autosplit.mesh.costs import Link
from autosplit.pipeline.schedule.schedule import Schedule
from autosplit.pipeline.simulation.activation_memory import StageMemory, levels_of, peak_memory
from autosplit.pipeline.simulation.simulate import Costs, Timeline, simulate
from autosplit.pipeline.simulation.step_graph import Transfer
from tests.pipeline.tables import schedule_of, seconds

LINKS = Transfer(0.0, 4.0, host=Link(0.0, 2.0))
SIZES = [StageMemory(1.0, 1.0, 0.25)] * 2


def evicting() -> Schedule:
    return schedule_of(
        "0F0 0EVICT0 0F1 0LOAD0 0B0 0B1",
        "0ACCEPT0 1F0 0RETURN0 1B0 1F1 1B1",
        split_backward=False,
    )


def spans(timeline: Timeline) -> dict[str, tuple[float, float]]:
    return {str(span.action): (span.start, span.end) for span in timeline.spans}


def test_a_slow_link_keeps_the_backward_waiting() -> None:
    costs = Costs([(1, 1, 1)] * 2, SIZES, replace(LINKS, bandwidth=0.25))
    timeline = costs.timeline(evicting())
    times = spans(timeline)
    assert times["0EVICT0"] == (1.0, 5.0)
    assert times["0LOAD0"] == (5.0, 9.0)
    assert times["0B0"][0] == 9.0


def test_an_action_waits_for_offloads_begun_before_the_previous_action() -> None:
    schedule = schedule_of("0F0 0OFFLOAD0 0F1 0F2 0RELOAD0 0B0 0B1 0B2", stages=1, microbatches=3)
    schedule = replace(schedule, split_backward=False)
    links = Transfer(host=Link(0.0, 0.2))
    times = spans(Costs([(1, 1, 1)], SIZES[:1], links).timeline(schedule))
    assert times["0OFFLOAD0"] == (1.0, 6.0)
    assert times["0F1"] == (1.0, 2.0)
    assert times["0F2"] == (6.0, 7.0)
    assert peak_memory(schedule, SIZES[:1]) == [3.0]


def test_a_rank_waits_at_once_for_what_it_awaits() -> None:
    """So that what comes next has its place: half of what it would hold otherwise."""
    schedule = schedule_of(
        "0F0 0OFFLOAD0 0AWAIT0 0F1 0OFFLOAD1 0AWAIT1 0RELOAD0 0B0 0RELOAD1 0B1",
        stages=1,
        microbatches=2,
    )
    schedule = replace(schedule, split_backward=False)
    costs = Costs([(1, 1, 1)], SIZES[:1], Transfer(host=Link(0.0, 0.5)))
    timeline = costs.timeline(schedule)
    times = spans(timeline)
    assert times["0OFFLOAD0"] == (1.0, 3.0)
    assert times["0F1"] == (3.0, 4.0)
    assert times["0RELOAD0"] == (6.0, 8.0)
    assert times["0B0"] == (8.0, 10.0)
    assert peak_memory(schedule, SIZES[:1]) == [1.0]


def test_recomputation_keeps_inputs_only_and_takes_as_long_as_a_forward() -> None:
    schedule = schedule_of("0F0 0F1 0RECOMPUTE0 0B0 0B1", stages=1, microbatches=2)
    schedule = replace(schedule, split_backward=False)
    timeline = Costs([(2, 1, 1)], SIZES[:1]).timeline(schedule)
    assert spans(timeline)["0RECOMPUTE0"] == (4.0, 6.0)
    assert [*levels_of(schedule, SIZES[:1])[0]] == [1.0, 1.25, 2.0, 2.0, 1.0]
    assert timeline.busy(0) == timeline.makespan


def test_bytes_that_are_not_known_are_asked_for() -> None:
    with pytest.raises(ScheduleError, match="pass the memory of every stage"):
        simulate(evicting(), seconds(1, 1, 1), transfer=LINKS)
    assert simulate(evicting(), seconds(1, 1, 1)).makespan == 9.0
