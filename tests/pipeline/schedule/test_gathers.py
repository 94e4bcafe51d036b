"""Where the parameters of sharded stages are gathered and freed, and their gradients reduced."""

from __future__ import annotations

import pytest

from autosplit.errors import ScheduleError
from autosplit.pipeline import build
from autosplit.pipeline.engine.evaluation import forward_only
from autosplit.pipeline.schedule.gathers import add_gathers
from autosplit.pipeline.schedule.schedule import Action, ActionKind, Schedule
from autosplit.pipeline.validation.validate import validate


def row(schedule: Schedule, rank: int = 0) -> str:
    return " ".join(map(str, schedule.ranks[rank]))


def test_a_stage_is_gathered_one_action_ahead_and_reduced_after_its_last_w() -> None:
    schedule = add_gathers(build("1f1b", 2, 2), {0, 1})
    assert row(schedule) == "0UNSHARD 0F0 0F1 0I0 0W0 0I1 0W1 0RESHARD 0REDUCE_GRAD"
    assert row(schedule, 1) == "1UNSHARD 1F0 1I0 1F1 1I1 1W0 1W1 1RESHARD 1REDUCE_GRAD"
    validate(schedule)


def test_the_second_stage_of_a_rank_is_gathered_beside_the_first() -> None:
    schedule = add_gathers(build("zb-v", 4, 2), {3})
    assert row(schedule).startswith("0F0 3UNSHARD 0F1 3F0")
    assert add_gathers(schedule, {0, 3}) is schedule
    assert "REDUCE" not in row(add_gathers(forward_only(schedule, 2), {3}))


def test_a_reduction_before_the_last_w_is_refused() -> None:
    schedule = add_gathers(build("1f1b", 2, 2), {0, 1})
    *head, last, _, reduction = schedule.ranks[0]
    early = Schedule(
        "early", 2, 2, ((*head, reduction, last), schedule.ranks[1]), (0, 1), split_backward=True
    )
    with pytest.raises(ScheduleError, match="0REDUCE_GRAD is before 0W1, whose gradients it would"):
        validate(early)


def test_a_gather_of_another_ranks_stage_is_refused() -> None:
    schedule = build("1f1b", 2, 2)
    stray = Action(1, ActionKind.UNSHARD, 0)
    wrong = Schedule(
        "stray", 2, 2, ((stray, *schedule.ranks[0]), schedule.ranks[1]), (0, 1), split_backward=True
    )
    with pytest.raises(ScheduleError, match="1UNSHARD is on rank 0, but rank 1 holds stage 1"):
        validate(wrong)
