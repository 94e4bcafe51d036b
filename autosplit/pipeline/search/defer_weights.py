"""Defer every W for as long as memory allows, so that it is there to run in any wait."""

from __future__ import annotations

from collections import deque

from .problem import WEIGHT, Problem, Rows


def defer_weights(problem: Problem, rows: Rows) -> Rows:
    """The same order, but each rank runs its Ws, in their order, where it needs their memory."""
    return [_deferred(problem, row, rank) for rank, row in enumerate(rows)]


def _deferred(problem: Problem, row: list[int], rank: int) -> list[int]:
    found: list[int] = []
    waiting: deque[int] = deque()
    kept = 0.0
    for action in row:
        if problem.actions[action].kind is WEIGHT:
            waiting.append(action)
            continue
        while waiting and kept + problem.adds[action] > problem.room[rank]:
            found.append(waiting.popleft())
            kept -= problem.frees[found[-1]]
        found.append(action)
        kept += problem.adds[action] - problem.frees[action]
    return [*found, *waiting]
