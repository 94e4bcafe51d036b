"""Orders that a search begins from: the named schedules, and what list scheduling makes.

List scheduling with look-ahead: defer every W for as long as memory allows, so that it is there to
run in any wait.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Sequence
from dataclasses import replace

from autosplit.errors import ScheduleError
from autosplit.pipeline.builders.build import SCHEDULES, build
from autosplit.pipeline.builders.placement import StageTimes
from autosplit.pipeline.schedule.action import ActionKind
from autosplit.pipeline.schedule.schedule import Schedule
from autosplit.pipeline.simulation.playing import ListScheduler

from .problem import FORWARD, INPUT, KINDS, WEIGHT, Problem


def named_schedules(
    times: Sequence[StageTimes],
    microbatches: int,
    ranks: int,
    placement: Sequence[int] | None = None,
) -> Iterator[Schedule]:
    """Every named schedule, in every form, without crossing steps.

    Args:
        times: per stage, seconds of F, I and W.
        microbatches: M.
        ranks: number of processes.
        placement: the rank of every stage; None: any.
    """
    for name in SCHEDULES:
        with contextlib.suppress(ScheduleError):
            for _, schedule in forms(name, times, microbatches, ranks):
                if placement is None or schedule.placement == tuple(placement):
                    yield replace(schedule, crosses_step=False)


def forms(
    name: str, times: Sequence[StageTimes], microbatches: int, ranks: int
) -> Iterator[tuple[str, Schedule]]:
    """A named schedule fused, if it can be, and with each placement of W that it admits, each with
    what that is called.

    Raises:
        ScheduleError: it does not admit the counts.
    """
    family = SCHEDULES[name]
    for weights in (*(["fused"] if family.fused else []), *(family.weights or ("own",))):
        yield (
            weights,
            build(
                name,
                len(times),
                microbatches,
                ranks=ranks,
                split_backward=weights != "fused",
                weights=weights if weights in family.weights else None,
                times=times if weights == "fill" else None,
            ),
        )


_PATIENCE = 0.5  # of a W: a free rank rather waits for an F or I that is known to come as soon


def construct(problem: Problem, forward_first: bool) -> Schedule | None:
    """An order of F, I and W within the caps, or None if the policy runs into a dead end. Where a B
    is better, local search finds that.

    Args:
        problem: of the step.
        forward_first: F before I while there is memory, else I before F.
    """
    scheduler = ListScheduler(problem, problem.seconds, len(problem.caps))
    chooser = _Chooser(problem, forward_first, scheduler)
    scheduler.run(chooser.choose)
    return None if chooser.left else problem.schedule(scheduler.rows)


class _Chooser:
    """What each rank keeps, and what is next of each stage and kind."""

    def __init__(self, problem: Problem, forward_first: bool, scheduler: ListScheduler) -> None:
        count = len(problem.caps)
        self.left = 3 * len(problem.placement) * problem.microbatches
        self._problem = problem
        self._forward_first = forward_first
        self._scheduler = scheduler
        self._kept = [0.0] * count
        self._next = {(stage, kind): 0 for stage in range(len(problem.placement)) for kind in KINDS}
        self._stages = [
            [stage for stage, rank in enumerate(problem.placement) if rank == each]
            for each in range(count)
        ]

    def choose(self, rank: int, now: float) -> int | None:
        """The best action that can start now; None to wait."""
        action = self._best(rank, now)
        if action is not None:
            self._run(rank, action)
        return action

    def _best(self, rank: int, now: float) -> int | None:
        best: tuple[tuple[float, ...], int] | None = None
        soonest = math.inf
        for stage in self._stages[rank]:
            for kind in (FORWARD, INPUT):
                action = self._next_of(stage, kind)
                if action is None or not self._has_room(action):
                    continue
                start = self._scheduler.ready(action)
                soonest = min(soonest, start)
                if start <= now:
                    is_forward = kind is FORWARD
                    # Of two Fs the one nearest to the loss, of two Is the one nearest to the start.
                    order = (
                        is_forward != self._forward_first,
                        -stage if is_forward else stage,
                    )
                    best = min(best, (order, action)) if best else (order, action)
        return best[1] if best is not None else self._weight(rank, soonest - now)

    def _weight(self, rank: int, wait: float) -> int | None:
        """The oldest W that can run; None where it is better to ``wait`` for something else."""
        problem = self._problem
        pending = [self._next_of(stage, WEIGHT) for stage in self._stages[rank]]
        weights = [action for action in pending if action is not None]
        if not weights:
            return None
        weight = min(weights, key=lambda action: problem.actions[action].microbatch)
        return None if wait < _PATIENCE * problem.seconds[weight] else weight

    def _run(self, rank: int, action: int) -> None:
        problem, what = self._problem, self._problem.actions[action]
        self.left -= 1
        self._kept[rank] += problem.adds[action] - problem.frees[action]
        self._next[what.stage, what.kind] += 1

    def _next_of(self, stage: int, kind: ActionKind) -> int | None:
        """The stage's next action of a kind, if the stage has run what it needs of itself."""
        microbatch = self._next[stage, kind]
        before = self._problem.microbatches
        if kind is not FORWARD:
            before = self._next[stage, KINDS[KINDS.index(kind) - 1]]
        return self._number(stage, kind, microbatch) if microbatch < before else None

    def _number(self, stage: int, kind: ActionKind, microbatch: int) -> int:
        place = stage * len(KINDS) + KINDS.index(kind)
        return place * self._problem.microbatches + microbatch

    def _has_room(self, action: int) -> bool:
        """Whether the rank may start ``action``, leaving room for the same microbatch further on.

        A rank that holds a later stage as well would otherwise fill up with what only that stage
        can let go.
        """
        problem = self._problem
        what, rank = problem.actions[action], problem.ranks[action]
        later = 0.0
        for stage in self._stages[rank] if what.kind is FORWARD else ():
            if stage > what.stage:
                later += problem.costs.memory[stage].saved
        room = problem.room[rank] - self._kept[rank]
        return problem.adds[action] + later <= room
