"""``schedule="auto"``: the shortest step for measured costs under a cap of memory, of all named
schedules and of list scheduling with look-ahead, which defers every W for as long as memory allows,
so that it is there to run in any wait.
"""

from __future__ import annotations

import contextlib
import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

from autosplit.errors import ScheduleError
from autosplit.pipeline.builders.build import SCHEDULES, build
from autosplit.pipeline.builders.placement import StageTimes
from autosplit.pipeline.schedule.routes import Feeds
from autosplit.pipeline.schedule.schedule import (
    Action,
    ActionKind,
    Schedule,
    check_counts,
    check_size,
)
from autosplit.pipeline.search.measures import caps_of
from autosplit.pipeline.simulation.activation_memory import ROUNDING, peak_memory
from autosplit.pipeline.simulation.playing import ListScheduler, replay
from autosplit.pipeline.simulation.simulate import Costs
from autosplit.pipeline.simulation.step_graph import StepGraph

_KINDS = (ActionKind.FORWARD, ActionKind.BACKWARD_INPUT, ActionKind.BACKWARD_WEIGHT)
_PATIENCE = 0.5  # of a W: a free rank rather waits for an F or I that is known to come as soon


def search(
    costs: Costs,
    microbatches: int,
    *,
    ranks: int | None = None,
    placement: Sequence[int] | None = None,
    cap: float | Sequence[float] = math.inf,
) -> Schedule:
    """The schedule with the shortest step that was found; deterministic.

    Of every named one that the counts admit, in every form (fused, and with each placement of its
    weight gradients, which ``"fill"`` suits to the costs), and of list scheduling on their
    placements: never worse than the best named schedule under the same cap, with the links and the
    wiring that ``costs`` tell of.

    Args:
        costs: of every stage, and how the trainer runs them.
        microbatches: M >= 1.
        ranks: number of processes; None means one for each stage.
        placement: the rank of every stage, where that is settled; None leaves it open.
        cap: the most a rank may keep of its microbatches, in the unit of ``costs.memory``: one
            number, or one for each rank.

    Returns:
        A schedule named ``"auto"``. Ranks wait for each other between steps.

    Raises:
        ScheduleError: a bad count, a step of more than ``schedule.LARGEST`` actions, or nothing
            found under the cap.
    """
    ranks = len(costs.times) if ranks is None else ranks
    caps = caps_of(cap, ranks)
    found = named_schedules(costs.times, microbatches, ranks, placement)
    found += constructed(costs, microbatches, dict.fromkeys(each.placement for each in found), caps)
    peaks = [peak_memory(each, costs.memory) for each in found]
    fitting = [
        each
        for each, held in zip(found, peaks, strict=True)
        if all(most <= cap * ROUNDING for most, cap in zip(held, caps, strict=True))
    ]
    if not fitting:
        raise ScheduleError(
            f"no schedule found within the cap {cap}; the most frugal one keeps "
            f"{min(map(max, peaks)):g} on its fullest rank: raise the cap, or cut the batch into "
            "more microbatches"
        )
    best = min(fitting, key=lambda each: costs.timeline(each).makespan)
    return replace(best, name="auto")


def named_schedules(
    times: Sequence[StageTimes],
    microbatches: int,
    ranks: int,
    placement: Sequence[int] | None = None,
) -> list[Schedule]:
    """Every named schedule, in every form, without crossing steps.

    Args:
        times: per stage, seconds of F, I and W.
        microbatches: M.
        ranks: number of processes.
        placement: the rank of every stage; None: any.

    Raises:
        ScheduleError: bad counts, or none admits them or that placement.
    """
    check_counts(ranks=ranks, microbatches=microbatches)
    check_size(len(times), microbatches)
    found = []
    for name in SCHEDULES:
        with contextlib.suppress(ScheduleError):
            for _, schedule in forms(name, times, microbatches, ranks):
                if placement is None or schedule.placement == tuple(placement):
                    found.append(replace(schedule, crosses_step=False))
    if not found and placement is not None:
        raise ScheduleError(f"no named schedule places the stages on the ranks {list(placement)}")
    if not found:
        raise ScheduleError(
            f"{len(times)} stages cannot fill {ranks} ranks: each rank needs at least one stage"
        )
    return found


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


