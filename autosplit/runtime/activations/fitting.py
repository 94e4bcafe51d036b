"""Which tensors of a microbatch travel, where only so many bytes of it may."""

from __future__ import annotations

from collections.abc import Sequence


def fitting(sizes: Sequence[float], limit: float) -> list[int]:
    """The places of those that go, of sizes in the order in which they are to go.

    One that does not fit is passed over. One is left out, small as it may be, where what fits
    without it is more: a limit that is the sum of like tensors is met beside a smaller one.
    """
    best, most = _first(sizes, limit, None)
    for left_out in best[::-1]:
        found, total = _first(sizes, limit, left_out)
        if total > most:
            best, most = found, total
    return best


def _first(sizes: Sequence[float], limit: float, left_out: int | None) -> tuple[list[int], float]:
    found, total = [], 0.0
    for place, size in enumerate(sizes):
        if place != left_out and total + size <= limit:
            found.append(place)
            total += size
    return found, total
