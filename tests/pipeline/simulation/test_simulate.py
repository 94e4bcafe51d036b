from __future__ import annotations

import math
from typing import Any

import pytest

from autosplit.errors import ScheduleError
from autosplit.mesh.costs import Link
from autosplit.pipeline.builders.build import SCHEDULES, build
from autosplit.pipeline.schedule.routes import Source, Wiring
from autosplit.pipeline.schedule.schedule import Action, ActionKind
from autosplit.pipeline.simulation.activation_memory import StageMemory
from autosplit.pipeline.simulation.simulate import Costs, Timeline, simulate
from autosplit.pipeline.simulation.step_graph import Transfer
from autosplit.trainer.tuning import usual_times
from tests.pipeline.tables import chain_of, schedule_of, seconds

UNIT = seconds(1, 1, 1)
FUSED: dict[str, Any] = {"split_backward": False}
PAPER: dict[str, Any] = {"weights": "2bp"}
FILL: dict[str, Any] = {"weights": "fill"}


def as_text(timeline: Timeline) -> list[str]:
    return [f"{s.rank}: {s.action} {s.start:g}-{s.end:g}" for s in timeline.spans]


def test_the_timeline_of_one_microbatch() -> None:
    schedule = schedule_of("0F0 0I0 0W0", "1F0 1I0 1W0", microbatches=1)
    assert as_text(simulate(schedule, seconds(1, 2, 4))) == [
        "0: 0F0 0-1",
        "1: 1F0 1-2",
        "1: 1I0 2-4",
        "0: 0I0 4-6",
        "1: 1W0 4-8",
        "0: 0W0 6-10",
    ]


def test_a_link_carries_one_message_after_the_other() -> None:
    """Four units a message: the second waits for the first; the other direction is another link."""
    schedule = schedule_of("0F0 0F1 0B0 0B1", "1F0 1F1 1B0 1B1", split_backward=False)
    narrow = Transfer(latency=0.5, bandwidth=2.0, message_bytes=8.0)
    assert as_text(simulate(schedule, UNIT, transfer=narrow)) == [
        "0: 0F0 0-1",
        "0: 0F1 1-2",
        "1: 1F0 5.5-6.5",
        "1: 1F1 9.5-10.5",
        "1: 1B0 10.5-12.5",
        "1: 1B1 12.5-14.5",
        "0: 0B0 17-19",
        "0: 0B1 21-23",
    ]
    by_boundary = Transfer(latency=0.5, bandwidth=2.0, message_bytes={0: 8.0})
    assert simulate(schedule, UNIT, transfer=by_boundary).makespan == 23
    with pytest.raises(ScheduleError, match="no message_bytes for the boundary after stage 0"):
        simulate(schedule, UNIT, transfer=Transfer(message_bytes={}))


FUSED_CHAIN = schedule_of(
    "0F0 0B0", "1F0 1B0", "2F0 2B0", stages=3, microbatches=1, split_backward=False
)


def test_a_message_to_each_stage_that_takes_of_a_result() -> None:
    """Stage 2 takes of stage 0, too: over a link of its own, forward and back."""
    skip = Wiring(((Source(None, 0),), (Source(0, 0),), (Source(0, 1), Source(1, 0))), (2, 1))
    links = Transfer(0.0, 1.0, {0: 9.0, 1: 1.0})
    assert as_text(simulate(FUSED_CHAIN, UNIT, transfer=links, wiring=skip)) == [
        "0: 0F0 0-1",
        "1: 1F0 10-11",
        "2: 2F0 12-13",
        "2: 2B0 13-15",
        "1: 1B0 16-18",
        "0: 0B0 27-29",
    ]


def test_a_wiring_that_does_not_fit_is_refused() -> None:
    with pytest.raises(ScheduleError, match=r"'table' has 3 stages, but the wiring has 2"):
        simulate(FUSED_CHAIN, UNIT, wiring=chain_of((1,)))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"latency": -1.0}, "transfer must be finite seconds >= 0, got -1.0"),
        ({"bandwidth": 0.0}, "bandwidth must be > 0 bytes per second, got 0.0"),
        ({"message_bytes": math.inf}, "message_bytes must be finite numbers >= 0, got inf"),
        ({"message_bytes": {0: -2.0}}, "message_bytes must be finite numbers >= 0, got -2.0"),
        ({"host": Link(math.nan)}, "transfer must be finite seconds >= 0, got nan"),
    ],
)
def test_impossible_links_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ScheduleError, match=message):
        Transfer(**options)


