from __future__ import annotations

import dataclasses
import re
from collections import deque
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autosplit.errors import ScheduleError
from autosplit.pipeline.builders.build import build
from autosplit.pipeline.schedule.schedule import Action, ActionKind, Schedule
from autosplit.pipeline.search.search import search
from autosplit.pipeline.simulation.activation_memory import StageMemory
from autosplit.pipeline.simulation.simulate import Costs, simulate
from autosplit.pipeline.validation.grid import format_grid, format_schedule
from autosplit.pipeline.validation.validate import validate
from tests.pipeline.tables import schedule_of, seconds


def refusal(schedule: Schedule) -> str:
    with pytest.raises(ScheduleError) as caught:
        validate(schedule)
    return str(caught.value)


def faults(schedule: Schedule) -> list[str]:
    """The numbered lines of the error, without their numbers."""
    return re.findall(r"^\d+\. (.*)$", refusal(schedule), flags=re.MULTILINE)


def test_the_error_shows_the_grid() -> None:
    schedule = schedule_of("0F0 0I0 0F1 0I1 0W0 0W1", "1F0 1F1 1I0 1I1 1W0 1W1")
    assert refusal(schedule) == "\n".join(
        [
            "illegal schedule (table: 2 stages, 2 microbatches, 2 ranks), 1 fault:",
            "1. deadlock: rank 0 waits at 0I0 for 1I0, which rank 1 runs only after 1F1; "
            "rank 1 waits at 1F1 for 0F1, which rank 0 runs only after 0I0",
            "slot    0    1    2    3    4    5    6",
            "rank 0  0F0  .    0I0  0F1  0I1  0W0  0W1",
            "                  ^1                       <-- ERROR HERE",
            "rank 1  .    1F0  1F1  1I0  1I1  1W0  1W1",
            "                  ^1                       <-- ERROR HERE",
        ]
    )


def test_all_faults_are_shown_at_once() -> None:
    schedule = schedule_of("0F0 0W0 0F1 0B1 0I0 7F3 0SEND_F0", "1F0 1I0 0F1 1I1 1W0 1W1")
    assert refusal(schedule) == "\n".join(
        [
            "illegal schedule (table: 2 stages, 2 microbatches, 2 ranks), 6 faults:",
            "1. 7F3: no stage 7; expected 0 to 1",
            "2. 0SEND_F0 is not an action that a schedule lists: F, I, W, B, actions of "
            "memory, and UNSHARD, RESHARD, REDUCE_GRAD",
            "3. 0F1 is on rank 1, but rank 0 holds stage 0",
            "4. 0F1 runs 2 times, expected once",
            "5. stage 1 never runs 1F1",
            "6. deadlock: rank 0 waits at 0W0 for 0I0, which rank 0 runs only after 0W0",
            "slot    0    1    2    3     4    5    6    7    8    9    10   11   12",
            "rank 0  0F0  .    .    .     .    .    .    0W0  0F1  0B1  0I0  7F3  0SEND_F0",
            "                                            ^6   ^4             ^1   ^2        "
            "<-- ERROR HERE",
            "rank 1  .    1F0  1I0  0F1   1I1  1W0  1W1  .    .    .    .    .    .",
            "                       ^3,4                 ^5                                 "
            "<-- ERROR HERE",
        ]
    )


ONE: dict[str, Any] = {"stages": 1, "microbatches": 1}


