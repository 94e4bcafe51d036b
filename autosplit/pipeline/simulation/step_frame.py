"""The compute actions of a step, numbered once, for as many orders of them as are to be played."""

from __future__ import annotations

from collections.abc import Callable

from autosplit.pipeline.schedule.action import Action, ActionKind
from autosplit.pipeline.schedule.schedule import Schedule
from autosplit.pipeline.schedule.wiring import Feeds

from .step_graph import StepGraph
from .transfer import Transfer

_KINDS = tuple(kind for kind in ActionKind if kind.is_compute)


class StepFrame:
    """Every F, I, W, B and RECOMPUTE of a step, with who waits for whom.

    Args:
        schedule: where stages lie, and how many microbatches there are.
        seconds: how long an action takes.
        feeds: who feeds whom; None: each stage the next.
        transfer: the links between ranks.

    Attributes:
        numbers: of every action.
        graph: of them; not to be changed.
        seconds: by number.
    """

    def __init__(
        self,
        schedule: Schedule,
        seconds: Callable[[Action], float],
        *,
        feeds: Feeds | None,
        transfer: Transfer,
    ) -> None:
        actions = [
            Action(stage, kind, microbatch)
            for stage in range(schedule.stages)
            for kind in _KINDS
            for microbatch in range(schedule.microbatches)
        ]
        self.numbers = {action: number for number, action in enumerate(actions)}
        placed = [(schedule.home(each.stage, each.microbatch), each) for each in actions]
        self.graph = StepGraph(schedule, placed, feeds=feeds, transfer=transfer)
        self.seconds = [seconds(action) for action in actions]

    def lay(self, schedule: Schedule) -> tuple[StepGraph, list[list[int]], list[float]] | None:
        """A graph of its own for one order: the graph, and per rank the numbers of its row, and
        seconds by number, of which moves take none.

        None for rows that are no step: an action twice, or elsewhere than its stage.
        """
        graph, numbers = self.graph.copy(), self.numbers
        seconds = [*self.seconds]
        rows: list[list[int]] = []
        for rank, row in enumerate(schedule.ranks):
            listed: list[int] = []
            for action in row:
                if action.kind.is_compute:
                    number = numbers.get(action, -1)
                    if number < 0 or graph.ranks[number] != rank:
                        return None
                else:
                    number = graph.add(rank, action)
                    seconds.append(0.0)
                listed.append(number)
            if len(set(listed)) < len(listed):
                return None
            rows.append(listed)
        return graph, rows, seconds
