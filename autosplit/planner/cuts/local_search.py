"""Local search over cuts: every shift of neighbouring cuts, until none is better."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable

import torch
from torch import Tensor

Rank = Callable[[Tensor], Tensor]
"""Of ways to cut, shape [K, S - 1], what to make small, the most important first: [n, K]."""

_SHIFTS = (1, 2, 4, 8)
_ROUNDS = 60


def every(blocks: int, stages: int) -> Tensor:
    """All ways to cut ``blocks`` blocks into ``stages`` stages, shape [K, S - 1]."""
    ways = itertools.combinations(range(blocks - 1), stages - 1)
    return torch.tensor(list(ways), dtype=torch.int64).reshape(count(blocks, stages), stages - 1)


def count(blocks: int, stages: int) -> int:
    """How many these are."""
    return math.comb(blocks - 1, stages - 1)


def descend(
    start: Tensor,
    blocks: int,
    moves: Tensor,
    rank: Rank,
    may_go_on: Callable[[], bool],
) -> Tensor:
    """The way to cut that is reached from ``start``, shape [S - 1], by moves that help, for as long
    as it ``may_go_on``.
    """
    if not len(start):
        return start
    shifts = _gaps(moves, 0, 0).to(torch.int16)
    best, value = start, rank(start[None])[:, 0].tolist()
    for _ in range(_ROUNDS):
        if not may_go_on():
            break
        gaps = _gaps(best[None], -1, blocks - 1).to(torch.int16)
        ways = best + moves[(shifts + gaps > 0).all(1)]
        if not len(ways):
            break
        values = rank(ways)
        place = first_of(values)
        found = values[:, place].tolist()
        if found >= value:
            break
        best, value = ways[place], found
    return best


def _gaps(cuts: Tensor, before: int, behind: int) -> Tensor:
    """How far each cut is from the one before it, with the ends of the model."""
    ends = [cuts.new_full((len(cuts), 1), end) for end in (before, behind)]
    return torch.cat([ends[0], cuts, ends[1]], 1).diff(dim=1)


def first_of(values: Tensor) -> int:
    """The column that comes first in the order of the rows."""
    left = torch.arange(values.shape[1])
    for row in values:
        least = row[left].min()
        left = left[row[left] <= least]
    return int(left[0])


def moves(cuts: int) -> Tensor:
    """All moves of so many cuts, in order: of a run of neighbouring cuts together, or of two cuts
    apart or towards each other; shape [n, S - 1].
    """
    places = torch.arange(cuts)
    pairs = torch.combinations(places, with_replacement=True)
    first, last = pairs[:, :1], pairs[:, 1:]
    runs = ((first <= places) & (places <= last)).long()
    apart = ((places == last).long() - (places == first).long())[pairs[:, 0] < pairs[:, 1]]
    shifts = [sign * size * runs for size in _SHIFTS for sign in (1, -1)]
    found: Tensor = torch.unique(torch.cat([*shifts, apart, -apart]), dim=0)
    return found
