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


def descend(start: Tensor, blocks: int, rank: Rank) -> Tensor:
    """The way to cut that is reached from ``start``, shape [S - 1], by moves that help.

    A move shifts a run of neighbouring cuts together, or two cuts apart or towards each other.
    """
    if not len(start):
        return start
    moves = _moves(len(start))
    best, value = start, rank(start[None])[:, 0].tolist()
    for _ in range(_ROUNDS):
        ways = torch.unique(best + moves, dim=0)
        ends = torch.cat(
            [ways.new_full((len(ways), 1), -1), ways, ways.new_full((len(ways), 1), blocks - 1)], 1
        )
        ways = ways[(ends.diff(dim=1) > 0).all(1)]
        if not len(ways):
            break
        values = rank(ways)
        place = first_of(values)
        found = values[:, place].tolist()
        if found >= value:
            break
        best, value = ways[place], found
    return best


def first_of(values: Tensor) -> int:
    """The column that comes first in the order of the rows."""
    left = torch.arange(values.shape[1])
    for row in values:
        least = row[left].min()
        left = left[row[left] <= least]
    return int(left[0])


def _moves(cuts: int) -> Tensor:
    moves = []
    for first, last in itertools.combinations_with_replacement(range(cuts), 2):
        run = [1 if first <= place <= last else 0 for place in range(cuts)]
        moves += [[sign * size * each for each in run] for size in _SHIFTS for sign in (1, -1)]
        if first < last:
            pair = [(place == last) - (place == first) for place in range(cuts)]
            moves += [[sign * each for each in pair] for sign in (1, -1)]
    return torch.tensor(moves, dtype=torch.int64).reshape(len(moves), cuts)
