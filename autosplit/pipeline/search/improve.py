"""Local search: change the order along the critical path for as long as that shortens the step.

The neighbourhood is that of job-shop scheduling (van Laarhoven, Aarts and Lenstra, Operations
Research 40, 1992): only a change of two neighbours on a critical path can shorten a schedule. To
it come moves of a whole W behind its block, for a W is filling and nobody waits for it. Where no
move helps, simulated annealing (the same authors, Operations Research 40, 113-125) goes on with
random moves within the blocks of the critical path.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from autosplit.pipeline.simulation.event_loop import Play

from .bound import lower_bound
from .problem import FORWARD, FULL, INPUT, WEIGHT, Problem, Rows

_TOLERANCE = 1e-9
_HEAT = 0.02  # of the makespan: by so much longer steps are kept at first
_ROUNDS = 3  # times of cooling down
_TRIES = 16  # moves that are looked at for one that may be made
_ORDERS = {FORWARD: 1, INPUT: 2, WEIGHT: 4, FULL: 2 | 4}
"""Bits of the orders that an action of a stage is in: of its outputs, of the gradients that it
sends, and of those that it adds up."""

Move = tuple[int, int, int]
"""Rank, the place an action leaves, and the place where it goes.

Where both are one, an I becomes a B with the W behind it, or a B becomes them.
"""


@dataclass
class PlayedOrder:
    """An order, and how it ran."""

    rows: Rows
    played: Play

    @property
    def makespan(self) -> float:
        """How long it takes."""
        return self.played.makespan


def improve(problem: Problem, rows: Rows, plays: int) -> PlayedOrder | None:
    """The best order found from ``rows`` within ``plays`` plays; None if ``rows`` do not run.

    Deterministic: the same arguments give the same order.
    """
    played = problem.play(rows)
    if played is None:
        return None
    chance = random.Random(0)
    least = lower_bound(problem) * (1 + _TOLERANCE)
    best, spent = _descend(problem, PlayedOrder(rows, played), plays, least)
    for left in (_ROUNDS - each for each in range(_ROUNDS)):
        if spent >= plays or best.makespan <= least:
            break
        best, more = _annealed(problem, best, (plays - spent) // left, chance, least)
        spent += more
    return best


def _descend(
    problem: Problem, here: PlayedOrder, plays: int, least: float
) -> tuple[PlayedOrder, int]:
    """Take the first move that helps until none does."""
    spent = 0
    going = True
    while going and spent < plays and here.makespan > least:
        going = False
        for move in _moves(problem, here):
            rows = _moved(problem, here.rows, move)
            if rows is None:
                continue
            spent += 1
            played = problem.play(rows)
            if played is not None and played.makespan < here.makespan * (1 - _TOLERANCE):
                here = PlayedOrder(rows, played)
                going = True
                break
            if spent >= plays:
                break
    return here, spent


def _annealed(
    problem: Problem, best: PlayedOrder, plays: int, chance: random.Random, least: float
) -> tuple[PlayedOrder, int]:
    """Random moves from ``best``, longer steps less and less likely to be kept."""
    here, spent = best, 0
    blocks = list(_blocks(problem, here))
    hot = _HEAT * best.makespan
    while spent < plays and best.makespan > least:
        rows = _random_change(problem, here, blocks, chance)
        spent += 1
        played = None if rows is None else problem.play(rows)
        if rows is None or played is None:
            continue
        heat = hot * (1 - spent / plays)
        longer = played.makespan - here.makespan
        if longer <= 0 or (heat > 0 and chance.random() < math.exp(-longer / heat)):
            here = PlayedOrder(rows, played)
            blocks = list(_blocks(problem, here))
        if here.makespan < best.makespan * (1 - _TOLERANCE):
            best = here
    return best, spent


def _random_change(
    problem: Problem,
    here: PlayedOrder,
    blocks: Sequence[tuple[int, int, int]],
    chance: random.Random,
) -> Rows | None:
    """The rows after an action of a block on the critical path went elsewhere in its block."""
    for _ in range(_TRIES):
        rank, first, last = chance.choice(blocks)
        source, target = chance.randint(first, last), chance.randint(first, last)
        if source == target and not problem.whole[problem.actions[here.rows[rank][source]].stage]:
            continue
        rows = _moved(problem, here.rows, (rank, source, target))
        if rows is not None:
            return rows
    return None


def _moves(problem: Problem, here: PlayedOrder) -> Iterator[Move]:
    """Moves along the critical path, from the end of the step on."""
    for rank, first, last in _blocks(problem, here):
        row = here.rows[rank]
        for place in range(last, first, -1):
            yield rank, place, place - 1
        for place in range(first, last - 1):
            if problem.actions[row[place]].kind is WEIGHT:
                yield rank, place, last
        for place in range(first, last + 1):
            if problem.whole[problem.actions[row[place]].stage]:
                yield rank, place, place
        if last > first + 1:
            yield rank, last, first


def _blocks(problem: Problem, here: PlayedOrder) -> Iterator[tuple[int, int, int]]:
    """Stretches of the critical path that lie on one rank: rank, first and last place."""
    places = {action: place for row in here.rows for place, action in enumerate(row)}
    causes, rank = here.played.causes, here.played.last
    last = len(here.rows[rank]) - 1
    while True:
        row, first = here.rows[rank], last
        while first > 0 and causes[row[first]] < 0:
            first -= 1
        yield rank, first, last
        parcel = causes[row[first]]
        if parcel < 0:
            return
        action = problem.makers[parcel]
        action = action if action in places else problem.part(action, FULL)
        rank, last = problem.ranks[action], places[action]


def _moved(problem: Problem, rows: Rows, move: Move) -> Rows | None:
    """The rows after a move; None if it breaks an order that must stay, or the cap."""
    rank, source, target = move
    row = rows[rank]
    if source == target:
        changed = _exchanged(problem, row, source)
        if changed is None:
            return None
    else:
        between = row[target:source] if target < source else row[source + 1 : target + 1]
        if any(_tied(problem, row[source], other) for other in between):
            return None
        changed = row[:source] + row[source + 1 :]
        changed.insert(target, row[source])
    if not problem.fits(changed, rank):
        return None
    return [changed if each == rank else other for each, other in enumerate(rows)]


def _tied(problem: Problem, one: int, other: int) -> bool:
    """Whether two actions of a rank must keep their order."""
    first, second = problem.actions[one], problem.actions[other]
    if first.stage != second.stage:
        return False
    # A B sends the same gradient as an I, and channels are first in, first out. It adds the same as
    # a W, and sums have one order, with one rounding.
    ordered = _ORDERS[first.kind] & _ORDERS[second.kind]
    return bool(ordered) or first.microbatch == second.microbatch


def _exchanged(problem: Problem, row: list[int], place: int) -> list[int] | None:
    """The row with an I and its W as one B, or a B as those; None where there is neither."""
    action = row[place]
    kind, behind = problem.actions[action].kind, row[place + 1 : place + 2]
    if kind is FULL:
        parts = [problem.part(action, INPUT), problem.part(action, WEIGHT)]
        return [*row[:place], *parts, *row[place + 1 :]]
    if kind is INPUT and behind == [problem.part(action, WEIGHT)]:
        return [*row[:place], problem.part(action, FULL), *row[place + 2 :]]
    return None
