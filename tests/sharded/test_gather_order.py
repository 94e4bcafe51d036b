"""Which parameter groups are gathered ahead of the calls that read them."""

from __future__ import annotations

from typing import Any, cast

from autosplit.gathering import GatherOrder


class Group:
    """A parameter group that counts how often it is freed."""

    def __init__(self) -> None:
        self.freed = 0

    def reshard(self) -> None:
        self.freed += 1


def order_of(*calls: Group) -> GatherOrder:
    """The order in the step after one with these calls."""
    order = GatherOrder()
    for group in calls:
        order.record(cast("Any", [group]))
    order.begin_order()
    return order


def test_the_groups_of_the_next_two_different_calls_are_gathered() -> None:
    a, b, c = Group(), Group(), Group()
    order = order_of(a, b, b, a, c)
    assert order.next_groups() == [a, b]
    order.record(cast("Any", [a]))
    assert order.next_groups(running=True) == [a, b]
    assert order.next_groups() == [b, a]  # a stays gathered while b runs
    order.record(cast("Any", [b]))
    order.record(cast("Any", [b]))
    assert order.next_groups(running=True) == [b, a]
    assert order.next_groups() == [a, c]


def test_a_step_that_differs_frees_what_was_gathered_ahead() -> None:
    a, b, c = Group(), Group(), Group()
    order = order_of(a, b, c)
    order.ahead.update(cast("Any", [a, b]))
    order.record(cast("Any", [a]))
    order.record(cast("Any", [c]))
    assert (a.freed, b.freed, order.ahead, order.next_groups()) == (0, 1, set(), [])
    order.begin_order()
    assert order.next_groups() == [a, c]