@pytest.mark.parametrize(
    ("schedule", "expected"),
    [
        (schedule_of("0F0", **ONE), ["stage 0 never runs 0I0 and 0W0, nor 0B0"]),
        (schedule_of("0F0 0I0", **ONE), ["stage 0 never runs 0W0"]),
        (schedule_of("0F0 0W0", **ONE), ["stage 0 never runs 0I0"]),
        (schedule_of("0B0", **ONE), ["stage 0 never runs 0F0"]),
        (
            schedule_of("0F0 0B0 0W0", **ONE),
            ["stage 0 mixes B with I or W on microbatch 0: expected 0I0 and 0W0, or 0B0 alone"],
        ),
        (schedule_of("0F0 0F0 0B0", **ONE), ["0F0 runs 2 times, expected once"]),
        (schedule_of("0F0 0I0 0W0 0W0", **ONE), ["0W0 runs 2 times, expected once"]),
        (
            schedule_of("0B0 0F0", **ONE),
            ["deadlock: rank 0 waits at 0B0 for 0F0, which rank 0 runs only after 0B0"],
        ),
        (
            schedule_of("0F0 0B0 0B1 0F1", stages=1),
            ["deadlock: rank 0 waits at 0B1 for 0F1, which rank 0 runs only after 0B1"],
        ),
        (schedule_of("0F0 0B0 0F5", **ONE), ["0F5: no microbatch 5; expected 0 to 0"]),
        (
            schedule_of("0F0 0I0 0W0", split_backward=False, **ONE),
            ["split_backward is False, but the schedule has I or W"],
        ),
        (
            schedule_of("1F0 0F0 1B0 0B0", stages=2, microbatches=1, placement=(0, 0)),
            ["deadlock: rank 0 waits at 1F0 for 0F0, which rank 0 runs only after 1F0"],
        ),
    ],
)
def test_each_fault(schedule: Schedule, expected: list[str]) -> None:
    assert faults(schedule) == expected


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"stages": 0}, "stages must be at least 1, got 0"),
        ({"microbatches": 0}, "microbatches must be at least 1, got 0"),
        (
            {"placement": (0,)},
            "placement must name a rank for each of the 2 stages, got 1: (0,)",
        ),
        ({"placement": (0, 2)}, "stage 1 is placed on rank 2; ranks are 0 to 1"),
        ({"placement": (0, 0)}, "rank 1 holds no stage; use fewer ranks"),
    ],
)
def test_sizes_and_placement(changes: dict[str, Any], expected: str) -> None:
    schedule = dataclasses.replace(build("1f1b", 2, 2), **changes)
    assert expected in faults(schedule)
    assert "rank 0  0F0" in refusal(schedule)


def test_a_long_grid_shows_the_faulty_part() -> None:
    schedule = build("1f1b", 2, 40, split_backward=False)
    row = list(schedule.ranks[1])
    row[40], row[41] = row[41], row[40]
    broken = dataclasses.replace(schedule, ranks=(schedule.ranks[0], tuple(row)))
    lines = refusal(broken).splitlines()
    assert lines[1].startswith("1. deadlock: rank 1 waits at 1B20 for 1F20, which rank 1 runs")
    assert lines[2].split() == ["slot", "...", *map(str, range(37, 50)), "..."]
    assert lines[-2].split()[:6] == ["rank", "1", "...", "1F18", "1B18", "1F19"]
    assert lines[-1].split() == ["^1", "<--", "ERROR", "HERE"]


def test_grid_of_a_schedule() -> None:
    assert format_schedule(build("1f1b", 2, 2)) == "\n".join(
        [
            "1f1b: 2 stages, 2 microbatches, 2 ranks",
            "slot    0    1    2    3    4    5    6",
            "rank 0  0F0  0F1  .    0I0  0W0  0I1  0W1",
            "rank 1  .    1F0  1I0  1F1  1I1  1W0  1W1",
        ]
    )


def test_of_a_billion_microbatches_the_first_faults_are_told() -> None:
    schedule = dataclasses.replace(build("1f1b", 2, 2), microbatches=10**9)
    text = refusal(schedule)
    assert "1000000000 microbatches, 2 ranks), more than 50 faults:" in text
    assert "\n50. stage 0 never runs" in text
    assert "\n51. " not in text
    with pytest.raises(ScheduleError, match="make a step of 6,000,000,000 actions, more than the"):
        build("1f1b", 2, 10**9)
    with pytest.raises(ScheduleError, match="make a step of 3,000,000,000 actions, more than the"):
        search(Costs([(1.0, 1.0, 1.0)], [StageMemory(1.0, 1.0)]), 10**9)


def test_a_grid_of_many_late_ranks_takes_no_more_than_their_actions() -> None:
    """Rank by slot, this one would have 400 million cells."""
    ranks = 20_000
    rows = tuple((Action(stage, ActionKind.FORWARD, 0),) for stage in range(ranks))
    text = refusal(Schedule("long", ranks, 1, rows, tuple(range(ranks)), split_backward=False))
    assert "more than 50 faults" in text
    assert len(text) < 50_000


