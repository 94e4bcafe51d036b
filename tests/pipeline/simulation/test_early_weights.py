"""Weight gradients in waits: the simulator runs them where the executor's order does."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autosplit.errors import ScheduleError
from autosplit.pipeline.builders.build import SCHEDULES
from autosplit.pipeline.engine.executor import Step, early_weights
from autosplit.pipeline.schedule.action import Action, ActionKind
from autosplit.pipeline.schedule.dependency import needs_of, result_of
from autosplit.pipeline.schedule.schedule import Schedule
from autosplit.pipeline.schedule.wiring import Feeds
from autosplit.pipeline.simulation.simulate import simulate
from autosplit.pipeline.simulation.timeline import Span, Timeline
from tests.pipeline.tables import schedule_of, seconds, small

LATE = schedule_of("0F0 0F1 0I0 0I1 0W0 0W1", "1F0 1I0 1F1 1I1 1W0 1W1")


def row_of(timeline: Timeline, rank: int) -> list[str]:
    spans = (span for span in timeline.spans if span.rank == rank)
    return [f"{span.action} {span.start:g}-{span.end:g}" for span in spans]


def test_a_wait_is_filled_with_what_can_run() -> None:
    """Rank 0 waits for 1I1 from 4 to 5; a whole W makes 0I1 late, half of one fits."""
    times = seconds(1, 1, 2)
    plain = ["0F0 0-1", "0F1 1-2", "0I0 3-4", "0I1 5-6"]
    assert row_of(simulate(LATE, times), 0) == [*plain, "0W0 6-8", "0W1 8-10"]
    whole = simulate(LATE, times, early_weights=True)
    assert row_of(whole, 0) == [*plain[:3], "0W0 4-6", "0I1 6-7", "0W1 7-9"]
    halves = simulate(LATE, times, early_weights=True, slices=2)
    assert row_of(halves, 0) == [
        *plain[:3],
        "0W0 4-5",
        "0I1 5-6",
        "0W0 6-7",
        "0W1 7-8",
        "0W1 8-9",
    ]


def test_slices_may_differ_and_replace_the_whole() -> None:
    found = simulate(LATE, seconds(1, 1, 2), early_weights=True, slices={0: (0.25, 2.0)})
    assert row_of(found, 0)[3:6] == ["0W0 4-4.25", "0W0 4.25-6.25", "0I1 6.25-7.25"]
    assert row_of(found, 1)[-2:] == ["1W0 5-7", "1W1 7-9"]


@settings(deadline=None, max_examples=60)
@given(
    st.sampled_from(list(SCHEDULES)),
    st.integers(1, 4),
    st.integers(1, 6),
    st.sampled_from([1, 2, 3]),
    st.sampled_from([0.0, 0.75]),
)
def test_the_order_is_that_of_the_executor(
    name: str, ranks: int, microbatches: int, slices: int, transfer: float
) -> None:
    schedule = small(name, ranks, microbatches)
    times = seconds(3, 2, 1)
    found = simulate(schedule, times, transfer=transfer, early_weights=True, slices=slices)
    made = {result_of(span.action): span for span in found.spans}
    for rank, row in enumerate(schedule.ranks):
        mine = [span for span in found.spans if span.rank == rank]
        assert [span.action for span in mine] == executed(
            schedule, row, mine, made, slices, transfer
        )
        for before, after in itertools.pairwise(mine):
            assert before.end <= after.start


def executed(
    schedule: Schedule,
    row: Sequence[Action],
    spans: Sequence[Span],
    made: dict[Action, Span],
    slices: int,
    transfer: float,
) -> list[Action]:
    """What ``early_weights`` runs where messages arrive as they did in a simulation."""
    clock = [0.0]

    def ready(action: Action) -> float:
        makers = [made[need] for need in needs_of(action, Feeds(schedule.stages))]
        away = [each.end + transfer for each in makers if each.rank != spans[0].rank]
        return max(away, default=0.0)

    def step(action: Action) -> Step:
        nothing: Any = None
        return Step(action, nothing, nothing, nothing, lambda: clock[0] >= ready(action))

    steps = [
        step(action)
        for action in row
        for _ in range(slices if action.kind is ActionKind.BACKWARD_WEIGHT else 1)
    ]
    order = []
    for each, span in zip(early_weights(steps), spans, strict=True):
        order.append(each.action)
        clock[0] = span.end
    return order


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"slices": 2}, "slices=2 has no effect without early_weights=True"),
        ({"slices": 0, "early_weights": True}, "slices is a count, 1 or more; got 0"),
        ({"slices": {1: ()}, "early_weights": True}, "each slice of a W of stage 1, .* got"),
        ({"slices": {0: (-1.0,)}, "early_weights": True}, "finite numbers >= 0, got"),
    ],
)
def test_impossible_slices_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ScheduleError, match=message):
        simulate(LATE, seconds(1, 1, 1), **options)


def test_a_deadlock_is_one_with_early_weights_too() -> None:
    stuck = schedule_of("0F0 0I0 0W0 0F1 0I1 0W1", "1F1 1F0 1I0 1W0 1I1 1W1")
    with pytest.raises(ScheduleError, match="cannot run to its end"):
        simulate(stuck, seconds(1, 1, 1), early_weights=True)
