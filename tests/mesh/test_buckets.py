"""Which gradients share a bucket, and in which order buckets leave."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from autosplit.mesh.reduction import ReductionQueue, fill_buckets


def test_buckets_are_full_before_the_next_is_begun() -> None:
    assert fill_buckets([("a", 3), ("a", 3), ("a", 3), ("a", 9), ("a", 1)], 6) == (
        (0, 1),
        (2,),
        (3,),
        (4,),
    )


def test_kinds_are_apart_and_the_first_complete_leaves_first() -> None:
    sizes = [("a", 1), ("b", 1), ("b", 1), ("a", 1), ("b", 9)]
    assert fill_buckets(sizes, 5) == ((1, 2), (0, 3), (4,))


class Noted:
    def __init__(self, name: str, notes: list[str]) -> None:
        self._name, self._notes = name, notes

    def begin(self) -> None:
        self._notes.append(f"{self._name} begins")

    def give_back(self) -> None:
        self._notes.append(f"{self._name} gives back")

    def start(self) -> None:
        self._notes.append(f"{self._name} starts")

    def finish(self, settled: Callable[[], None]) -> None:
        self._notes.append(f"{self._name} ends")


def test_reductions_start_in_one_order_as_soon_as_they_may() -> None:
    notes: list[str] = []
    parts = [(Noted("a", notes), {1, 2}), (Noted("b", notes), {3}), (Noted("c", notes), ())]
    queue = ReductionQueue(parts, lambda: None)
    with queue.reducing():
        for what in (3, 1):
            queue.ready(what)
        notes.append("work")
        queue.ready(2)
        notes.append("work")
    assert notes[3:] == ["work", "a starts", "b starts", "work", "c starts"] + [
        f"{name} ends" for name in "abc"
    ]


def test_after_an_error_gradients_are_given_back() -> None:
    notes: list[str] = []
    queue = ReductionQueue([(Noted("a", notes), ())], lambda: None)
    with pytest.raises(ZeroDivisionError), queue.reducing():
        _ = 1 / len(notes[1:])
    assert notes == ["a begins", "a gives back"]
    assert not queue.open
