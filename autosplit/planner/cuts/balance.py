"""Dynamic programming over the blocks of a model in order: where to cut, stage by stage.

``best[s][j]`` is the best way to make the first j blocks into s stages: the best ``best[s-1][i]``
over all i < j, joined with blocks i to j as the last of them.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

StageCost = Callable[[int], Tensor]
"""What stage s costs if it begins before block i and ends before block j, shape [B + 1, B + 1];
infinite where it may not."""


def least_largest(cost: StageCost, stages: int) -> tuple[float, list[int]] | None:
    """The cuts whose most costly stage costs least, and what that costs; None if none may be."""
    return _divide(cost, stages, torch.maximum)


def least_uneven(cost: StageCost, stages: int, bound: float) -> list[int] | None:
    """The cuts with the least sum of squares over the stages, none of which exceeds ``bound``."""

    def squares(stage: int) -> Tensor:
        table = cost(stage)
        return torch.where(table <= bound, table * table, torch.inf)

    found = _divide(squares, stages, torch.add)
    return None if found is None else found[1]


def _divide(
    cost: StageCost, stages: int, join: Callable[[Tensor, Tensor], Tensor]
) -> tuple[float, list[int]] | None:
    """The least of all stages' costs joined, and its cuts: k cuts behind block k."""
    best = cost(0)[0].nan_to_num(torch.inf, torch.inf)
    behind = []
    for stage in range(1, stages):
        ways = join(best[:, None], cost(stage)).nan_to_num(torch.inf, torch.inf)
        best, begins = ways.min(0)
        behind.append(begins)
    value = float(best[-1])
    if not math.isfinite(value):
        return None
    cuts = []
    end = len(best) - 1
    for begins in reversed(behind):
        end = int(begins[end])
        cuts.append(end - 1)
    return value, cuts[::-1]