def constructed(
    costs: Costs,
    microbatches: int,
    placements: Iterable[tuple[int, ...]],
    caps: Sequence[float],
) -> Iterator[Schedule]:
    """What list scheduling makes: F before I while there is memory, and I before F.

    Args:
        costs: of every stage.
        microbatches: M.
        placements: to make some for each.
        caps: per rank, the most it may keep.
    """
    for placement, forward_first in itertools.product(placements, (True, False)):
        made = _Construction(costs, microbatches, placement, caps, forward_first).schedule()
        # It has to be legal for every wiring (see ``routes``): where a stage takes nothing of the
        # one before, an order may be too free.
        if made is not None and not replay(made).waits:
            yield made


class _Construction:
    """An order of F, I and W within caps, made action by action: what each rank keeps, and which
    microbatch is next of each stage and kind.
    """

    def __init__(
        self,
        costs: Costs,
        microbatches: int,
        placement: tuple[int, ...],
        caps: Sequence[float],
        forward_first: bool,
    ) -> None:
        stages = len(placement)
        self._costs, self._caps, self._forward_first = costs, caps, forward_first
        self._empty = Schedule(
            "auto", stages, microbatches, ((),) * len(caps), placement, split_backward=True
        )
        steps = itertools.product(range(stages), _KINDS, range(microbatches))
        self._actions = [Action(*step) for step in steps]
        graph = StepGraph(
            self._empty,
            ((placement[action.stage], action) for action in self._actions),
            feeds=None if costs.wiring is None else Feeds(stages, costs.wiring),
            transfer=costs.transfer,
        )
        self._seconds = [costs.seconds(action) for action in self._actions]
        self._scheduler = ListScheduler(graph, self._seconds, len(caps))
        self._kept = [0.0] * len(caps)
        self._next = dict.fromkeys(itertools.product(range(stages), _KINDS), 0)

    def schedule(self) -> Schedule | None:
        """The order, or None if the policy runs into a dead end."""
        self._scheduler.run(self._choose)
        rows = [tuple(self._actions[number] for number in row) for row in self._scheduler.rows]
        done = sum(map(len, rows)) == len(self._actions)
        return replace(self._empty, ranks=tuple(rows)) if done else None

    def _choose(self, rank: int, now: float) -> int | None:
        """The best action that can start now; None to wait."""
        stages = self._empty.held(rank)
        able = [*filter(self._has_room, self._coming(stages, _KINDS[:2]))]
        starts = {number: self._scheduler.ready(number) for number in able}
        now_able = [number for number in able if starts[number] <= now]
        chosen = min(now_able, key=self._order, default=None)
        if chosen is None:
            chosen = self._weight(stages, now, min(starts.values(), default=math.inf) - now)
        if chosen is not None:
            action = self._actions[chosen]
            change = self._costs.memory[action.stage].change(action.kind)
            self._kept[rank] += change.before - change.after
            self._next[action.stage, action.kind] += 1
        return chosen

    def _coming(self, stages: Sequence[int], kinds: Sequence[ActionKind]) -> Iterator[int]:
        """The numbers of what is next of each stage and kind."""
        count = self._empty.microbatches
        for stage, kind in itertools.product(stages, kinds):
            if self._next[stage, kind] < count:
                place = stage * len(_KINDS) + _KINDS.index(kind)
                yield place * count + self._next[stage, kind]

    def _order(self, number: int) -> tuple[bool, int]:
        """Of two Fs the one nearest to the loss, of two Is the one nearest to the start."""
        action = self._actions[number]
        forward = action.kind is ActionKind.FORWARD
        return forward != self._forward_first, -action.stage if forward else action.stage

    def _weight(self, stages: Sequence[int], now: float, wait: float) -> int | None:
        """The oldest W that can run; None where it is better to ``wait`` for something else."""
        able = (n for n in self._coming(stages, _KINDS[2:]) if self._scheduler.ready(n) <= now)
        weight = min(able, key=lambda n: self._actions[n].microbatch, default=None)
        return None if weight is None or wait < _PATIENCE * self._seconds[weight] else weight

    def _has_room(self, number: int) -> bool:
        """Whether its rank may start an action, leaving room for the same microbatch further on.

        A rank that holds a later stage as well would otherwise fill up with what only that stage
        can let go.
        """
        action, memory = self._actions[number], self._costs.memory
        rank = self._empty.placement[action.stage]
        needed = memory[action.stage].change(action.kind).before
        if action.kind is ActionKind.FORWARD:
            later = (each for each in self._empty.held(rank) if each > action.stage)
            needed += sum(memory[stage].saved for stage in later)
        return self._kept[rank] + needed <= self._caps[rank] * ROUNDING