def test_a_grid_can_be_cut() -> None:
    row = {slot: str(slot) for slot in range(5)}
    assert format_grid([row], widest=3) == "slot    0  1  2  ...\nrank 0  0  1  2  ..."
    many = [{0: "a"}] * 5
    assert format_grid(many, widest=2).split() == [
        "slot",
        "0",
        "rank",
        "0",
        "a",
        "rank",
        "1",
        "a",
        "...",
    ]
    marked = format_grid(many, {(3, 0): "^1"}, widest=2).splitlines()
    assert [line.split()[0] for line in marked] == ["slot", "...", "rank", "^1", "..."]


@st.composite
def damaged(draw: st.DrawFn) -> Schedule:
    """A built schedule after one or two random edits."""
    stages, microbatches = draw(st.integers(1, 3)), draw(st.integers(1, 3))
    split = draw(st.booleans())
    name = draw(st.sampled_from(["naive", "gpipe", "1f1b"]))
    schedule = build(
        name,
        stages,
        microbatches,
        split_backward=split,
        ranks=draw(st.integers(1, stages)),
    )
    rows = [list(row) for row in schedule.ranks]
    for _ in range(draw(st.integers(1, 2))):
        row = draw(st.sampled_from([row for row in rows if row]))
        places = st.integers(0, len(row) - 1)
        first, second = draw(places), draw(places)
        match draw(st.sampled_from(["swap", "drop", "copy", "move", "kind"])):
            case "swap":
                row[first], row[second] = row[second], row[first]
            case "drop" if sum(map(len, rows)) > 1:
                del row[first]
            case "copy":
                row.insert(second, row[first])
            case "move":
                row.insert(second, row.pop(first))
            case "kind":
                # The brute force below knows nothing of RECOMPUTE, which behind an F is legal.
                kinds = [kind for kind in ActionKind if kind.is_compute and not kind.is_memory]
                kind = draw(st.sampled_from(kinds))
                row[first] = dataclasses.replace(row[first], kind=kind)
            case _:
                pass
    return dataclasses.replace(schedule, ranks=tuple(map(tuple, rows)))


def brute_force_legal(schedule: Schedule) -> bool:
    """Run the lists, and see whether one step comes out."""
    todo = [deque(row) for row in schedule.ranks]
    done: set[str] = set()

    moved = True
    while moved:
        moved = False
        for rank, row in enumerate(todo):
            while row:
                action = row[0]
                stage, kind, m = action.stage, action.kind.value, action.microbatch
                if schedule.placement[stage] != rank or str(action) in done:
                    return False
                if kind == "W":
                    if f"{stage}I{m}" not in done:
                        return False
                else:
                    neighbour = stage - 1 if kind == "F" else stage + 1
                    name = f"{neighbour}{'F' if kind == 'F' else 'g'}{m}"
                    if kind != "F" and f"{stage}F{m}" not in done:
                        return False
                    if 0 <= neighbour < schedule.stages and name not in done:
                        break
                    result = f"{stage}{'F' if kind == 'F' else 'g'}{m}"
                    if result in done and kind != "F":
                        return False
                    done.add(result)
                done.add(str(action))
                row.popleft()
                moved = True
    if any(todo):
        return False
    for stage in range(schedule.stages):
        for m in range(schedule.microbatches):
            kinds = {kind for kind in "FIWB" if f"{stage}{kind}{m}" in done}
            if kinds not in ({"F", "B"}, {"F", "I", "W"}):
                return False
            if not schedule.split_backward and "I" in kinds:
                return False
    return True


@settings(deadline=None, max_examples=300)
@given(damaged())
def test_damage_is_found_exactly_where_there_is_some(schedule: Schedule) -> None:
    if brute_force_legal(schedule):
        validate(schedule)
        assert simulate(schedule, seconds(1, 2, 3)).makespan > 0
    else:
        assert "<-- ERROR HERE" in refusal(schedule)
