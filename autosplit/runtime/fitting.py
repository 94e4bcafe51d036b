"""Which tensors of a microbatch travel, where only so many bytes of it may."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TypeVar

T = TypeVar("T")


def longest_needed_first(names: Mapping[T, Iterable[str]], last_uses: Mapping[str, int]) -> list[T]:
    """What is saved under some names, what is used last first; else in their order."""
    ends = {each: max(last_uses.get(name, 0) for name in of) for each, of in names.items()}
    return sorted(names, key=lambda each: -ends[each])


def fitting(sizes: Sequence[float], limit: float) -> list[int]:
    """The places of those that go, of sizes in the order in which they are to go.

    One that does not fit is passed over. A small one is left out where more than twice as much goes
    in its place: a limit that is the sum of like tensors is met beside a smaller one.
    """
    in_order, there = _first(sizes, limit, None)
    best, most = in_order, there
    for left_out in reversed(in_order):
        found, total = _first(sizes, limit, left_out)
        if total > max(most, there + sizes[left_out]):
            best, most = found, total
    return best


def _first(sizes: Sequence[float], limit: float, left_out: int | None) -> tuple[list[int], float]:
    found, total = [], 0.0
    for place, size in enumerate(sizes):
        if place != left_out and total + size <= limit:
            found.append(place)
            total += size
    return found, total
