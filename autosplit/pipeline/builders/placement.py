"""Place the Ws, for every schedule that can split its backward.

A builder gives the order of F and B on each rank, as a ``ScheduleTemplate``. This file turns every
B into an I, and places the Ws, oldest microbatch first. ``weights="2bp"`` places them as the 2BP
paper does. ``weights="fill"`` is greedy list scheduling under assumed durations: a rank that cannot
start its next F or I runs a W instead. F and I keep their order.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import dropwhile

from autosplit.errors import ScheduleError
from autosplit.pipeline.schedule.schedule import SPLIT_KINDS, Action, ActionKind, Schedule
from autosplit.pipeline.simulation.playing import ListScheduler, play, rows_of
from autosplit.pipeline.simulation.step_graph import StepGraph

Row = tuple[Action, ...]
"""The actions of one rank, in order."""


@dataclass(frozen=True)
class ScheduleTemplate:
    """The order of F and B from a builder, before the backward is split.

    Attributes:
        rows: per rank, its F and B; a schedule that places its own Ws lists I and W as well.
        placement: ``placement[stage]`` is the rank that holds the stage.
        budget: for ``weights="fill"``, the most pairs (stage, microbatch) between F and W on a
            rank.
        weights_in_cooldown: for ``weights="2bp"``: per rank, the number of last Is that are each
            followed by one W; the other Ws run at the end. None if 2BP has no such schedule.
        crosses_step: see ``Schedule``.
    """

    rows: tuple[Row, ...]
    placement: tuple[int, ...]
    budget: int = 0
    weights_in_cooldown: tuple[int, ...] | None = None
    crosses_step: bool = False


def forward(stage: int, microbatch: int) -> Action:
    """The action F of a stage and a microbatch."""
    return Action(stage, ActionKind.FORWARD, microbatch)


def backward(stage: int, microbatch: int) -> Action:
    """The action B of a stage and a microbatch."""
    return Action(stage, ActionKind.BACKWARD, microbatch)


def most_in_flight(row: Sequence[Action]) -> int:
    """The most pairs (stage, microbatch) whose F has run and whose B (or W) has not, anywhere in a
    row.
    """
    most = flying = 0
    for action in row:
        if action.kind is ActionKind.FORWARD:
            flying += 1
            most = max(most, flying)
        elif action.kind in (ActionKind.BACKWARD, ActionKind.BACKWARD_WEIGHT):
            flying -= 1
    return most


StageTimes = tuple[float, float, float]
"""Assumed durations of one stage's F, I and W in any common unit."""

Numbers = list[list[int]]
"""Rows with their Ws, as the numbers of a ``WeightPlacer``'s actions."""


class WeightPlacer:
    """Adds each rank's Ws to its order of F and I, in the order of the Is.

    Args:
        schedule: F and I per rank.
        budget: the most pairs (stage, microbatch) between F and W on a rank. If another F would
            exceed it, a W runs first.
    """

    def __init__(self, schedule: Schedule, budget: int) -> None:
        self._schedule = schedule
        self._budget = budget
        self._rows = rows_of(schedule)
        placed = [(rank, action) for rank, row in enumerate(schedule.ranks) for action in row]
        self._weights: dict[int, int] = {}
        """The number of the W of each I, by the number of the I."""
        for number, (rank, action) in enumerate([*placed]):
            if action.kind is ActionKind.BACKWARD_INPUT:
                self._weights[number] = len(placed)
                weight = Action(action.stage, ActionKind.BACKWARD_WEIGHT, action.microbatch)
                placed.append((rank, weight))
        self._graph = StepGraph(schedule, placed)

    def fill(self, times: Sequence[StageTimes], *, patience: float = 0.0) -> Numbers:
        """Place each W, and return each rank's row as numbers of actions, for ``rows``.

        Args:
            times: per stage, the assumed durations.
            patience: fraction of a W's duration. If an F or I can start within that time, the rank
                waits for it instead of starting a W.

        Raises:
            ScheduleError: the orders deadlock, or cannot keep within the budget.
        """
        graph, seconds = self._graph, self._seconds(times)
        scheduler = ListScheduler(graph, seconds, len(self._rows))
        orders = [deque(row) for row in self._rows]
        pending: list[deque[int]] = [deque() for _ in self._rows]
        in_flight = [0] * len(self._rows)

        def choose(rank: int, now: float) -> int | None:
            """The next F or I if it can start, else the next W, else None."""
            start = math.inf
            if orders[rank]:
                action = orders[rank][0]
                forward = graph.actions[action].kind is ActionKind.FORWARD
                if not forward or in_flight[rank] < self._budget:
                    start = scheduler.ready(action)
                if start <= now:
                    in_flight[rank] += forward
                    if action in self._weights:
                        pending[rank].append(self._weights[action])
                    return orders[rank].popleft()
            if not pending[rank] or start - now < patience * seconds[pending[rank][0]]:
                return None
            in_flight[rank] -= 1
            return pending[rank].popleft()

        scheduler.run(choose)
        stuck = [str(graph.actions[order[0]]) for order in orders if order]
        if stuck:
            raise ScheduleError(
                f"no place for the backward weights within {self._budget} microbatches in flight: "
                f"nothing can run while {', '.join(stuck)} wait. Change the order of these "
                "actions, or allow more microbatches in flight"
            )
        return scheduler.rows

    def rows(self, numbers: Numbers) -> tuple[Row, ...]:
        """The actions that the numbers returned by ``fill`` stand for."""
        return tuple(tuple(self._graph.actions[n] for n in row) for row in numbers)

    def step(self, numbers: Numbers, times: Sequence[StageTimes]) -> float:
        """Seconds of a step with the rows that ``fill`` returned, as ``simulate`` computes them for
        links that take no time.
        """
        seconds = self._seconds(times)
        begun = play(self._graph, numbers, seconds).starts
        starts = [begun[row[0]] if row else 0.0 for row in numbers]
        ends = [begun[row[-1]] + seconds[row[-1]] if row else 0.0 for row in numbers]
        if not self._schedule.crosses_step:
            starts = [min(starts)] * len(starts)
        return max(end - start for start, end in zip(starts, ends, strict=True))

    def _seconds(self, times: Sequence[StageTimes]) -> list[float]:
        return [
            times[action.stage][SPLIT_KINDS.index(action.kind)] for action in self._graph.actions
        ]


