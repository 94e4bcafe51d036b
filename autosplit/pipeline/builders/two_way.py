"""DualPipe: two copies of the stages in opposite directions, and DualPipeV: one copy in a V.

Source: DeepSeek-V3 (arXiv 2412.19437, section 3.2.1) and the eight phases of its published
implementation (github.com/deepseek-ai/DualPipe). A rank that meets a forward of one direction and
a backward of the other in the same phase may overlap them; here the forward comes first.

Chimera: two copies of the stages, through which microbatches go in opposite directions.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable, Sequence

from autosplit.errors import ScheduleError
from autosplit.pipeline.schedule.action import Action, ActionKind
from autosplit.pipeline.schedule.schedule import Schedule
from autosplit.pipeline.simulation.playing import ListScheduler
from autosplit.pipeline.simulation.step_graph import StepGraph

from .placement import Row, ScheduleTemplate, backward, forward, most_in_flight

Lane = Callable[[int], tuple[int, int]]
"""Stage and microbatch of the n-th pass of a rank in one direction."""


def dual_pipe_v(ranks: int, microbatches: int) -> ScheduleTemplate:
    """DualPipe cut in half: rank r of P holds the stages r and 2P-1-r of one copy.

    Bubble for like stages with an I no longer than an F, and M >= 2P: each rank idles
    (P-1)(F+I-W), where F, I and W are those of one stage.

    Activation memory of every rank: at most 2P + 1 pairs of a stage and a microbatch.

    Raises:
        ScheduleError: fewer than 2P microbatches.
    """
    if microbatches < 2 * ranks:
        raise ScheduleError(
            f"'dualpipe-v' needs at least 2P microbatches: expected {2 * ranks} or more for "
            f"{ranks} ranks, got {microbatches}"
        )

    def row(rank: int) -> Row:
        lanes = (lambda n: (rank, n), lambda n: (2 * ranks - 1 - rank, n))
        return _phases(rank, ranks, microbatches, lanes)

    return ScheduleTemplate(tuple(map(row, range(ranks))), (*range(ranks), *reversed(range(ranks))))


def dual_pipe(ranks: int, microbatches: int) -> ScheduleTemplate:
    """Rank r of P holds stage r of one copy and stage P-1-r of another; each runs half of M.

    Bubble for like stages with an I no longer than an F, and M >= 2P: each rank idles
    (P/2-1)(F+I-W). Parameters are held twice.

    Activation memory of every rank: at most P + 1 microbatches.

    Raises:
        ScheduleError: odd counts, or fewer than 2P microbatches.
    """
    if ranks % 2 or microbatches % 2 or microbatches < 2 * ranks:
        raise ScheduleError(
            "'dualpipe' needs an even number of ranks, and an even number of microbatches that is "
            f"at least twice that; got {ranks} ranks and {microbatches} microbatches"
        )

    def row(rank: int) -> Row:
        near = min(rank, ranks - 1 - rank)
        # The lane in which this rank stands in the first half of the way comes first.
        first, second = (0, 1) if rank < ranks // 2 else (1, 0)
        lanes = (lambda n: (near, 2 * n + first), lambda n: (ranks - 1 - near, 2 * n + second))
        return _phases(near, ranks // 2, microbatches // 2, lanes)

    return ScheduleTemplate(
        tuple(map(row, range(ranks))),
        tuple(range(ranks)),
        mirror=tuple(reversed(range(ranks))),
    )


def _phases(near: int, ranks: int, count: int, lanes: tuple[Lane, Lane]) -> Row:
    """The eight phases of the rank that is ``near`` steps into the first lane, of ``ranks``.

    ``count`` microbatches pass in each lane. The first lane is the one in which the rank stands in
    the first half of the way.
    """
    rank = _RowWriter(lanes)
    behind = ranks - 1 - near
    for _ in range(2 * behind):
        rank.forward(0)
    for _ in range(near + 1):
        rank.forward(0)
        rank.forward(1)
    for _ in range(behind):
        rank.inputs(1)
        rank.weight()
        rank.forward(1)
    for _ in range(count - 2 * ranks + near + 1):
        rank.forward(0)
        rank.backward(1)
        rank.forward(1)
        rank.backward(0)
    for _ in range(behind):
        rank.backward(1)
        rank.forward(1)
        rank.backward(0)
    # From the middle of the next phase on, Ws are kept for the waits of the last two.
    order = [lane for _ in range(near + 1) for lane in (1, 0)] + [0] * behind
    whole = near + 1
    for place, lane in enumerate(order):
        if place >= 2 * (near + 1):
            rank.weight()
        (rank.backward if place < whole else rank.inputs)(lane)
    while rank.pending:
        rank.weight()
    return tuple(rank.row)


class _RowWriter:
    """A row being written: the next pass of each lane, and the Ws that wait."""

    def __init__(self, lanes: tuple[Lane, Lane]) -> None:
        self._forwards, self._backwards = (
            [map(lane, itertools.count()) for lane in lanes] for _ in range(2)
        )
        self.pending: deque[Action] = deque()
        self.row: list[Action] = []

    def forward(self, lane: int) -> None:
        self.row.append(forward(*next(self._forwards[lane])))

    def backward(self, lane: int) -> None:
        self.row.append(backward(*next(self._backwards[lane])))

    def inputs(self, lane: int) -> None:
        """The next backward as an I, whose W waits."""
        stage, microbatch = next(self._backwards[lane])
        self.row.append(Action(stage, ActionKind.BACKWARD_INPUT, microbatch))
        self.pending.append(Action(stage, ActionKind.BACKWARD_WEIGHT, microbatch))

    def weight(self) -> None:
        """The oldest W that waits, if any does."""
        if self.pending:
            self.row.append(self.pending.popleft())


_UNITS = {ActionKind.FORWARD: 1, ActionKind.BACKWARD: 2}


def chimera(ranks: int, microbatches: int) -> ScheduleTemplate:
    """Rank r of P holds stage r of one copy and stage P-1-r of the other; each runs half of M.

    Source: Li and Hoefler, arXiv 2107.06925, figure 3. P microbatches are a unit: half of them go
    each way, in the order of 1F1B, and a rank runs what can start first, a backward before a
    forward. Units follow each other on every rank (the paper's direct concatenation).

    Bubble for like stages, full backwards of B = I + W >= F and M = kP: each rank idles k(P-2)B,
    against 1F1B's (P-1)(F+B). Split, for F = I = W: (P/2-1)F whatever k. Parameters are held twice.

    Activation memory for M >= P: with full backwards from P/2+1 microbatches on the first and the
    last rank to P on those in the middle; split, at most P on every rank.

    Raises:
        ScheduleError: an odd count.
    """
    if ranks % 2 or microbatches % 2:
        raise ScheduleError(
            "'chimera' needs an even number of ranks and of microbatches; got "
            f"{ranks} ranks and {microbatches} microbatches"
        )
    rows: list[Row] = [()] * ranks
    for first in range(0, microbatches, ranks):
        unit = _unit(ranks, first, min(ranks, microbatches - first))
        rows = [row + more for row, more in zip(rows, unit, strict=True)]
    return ScheduleTemplate(
        tuple(rows),
        tuple(range(ranks)),
        budgets=(max(map(most_in_flight, rows)),) * ranks,
        mirror=tuple(reversed(range(ranks))),
    )


def _unit(ranks: int, first: int, count: int) -> tuple[Row, ...]:
    """The rows of ``count`` microbatches from ``first`` on, half of them each way."""
    ways = [list(range(first + odd, first + count, 2)) for odd in (0, 1)]
    there, back = ([_lane(ranks, way, stage) for stage in range(ranks)] for way in ways)
    return _merged(list(zip(there, reversed(back), strict=True)))


def _lane(ranks: int, numbers: list[int], stage: int) -> Row:
    """What ``stage`` of one copy runs, in the order of 1F1B."""
    ahead = min(ranks - 1 - stage, len(numbers))
    forwards = [forward(stage, number) for number in numbers]
    row = forwards[:ahead]
    for place, number in enumerate(numbers):
        row += [*forwards[place + ahead : place + ahead + 1], backward(stage, number)]
    return tuple(row)


def _merged(lanes: Sequence[tuple[Row, Row]]) -> tuple[Row, ...]:
    """Each rank's two lanes as one row, by list scheduling with B = 2F.

    A rank runs what can start first: a backward before a forward, then the lane with more left.
    """
    ranks = range(len(lanes))
    rows = tuple(one + other for one, other in lanes)
    graph = StepGraph(Schedule("chimera", len(ranks), 1, rows, tuple(ranks), split_backward=False))
    scheduler = ListScheduler(graph, [_UNITS[each.kind] for each in graph.actions], len(ranks))
    numbers = itertools.count()
    left = [[deque(zip(lane, numbers, strict=False)) for lane in own] for own in lanes]

    def choose(rank: int, now: float) -> int | None:
        heads = [lane for lane in left[rank] if lane and scheduler.ready(lane[0][1]) <= now]
        if not heads:
            return None
        _, number = min(heads, key=_urgency).popleft()
        return number

    scheduler.run(choose)
    return tuple(tuple(graph.actions[number] for number in row) for row in scheduler.rows)


def _urgency(lane: deque[tuple[Action, int]]) -> tuple[bool, int]:
    """Backwards first, then the lane that has more left."""
    return lane[0][0].kind is ActionKind.FORWARD, -len(lane)
