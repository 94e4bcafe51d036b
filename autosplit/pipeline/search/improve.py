"""Local search: change the order along the critical path for as long as that shortens the step.

The neighbourhood is that of job-shop scheduling (van Laarhoven, Aarts and Lenstra, Operations
Research 40, 1992): only a change of two neighbours on a critical path can shorten a schedule. To
it come moves of a whole W behind its block, for a W is filling and nobody waits for it. Where no
move helps, a few random ones are made and the search goes on from there.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass

from autosplit.pipeline.action import ActionKind
from autosplit.pipeline.search.problem import Problem, Rows

_TOLERANCE = 1e-9
_KICKS = 4  # random moves before the search goes on

Move = tuple[int, int, int]
"""Rank, the place an action leaves, and the place where it goes."""


@dataclass
class Found:
    """An order, how long it takes, and when each action starts."""

    rows: Rows
    makespan: float
    starts: list[float]


def improve(problem: Problem, rows: Rows, plays: int) -> Found | None:
    """The best order found from ``rows`` within ``plays`` plays; None if ``rows`` do not run.

    Deterministic: the same arguments give the same order.
    """
    played = problem.play(rows)
    if played is None:
        return None
    best = here = Found(rows, *played)
    chance = random.Random(0)
    while plays > 0:
        here, spent = _descend(problem, here, plays)
        plays -= spent
        if here.makespan < best.makespan * (1 - _TOLERANCE):
            best = here
        if best.makespan <= lower_bound(problem) * (1 + _TOLERANCE):
            break
        plays -= 1
        here = _kicked(problem, best, chance)
    return best


def lower_bound(problem: Problem) -> float:
    """No rank can end before its first input has come and all its work is done."""
    bounds = []
    for rank in range(len(problem.caps)):
        stages = [stage for stage, each in enumerate(problem.placement) if each == rank]
        lead = sum(problem.costs.times[stage][0] for stage in range(min(stages, default=0)))
        work = sum(sum(problem.costs.times[stage]) for stage in stages)
        bounds.append(lead + problem.microbatches * work)
    return max(bounds)


def _descend(problem: Problem, here: Found, plays: int) -> tuple[Found, int]:
    """Take the first move that helps until none does."""
    spent = 0
    going = True
    while going and spent < plays:
        going = False
        for move in _moves(problem, here):
            rows = _moved(problem, here.rows, move)
            if rows is None:
                continue
            spent += 1
            played = problem.play(rows)
            if played is not None and played[0] < here.makespan * (1 - _TOLERANCE):
                here = Found(rows, *played)
                going = True
                break
            if spent >= plays:
                break
    return here, spent


def _kicked(problem: Problem, best: Found, chance: random.Random) -> Found:
    """``best`` after a few random moves that keep it legal."""
    here = best
    for _ in range(_KICKS):
        moves = list(_moves(problem, here))
        if not moves:
            break
        rows = _moved(problem, here.rows, chance.choice(moves))
        played = None if rows is None else problem.play(rows)
        if rows is not None and played is not None:
            here = Found(rows, *played)
    return here


def _moves(problem: Problem, here: Found) -> Iterator[Move]:
    """Moves along the critical path, from the end of the step on."""
    for rank, first, last in _blocks(problem, here):
        row = here.rows[rank]
        for place in range(last, first, -1):
            yield rank, place, place - 1
        for place in range(first, last - 1):
            if problem.actions[row[place]].kind is ActionKind.BACKWARD_WEIGHT:
                yield rank, place, last
        if last > first + 1:
            yield rank, last, first


def _blocks(problem: Problem, here: Found) -> Iterator[tuple[int, int, int]]:
    """Stretches of the critical path that lie on one rank: rank, first and last place."""
    places = {action: place for row in here.rows for place, action in enumerate(row)}
    ends = [start + took for start, took in zip(here.starts, problem.seconds, strict=True)]
    action = max(range(len(ends)), key=lambda each: ends[each])
    while True:
        rank, last = problem.rank[action], places[action]
        row, first = here.rows[rank], last
        while first > 0 and ends[row[first - 1]] >= here.starts[row[first]] - _TOLERANCE:
            first -= 1
        yield rank, first, last
        need = problem.needs[row[first]]
        if need < 0 or here.starts[row[first]] <= 0.0:
            return
        action = need


def _moved(problem: Problem, rows: Rows, move: Move) -> Rows | None:
    """The rows after a move; None if it breaks an order that must stay, or the cap."""
    rank, source, target = move
    row = rows[rank]
    action = row[source]
    between = row[target:source] if target < source else row[source + 1 : target + 1]
    moving = problem.actions[action]
    for other in between:
        passed = problem.actions[other]
        if passed.stage == moving.stage and (
            passed.kind is moving.kind or passed.microbatch == moving.microbatch
        ):
            return None
    changed = row[:source] + row[source + 1 :]
    changed.insert(target, action)
    if not problem.fits(changed, rank):
        return None
    return [changed if each == rank else other for each, other in enumerate(rows)]
