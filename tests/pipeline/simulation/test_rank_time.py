"""What moves take of their own rank: in simulated steps, and out of measured ones."""

from __future__ import annotations

from dataclasses import replace

import pytest

from autosplit.errors import ScheduleError
from autosplit.mesh.costs import Link
from autosplit.pipeline.schedule.action import Action
from autosplit.pipeline.schedule.schedule import Schedule
from autosplit.pipeline.simulation.activation_memory import StageMemory
from autosplit.pipeline.simulation.simulate import Costs
from autosplit.pipeline.simulation.timeline import Span, Timeline, undisturbed
from autosplit.pipeline.simulation.transfer import MoveCosts, Transfer
from tests.pipeline.tables import schedule_of

SIZES = [StageMemory(2.0, 1.0, 0.25, tensors=2)]
LINKS = Transfer(0.0, 4.0, host=Link(0.0, 4.0), moves=MoveCosts(0.125, 0.25, 1.0))


def _alone(row: str, microbatches: int = 2) -> Schedule:
    found = schedule_of(row, stages=1, microbatches=microbatches)
    return replace(found, split_backward=False)


def _starts(timeline: Timeline) -> dict[str, float]:
    return {str(span.action): span.start for span in timeline.spans}


def test_a_rank_begins_departures_and_puts_back_itself() -> None:
    links = replace(LINKS, moves=MoveCosts(0.125, 0.25))
    starts = _starts(
        Costs([(1, 1, 1)], SIZES, links).timeline(_alone("0F0 0OFFLOAD0 0F1 0RELOAD0 0B1 0B0"))
    )
    assert starts["0OFFLOAD0"] == starts["0F1"] == 1.125
    assert starts["0RELOAD0"] == starts["0B1"] == 2.125
    assert starts["0B0"] == 4.125


def test_what_is_copied_beside_computation_takes_its_time() -> None:
    timeline = Costs([(1, 1, 1)], SIZES, LINKS).timeline(
        _alone("0F0 0OFFLOAD0 0F1 0RELOAD0 0B1 0B0")
    )
    starts = _starts(timeline)
    assert starts["0F1"] == 1.0 + 0.125 + 0.5
    assert starts["0B1"] == starts["0F1"] + 1.0 + 0.5
    assert timeline.makespan == 6.0 + 0.125 + 0.25 + 2 * 0.5


def test_a_rank_that_waits_for_a_copy_loses_nothing_beside() -> None:
    """Neither at an AWAIT nor at what uses the microbatch next."""
    row = "0F0 0OFFLOAD0 0AWAIT0 0F1 0B1 0RELOAD0 0B0"
    timeline = Costs([(1, 1, 1)], SIZES, LINKS).timeline(_alone(row))
    assert _starts(timeline)["0F1"] == 1.0 + 0.125 + 0.5
    assert timeline.makespan == 6.0 + 0.125 + 0.25 + 2 * 0.5


def test_the_end_at_a_partner_slows_that_down() -> None:
    schedule = schedule_of(
        "0F0 0EVICT0 0F1 0LOAD0 0B0 0B1",
        "1F0 0ACCEPT0 1B0 0RETURN0 1F1 1B1",
        split_backward=False,
    )
    schedule = replace(schedule, partners=(1, 0))
    found = {
        slowing: _starts(
            Costs(
                [(1, 1, 1)] * 2, SIZES * 2, replace(LINKS, moves=MoveCosts(slowing=slowing))
            ).timeline(schedule)
        )
        for slowing in (0.0, 1.0)
    }
    assert found[1.0]["1B0"] - found[0.0]["1B0"] == 0.5
    assert found[1.0]["0F1"] - found[0.0]["0F1"] == 0.5


def test_measured_actions_are_corrected_by_what_was_copied_beside_them() -> None:
    def span(text: str, start: float, end: float, rank: int = 0) -> Span:
        return Span(rank, Action.parse(text), start, end)

    spans = [
        span("0F0", 0.0, 1.0),
        span("0OFFLOAD0", 1.0, 2.0),
        span("0RELOAD3", 1.5, 2.5),
        span("0F1", 1.0, 3.0),
        span("0F2", 3.0, 4.0),
        span("1F0", 1.0, 2.0, rank=1),
    ]
    assert undisturbed(spans, 0.0) == spans
    found = {str(each.action): each.end - each.start for each in undisturbed(spans, 1.0)}
    assert found["0F1"] == 2.0 - 1.5 / 2
    assert (found["0F0"], found["0F2"], found["1F0"]) == (1.0, 1.0, 1.0)
    assert (found["0OFFLOAD0"], found["0RELOAD3"]) == (1.0, 1.0)


def test_impossible_costs_are_refused() -> None:
    with pytest.raises(ScheduleError, match=r"moves\.come must be finite and >= 0, got -1"):
        Transfer(moves=MoveCosts(0.0, -1.0))


def test_a_message_keeps_its_sender_until_it_is_on_its_way() -> None:
    """What it sends leaves at once; what the rank does next begins later, unless it waits."""
    schedule = schedule_of("0F0 0F1 0B0 0B1", "1F0 1B0 1F1 1B1", split_backward=False)
    costs = Costs([(1.0, 1.0, 1.0)] * 2, SIZES * 2, Transfer(0.5, moves=MoveCosts(send=0.25)))
    starts = _starts(costs.timeline(schedule))
    assert (starts["0F0"], starts["0F1"]) == (0.0, 1.25)
    assert starts["1F0"] == 1.5
    assert starts["1B0"] == 2.5
    assert starts["0B0"] == 5.0
    assert starts["1F1"] == 4.75
