"""Schedules of lists: remembered by rounded sizes, and within what padding would take."""

from __future__ import annotations

from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch

from autosplit.errors import ScheduleError
from autosplit.pipeline.builders.build import build
from autosplit.pipeline.schedule.schedule import ActionKind, Schedule
from autosplit.pipeline.simulation.activation_memory import StageMemory, peak_memory
from autosplit.pipeline.validation.validate import validate
from autosplit.ranks.control import Control
from autosplit.trainer.list_orders import ListOrders
from autosplit.trainer.tuning import MEASURED, ListBudget, first_schedule
from tests.kept_ranks import ranks
from tests.trainer.test_microbatch_lists import Plain, assert_parameters, listed, trainer

FORWARD, BACKWARD_WEIGHT = ActionKind.FORWARD, ActionKind.BACKWARD_WEIGHT
SIZES = [900, 64, 350, 1200, 130, 64, 700]


def most_kept(schedule: Schedule, sizes: list[int]) -> list[int]:
    """Per rank, the most elements of microbatches between F and W."""
    peaks = []
    for row in schedule.ranks:
        kept = [0]
        for action in row:
            change = {ActionKind.FORWARD: 1, ActionKind.BACKWARD_WEIGHT: -1}.get(action.kind, 0)
            kept.append(kept[-1] + change * sizes[action.microbatch])
        peaks.append(max(kept))
    return peaks


def test_lists_are_remembered_by_rounded_sizes() -> None:
    orders = ListOrders(first_schedule(2, 4, 2))
    schedule = orders.find(SIZES)
    validate(schedule)
    assert schedule.microbatches == len(SIZES)
    assert orders.find([899, 64, 349, 1190, 130, 64, 697]) is schedule
    assert orders.find([*SIZES, 64]).microbatches == len(SIZES) + 1
    assert orders.find([1, 1]).microbatches == 2


def test_ranks_keep_no_more_than_with_padding() -> None:
    first = first_schedule(4, 8, 4)
    peaks = peak_memory(first, [StageMemory(1.0, 1.0)] * 4)
    kept = most_kept(ListOrders(first).find(SIZES), SIZES)
    assert all(mine <= 1.04 * max(SIZES) * peak for mine, peak in zip(kept, peaks, strict=True))


def test_measured_seconds_change_the_order() -> None:
    """Long microbatches are as fast as short ones, so their lengths do not matter."""
    orders = ListOrders(first_schedule(2, 4, 2))
    by_size = orders.find(SIZES)
    kinds = (ActionKind.FORWARD, ActionKind.BACKWARD_INPUT, ActionKind.BACKWARD_WEIGHT)
    orders.use_times({(stage, kind): (1.0, 0.0, 0.0) for stage in range(2) for kind in kinds})
    alike = orders.find(SIZES)
    assert alike is not by_size
    assert alike.ranks != by_size.ranks


def test_a_limit_in_bytes_is_kept() -> None:
    orders = ListOrders(first_schedule(2, 4, 2))
    units = (StageMemory(1.0, 1.0),) * 2
    kept = most_kept(orders.find(SIZES, ListBudget((3000.0, 1400.0), units)), SIZES)
    assert kept[0] <= 3000
    assert kept[1] <= 1400
    with pytest.raises(ScheduleError, match="microbatch 3, the largest"):
        orders.find(SIZES, ListBudget((3000.0, 1100.0), units))


def test_stages_of_a_rank_keep_their_placement() -> None:
    schedule = build("zb-v", 4, 4, ranks=2)
    order = ListOrders(schedule).find(SIZES)
    validate(order)
    assert order.placement == schedule.placement


@pytest.mark.parametrize("options", [{}, {"memory_limit": 2**20}])
@ranks(2)
def test_auto_finds_an_order_for_each_list_without_a_message(options: dict[str, Any]) -> None:
    """With the bits of plain autograd that runs the microbatches in this order."""
    gather, schedules, plain = Control.gather, [], Plain()
    with (
        trainer(schedule="auto", **options) as engine,
        mock.patch.object(Control, "gather", autospec=True, side_effect=gather) as gathers,
    ):
        lists: Any = engine._runner._executors._orders.lists
        for step in range(MEASURED + 4):
            pairs = listed([5 + step // 4, 40, 3, 17, 28, 3, 11], step)
            limited = engine._runner._executors._limited
            budget = limited.schedules[0].budget if limited and limited.schedules else None
            schedule = lists.find([x.numel() for x, _ in pairs], budget)
            gathers.reset_mock()
            losses = engine.step(microbatches=pairs)
            assert step <= MEASURED or gathers.call_count == 0
            if step != MEASURED:  # a search has followed this step
                assert step == 0 or engine.schedule is schedule
                schedule = engine.schedule
            order = order_of(schedule, FORWARD)
            assert order == order_of(schedule, BACKWARD_WEIGHT)
            assert step > 0 or order != sorted(order)
            expected = plain.step([pairs[microbatch] for microbatch in order])
            assert torch.equal(losses[order], expected)
            assert_parameters(engine, plain.modules)
            schedules.append(schedule)
        assert schedules[-1] is schedules[-2]
        assert engine.step(microbatches=listed([9, 4])).shape == (2,)
        assert engine.step(microbatches=listed([9] * 4)).shape == (4,)


@ranks(2)
def test_a_schedule_that_a_search_has_found_is_not_searched_again() -> None:
    schedule = replace(build("gpipe", 2, 4), name="auto")
    with trainer(schedule=schedule, microbatches=4) as engine:
        for _ in range(MEASURED + 1):
            engine.step(microbatches=listed([5, 9, 3, 3]))
            assert engine.schedule == schedule


def order_of(schedule: Schedule, kind: ActionKind) -> list[int]:
    """The order of all stages."""
    rows = [[a.microbatch for a in row if a.kind is kind] for row in schedule.ranks]
    assert all(row == rows[0] for row in rows)
    return rows[0]
