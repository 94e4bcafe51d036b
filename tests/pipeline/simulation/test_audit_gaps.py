"""The waits of schedules in which actions run again."""

from __future__ import annotations

import pytest

from autosplit.pipeline.builders.build import build
from autosplit.pipeline.schedule.schedule import Action, ActionKind
from autosplit.pipeline.simulation.audit_gaps import plan_audits
from autosplit.pipeline.simulation.simulate import simulate


def seconds(action: Action) -> float:
    return 2.0 if action.kind is ActionKind.BACKWARD else 1.0


def texts(actions: list[Action]) -> str:
    return " ".join(map(str, actions))


@pytest.mark.parametrize(
    ("name", "options", "expected"),
    [
        # Rank 0 waits for two Fs before 0B0, and rank 1 for a B at the end: too short for a B.
        (
            "1f1b",
            {"split_backward": False},
            [({"0B0": "0F0 0F1"}, "0B0 0B1"), ({"None": "1F0 1F1"}, "1B0 1B1")],
        ),
        # W fills the waits.
        ("1f1b", {}, [({}, "0F0 0F1 0I0 0W0 0I1 0W1"), ({}, "1F0 1I0 1F1 1I1 1W0 1W1")]),
        ("gpipe", {}, [({"0I0": "0F0 0F1"}, "0I0 0I1 0W0 0W1"), ({}, "1F0 1F1 1I0 1I1 1W0 1W1")]),
    ],
)
def test_actions_are_audited_in_a_later_wait_that_is_long_enough(
    name: str, options: dict[str, bool], expected: list[tuple[dict[str, str], str]]
) -> None:
    schedule = build(name, 2, 2, **options)  # type: ignore[arg-type]
    for rank, (waits, late) in enumerate(expected):
        plan = plan_audits(schedule, rank, seconds, lambda _: True)
        assert {str(wait): texts(actions) for wait, actions in plan.waits.items()} == waits
        assert texts(plan.late) == late
        assert not plan.never


def test_waits_take_turns() -> None:
    """Rank 2 of four waits for an F before 2B0, and for a B and an F at the end."""
    plan = plan_audits(build("1f1b", 4, 4, split_backward=False), 2, seconds, lambda _: True)
    waits = {str(wait): texts(actions) for wait, actions in plan.waits.items()}
    assert waits == {"2B0": "2F0", "None": "2F1 2B0 2F2 2B1 2F3 2B2 2B3"}
    assert not plan.late
    assert not plan.never


@pytest.mark.parametrize("name", ["1f1b", "gpipe"])
@pytest.mark.parametrize("split_backward", [False, True])
def test_late_audits_make_the_mean_step_one_percent_longer(name: str, split_backward: bool) -> None:
    """An audit takes a quarter more than its action."""
    schedule = build(name, 2, 4, split_backward=split_backward)
    step = simulate(schedule, seconds).makespan
    for rank in range(2):
        plan = plan_audits(schedule, rank, seconds, lambda _: True)
        longest = 1.25 * max(map(seconds, plan.late))
        assert longest / plan.late_interval <= 0.01 * step < longest / (plan.late_interval - 1)


def test_without_actions_that_can_run_again_nothing_is_planned() -> None:
    plan = plan_audits(build("1f1b", 2, 2), 0, seconds, lambda _: False)
    assert (plan.waits, plan.late, plan.late_interval) == ({}, [], 1)


@pytest.mark.parametrize("name", ["1f1b", "gpipe", "interleaved", "zb-v"])
def test_audits_are_shorter_than_their_waits(name: str) -> None:
    """Waits are shared evenly, and actions that cannot run again are never audited."""
    schedule = build(name, 8, 8, ranks=4)
    for rank, row in enumerate(schedule.ranks):
        plan = plan_audits(schedule, rank, seconds, lambda action: action.microbatch != 3)
        planned = [action for actions in plan.waits.values() for action in actions]
        assert len({*planned}) == len(planned)
        assert {*planned, *plan.late, *plan.never} == {*row}
        assert {action for action in row if action.microbatch == 3} == {*plan.never}
        for wait, actions in plan.waits.items():
            place = len(row) if wait is None else row.index(wait)
            assert all(row.index(action) < place for action in actions)