WEIGHTS = ("2bp", "fill")
"""Known placements of W."""

_PATIENCE = (0.5, 0.25, 0.0, 1.0)


def place_weights(
    name: str,
    template: ScheduleTemplate,
    weights: str | None,
    times: Sequence[StageTimes] | None,
) -> Schedule:
    """Build a schedule from the order of its forwards and backwards, by placing the Ws.

    ``"fill"`` puts Ws into gaps. It tries equal times for F, I and W and, if ``times`` is passed,
    those times too, and keeps the shorter step. The order for equal times is hard to beat: with
    measured times, a greedy choice may start a W that does not fit its gap, and delay every stage.

    Args:
        name: the schedule's name.
        template: the order of F and B.
        weights: ``"2bp"`` (Ws in the cool-down and at the end of each row, as in the 2BP paper),
            ``"fill"``, or None to keep the rows.
        times: the times of each stage, for ``"fill"``; None means F = I = W.

    Raises:
        ScheduleError: the Ws cannot be placed within ``template.budget``.
    """
    rows = template.rows
    if weights == "fill":
        unfilled = with_rows(name, template, tuple(map(_inputs_only, rows)))
        placer = WeightPlacer(unfilled, template.budget)
        best = placer.fill([(1.0, 1.0, 1.0)] * unfilled.stages)
        if times is not None:
            greedy = (placer.fill(times, patience=patience) for patience in _PATIENCE)
            best = min((best, *greedy), key=lambda numbers: placer.step(numbers, times))
        rows = tuple(map(complete_by_stage, placer.rows(best)))
    elif weights == "2bp" and template.weights_in_cooldown is not None:
        pairs = zip(rows, template.weights_in_cooldown, strict=True)
        rows = tuple(_paper_order(_inputs_only(row), count) for row, count in pairs)
    return with_rows(name, template, rows)


def complete_by_stage(row: Row, order: Sequence[int] = ()) -> Row:
    """Return a row whose Ws at the end run stage by stage, so that stages are complete early.

    These Ws may run in any order, because no rank waits for a W. Stages run one after another, in
    the order of their last Ws, so no stage is complete later than before, however long Ws take.
    Reductions of gradients start no later, either.

    Args:
        row: a rank's row.
        order: the stages of these Ws in another order; empty: in the order of their last Ws.
    """
    rest = [*reversed([*dropwhile(is_weight, reversed(row))])]
    weights = row[len(rest) :]
    last = {action.stage: place for place, action in enumerate(weights)}
    places = {
        stage: place for place, stage in enumerate(order or sorted(last, key=last.__getitem__))
    }
    return (*rest, *sorted(weights, key=lambda action: places[action.stage]))


def is_weight(action: Action) -> bool:
    """Whether an action is a W."""
    return action.kind is ActionKind.BACKWARD_WEIGHT


def _inputs_only(row: Sequence[Action]) -> Row:
    """The row with each B replaced by its I."""
    return tuple(
        replace(action, kind=ActionKind.BACKWARD_INPUT)
        if action.kind is ActionKind.BACKWARD
        else action
        for action in row
    )


def with_full_backwards(schedule: Schedule) -> Schedule:
    """The schedule with B in place of each I, and without W and moves."""
    forward, backward = ActionKind.FORWARD, ActionKind.BACKWARD
    kinds = {forward: forward, ActionKind.BACKWARD_INPUT: backward, backward: backward}
    rows = [
        tuple([replace(action, kind=kinds[action.kind]) for action in row if action.kind in kinds])
        for row in schedule.ranks
    ]
    return replace(schedule, ranks=tuple(rows), split_backward=False)


def _paper_order(row: Row, count: int) -> Row:
    """A row in the order of 2BP: one W after each of the last ``count`` Is, and the other Ws at the
    end.
    """
    inputs = [action for action in row if action.kind is ActionKind.BACKWARD_INPUT]
    followed = set(inputs[max(len(inputs) - count, 0) :])
    pending = [replace(action, kind=ActionKind.BACKWARD_WEIGHT) for action in inputs]
    pending.reverse()
    result = []
    for action in row:
        result.append(action)
        if action in followed:
            result.append(pending.pop())
    return (*result, *reversed(pending))


def with_rows(name: str, template: ScheduleTemplate, ranks: tuple[Row, ...]) -> Schedule:
    """The schedule with these rows and the placement of ``template``."""
    actions = [action for row in ranks for action in row]
    return Schedule(
        name,
        len(template.placement),
        1 + max(action.microbatch for action in actions),
        ranks,
        template.placement,
        any(action.kind is ActionKind.BACKWARD_INPUT for action in actions),
        template.crosses_step,
    )