@pytest.mark.parametrize("stages", [1, 3, 8])
@pytest.mark.parametrize(
    ("name", "per_stage", "options", "ratio"),
    [
        ("naive", 1, FUSED, lambda n: (n - 1) / n),
        ("naive", 1, PAPER, lambda n: 2 * (n - 1) / (2 * n + 1)),
        ("gpipe", 1, FUSED, lambda n: (n - 1) / (2 * n - 1)),
        ("gpipe", 1, PAPER, lambda n: 2 * (n - 1) / (5 * n - 2)),
        ("1f1b", 1, FUSED, lambda n: (n - 1) / (2 * n - 1)),
        ("1f1b", 1, PAPER, lambda n: (n - 1) / (4 * n - 1)),
        ("1f1b", 2, FUSED, lambda n: (n - 1) / (3 * n - 1)),
        ("1f1b", 2, FILL, lambda n: (n - 1) / (7 * n - 1)),
    ],
)
def test_published_bubble_ratios(
    name: str, per_stage: int, options: dict[str, Any], ratio: Any, stages: int
) -> None:
    """F = I = W. ``per_stage`` is M / N; 0 stands for a single microbatch."""
    schedule = build(name, stages, max(per_stage * stages, 1), **options)
    assert simulate(schedule, UNIT).bubble_ratio() == pytest.approx(ratio(stages))


@pytest.mark.parametrize("name", [n for n, family in SCHEDULES.items() if "fill" in family.weights])
@pytest.mark.parametrize(("ranks", "microbatches"), [(2, 2), (4, 8)])
def test_a_first_stage_without_an_i_makes_no_step_longer(
    name: str, ranks: int, microbatches: int
) -> None:
    """Its backward is as long as any other's, and nobody waits for any of it."""
    stages = ranks * (SCHEDULES[name].chunks or (2 if name == "interleaved" else 1))
    times = usual_times(stages)
    schedule = build(name, stages, microbatches, ranks=ranks, times=times)
    results = []
    for first in (times[0], times[1]):
        places = [first, *times[1:]]
        costs = Costs(places, [StageMemory(0.0, 0.0)] * stages)
        results.append(simulate(schedule, costs.seconds).step_time)
    assert results[0] <= results[1]


@pytest.mark.parametrize(("name", "without", "own"), [("1f1b", 31, 27), ("gpipe", 37, 30)])
def test_a_first_stage_has_an_i_of_its_own_in_2bps_placement(
    name: str, without: float, own: float
) -> None:
    """Which puts Ws at the end, whatever they take."""
    schedule = build(name, 4, 8, weights="2bp")
    for first, expected in (((1, 0, 2), without), ((1, 1, 1), own)):
        costs = Costs([first, *[(1, 1, 1)] * 3], [StageMemory(0.0, 0.0)] * 4)
        assert simulate(schedule, costs.seconds).makespan == expected


def test_each_action_is_timed_once() -> None:
    """The cost of a simulation grows with the number of actions and no faster."""
    calls: list[Action] = []

    def duration(action: Action) -> float:
        calls.append(action)
        return 1.0

    schedule = build("1f1b", 16, 128)
    timeline = simulate(schedule, duration)
    assert len(calls) == len(timeline.spans) == 16 * 128 * 3
    assert timeline.makespan == 3 * 128 + 15


def test_a_deadlock_names_every_wait() -> None:
    schedule = schedule_of("0F0 0B0 0F1 0B1", "1F0 1F1 1B0 1B1", split_backward=False)
    with pytest.raises(ScheduleError) as caught:
        simulate(schedule, UNIT)
    assert str(caught.value) == (
        "schedule 'table' cannot run to its end:\n"
        "  rank 0 waits at 0B0 for 1I0, which rank 1 runs only after 1F1\n"
        "  rank 1 waits at 1F1 for 0F1, which rank 0 runs only after 0B0"
    )


def test_a_missing_action_is_named() -> None:
    schedule = schedule_of("0I0", "1F0 1I0", microbatches=1)
    with pytest.raises(ScheduleError) as caught:
        simulate(schedule, UNIT)
    assert str(caught.value) == (
        "schedule 'table' cannot run to its end:\n"
        "  rank 0 waits at 0I0 for 0F0, which no rank runs\n"
        "  rank 1 waits at 1F0 for 0F0, which no rank runs"
    )


def test_a_missing_duration_is_named() -> None:
    mapping = {(0, ActionKind.FORWARD): 1.0}
    with pytest.raises(ScheduleError, match=r"no duration for 0B0: .* \(0, ActionKind.BACKWARD\)"):
        simulate(build("naive", 1, 1, split_backward=False), mapping)


@pytest.mark.parametrize("value", [-1.0, math.nan, math.inf])
def test_impossible_times_are_refused(value: float) -> None:
    schedule = build("naive", 1, 1)
    with pytest.raises(ScheduleError, match="the duration of 0F0 must be finite seconds >= 0, got"):
        simulate(schedule, lambda action: value)
    with pytest.raises(ScheduleError, match="transfer must be finite seconds >= 0, got"):
        simulate(schedule, UNIT, transfer=value)
