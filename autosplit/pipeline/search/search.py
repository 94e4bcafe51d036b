"""Search for ``schedule="auto"``: the shortest step for measured costs under a memory cap.

Candidates are all named schedules, and list scheduling with look-ahead, which defers every W for as
long as memory allows, so that a W is available in any wait.
"""

from __future__ import annotations

import contextlib
import itertools
import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

from autosplit.errors import ScheduleError
from autosplit.pipeline.builders.build import SCHEDULES, build
from autosplit.pipeline.builders.placement import StageTimes, complete_by_stage, is_weight
from autosplit.pipeline.schedule.routes import StageDataflow
from autosplit.pipeline.schedule.schedule import (
    SPLIT_KINDS,
    Action,
    ActionKind,
    Schedule,
    check_counts,
    check_size,
)
from autosplit.pipeline.search.bounding import caps_of
from autosplit.pipeline.simulation.activation_memory import ROUNDING, peak_memory
from autosplit.pipeline.simulation.playing import ListScheduler, replay
from autosplit.pipeline.simulation.simulate import Costs
from autosplit.pipeline.simulation.step_graph import StepGraph

_PATIENCE = 0.5  # of a W: how long a free rank waits for an F or I rather than start a W


def search(
    costs: Costs,
    microbatches: int,
    *,
    ranks: int | None = None,
    placement: Sequence[int] | None = None,
    cap: float | Sequence[float] = math.inf,
) -> Schedule:
    """Find the schedule with the shortest step; deterministic.

    Candidates are every named schedule that the counts admit, in every form: with full backwards,
    and with each placement of its W. Further candidates come from list scheduling on the same
    placements of stages. So the result is never worse than the best named schedule under the same
    cap, with the links and the wiring of ``costs``.

    Args:
        costs: the costs of every stage, and how the trainer runs them.
        microbatches: the number of microbatches, at least 1.
        ranks: number of processes; None means one for each stage.
        placement: the rank of every stage; None leaves it open.
        cap: the most that a rank may keep of its microbatches, in the unit of ``costs.memory``: one
            number, or one for each rank.

    Returns:
        A schedule named ``"auto"``. Ranks wait for each other between steps.

    Raises:
        ScheduleError: a count is not an integer of at least 1, the step has more than
            ``schedule.LARGEST`` actions, or no schedule was found under the cap.
    """
    ranks = len(costs.times) if ranks is None else ranks
    caps = caps_of(cap, ranks)
    candidates = named_schedules(costs.times, microbatches, ranks, placement)
    placements = dict.fromkeys(schedule.placement for schedule in candidates)
    candidates += constructed(costs, microbatches, placements, caps)
    candidates += [*reduced_early(candidates, costs)]
    peaks = [peak_memory(schedule, costs.memory) for schedule in candidates]
    fitting = [
        schedule
        for schedule, rank_peaks in zip(candidates, peaks, strict=True)
        if all(peak <= cap * ROUNDING for peak, cap in zip(rank_peaks, caps, strict=True))
    ]
    if not fitting:
        raise ScheduleError(
            f"no schedule found within the cap {cap}; the most frugal schedule keeps "
            f"{min(map(max, peaks)):g} on its fullest rank, in the unit of costs.memory: raise the "
            "cap, or cut the batch into more microbatches"
        )
    best = min(fitting, key=lambda schedule: costs.timeline(schedule).makespan)
    return replace(best, name="auto")


def named_schedules(
    times: Sequence[StageTimes],
    microbatches: int,
    ranks: int,
    placement: Sequence[int] | None = None,
) -> list[Schedule]:
    """Every named schedule, in every form. Ranks wait for each other between steps.

    Args:
        times: per stage, seconds of F, I and W.
        microbatches: the number of microbatches.
        ranks: number of processes.
        placement: the rank of every stage; None: any.

    Raises:
        ScheduleError: bad counts, or no named schedule admits the counts or the placement.
    """
    check_counts(ranks=ranks, microbatches=microbatches)
    check_size(len(times), microbatches)
    schedules = []
    for name in SCHEDULES:
        with contextlib.suppress(ScheduleError):
            for _, schedule in forms(name, times, microbatches, ranks):
                if placement is None or schedule.placement == tuple(placement):
                    schedules.append(replace(schedule, crosses_step=False))
    if not schedules and placement is not None:
        raise ScheduleError(
            f"no named schedule places the stages on the ranks {list(placement)}: leave "
            "placement out, or pass the placement of a built schedule"
        )
    if not schedules:
        raise ScheduleError(
            f"{len(times)} stages cannot fill {ranks} ranks: each rank needs at least one stage; "
            f"use at most {len(times)} ranks"
        )
    return schedules


def forms(
    name: str, times: Sequence[StageTimes], microbatches: int, ranks: int
) -> Iterator[tuple[str, Schedule]]:
    """Yield (name of the form, schedule) for each form of a named schedule: with full backwards, if
    it admits them, and with each placement of W that it admits.

    Raises:
        ScheduleError: the schedule does not admit the counts.
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
    """Yield schedules that list scheduling builds. Some rules run F before I while there is memory;
    others run I before F.

    Args:
        costs: the costs of every stage.
        microbatches: the number of microbatches.
        placements: the placements of the stages; each gets schedules of its own.
        caps: per rank, the most memory that it may keep.
    """
    for placement, forward_first in itertools.product(placements, (True, False)):
        construction = _Construction(costs, microbatches, placement, caps, forward_first)
        schedule = construction.schedule()
        # A schedule must be legal for every wiring (see ``routes``). Where a stage takes nothing
        # from the one before, the order may be too free.
        if schedule is not None and not replay(schedule).waits:
            yield schedule


def reduced_early(schedules: Iterable[Schedule], costs: Costs) -> Iterator[Schedule]:
    """Yield schedules with another order of the Ws at the end of rows, which hides reductions best.

    Each rank computes the Ws of one stage after another, and reduces a stage's gradients beside the
    next stages' Ws: a flow shop of two machines, whose shortest order is that of S. M. Johnson
    (1954).

    Args:
        schedules: the schedules; those in whose rows nothing changes are left out.
        costs: the costs of every stage.
    """
    if not any(stage.reduction for stage in costs.collectives):
        return
    for schedule in schedules:
        ranks = tuple(complete_by_stage(row, _shortest_order(row, costs)) for row in schedule.ranks)
        if ranks != schedule.ranks:
            yield replace(schedule, ranks=ranks)


def _shortest_order(row: Sequence[Action], costs: Costs) -> list[int]:
    """Return the stages that have Ws at the end of a row, in Johnson's order.

    First come the stages whose reduction takes longer than their Ws, by the time of their Ws. Then
    come the others, the longest reduction first.
    """
    weights: dict[int, float] = defaultdict(float)
    for action in itertools.takewhile(is_weight, reversed(row)):
        weights[action.stage] += costs.seconds(action)

    def place(stage: int) -> tuple[bool, float]:
        reduction = costs.collectives[stage].reduction
        is_hidden = weights[stage] > reduction
        return is_hidden, -reduction if is_hidden else weights[stage]

    return sorted(weights, key=place)


class _Construction:
    """Builds an order of F, I and W within caps, action by action. It tracks the memory that each
    rank keeps, and the next microbatch of each stage and kind.
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
        steps = itertools.product(range(stages), SPLIT_KINDS, range(microbatches))
        graph = StepGraph(
            self._empty,
            ((placement[step[0]], Action(*step)) for step in steps),
            dataflow=None if costs.wiring is None else StageDataflow(stages, costs.wiring),
            transfer=costs.transfer,
        )
        self._actions = graph.actions
        self._seconds = [costs.seconds(action) for action in self._actions]
        self._scheduler = ListScheduler(graph, self._seconds, len(caps))
        self._kept = [0.0] * len(caps)
        self._next = dict.fromkeys(itertools.product(range(stages), SPLIT_KINDS), 0)

    def schedule(self) -> Schedule | None:
        """The schedule in the built order; None if the rules run into a dead end."""
        self._scheduler.run(self._choose)
        rows = [tuple(self._actions[number] for number in row) for row in self._scheduler.rows]
        done = sum(map(len, rows)) == len(self._actions)
        return replace(self._empty, ranks=tuple(rows)) if done else None

    def _choose(self, rank: int, now: float) -> int | None:
        """The number of the best action that can start now; None if the rank should wait."""
        stages = self._empty.stages_on(rank)
        able = [*filter(self._has_room, self._coming(stages, SPLIT_KINDS[:2]))]
        starts = {number: self._scheduler.ready(number) for number in able}
        now_able = [number for number in able if starts[number] <= now]
        chosen = min(now_able, key=self._order, default=None)
        if chosen is None:
            chosen = self._weight(stages, now, min(starts.values(), default=math.inf) - now)
        if chosen is not None:
            action = self._actions[chosen]
            change = self._costs.memory[action.stage].change(action.kind)
            self._kept[rank] += change.allocated - change.freed
            self._next[action.stage, action.kind] += 1
        return chosen

    def _coming(self, stages: Sequence[int], kinds: Sequence[ActionKind]) -> Iterator[int]:
        """Yield the number of the next action of each stage and kind."""
        count = self._empty.microbatches
        for stage, kind in itertools.product(stages, kinds):
            if self._next[stage, kind] < count:
                place = stage * len(SPLIT_KINDS) + SPLIT_KINDS.index(kind)
                yield place * count + self._next[stage, kind]

    def _order(self, number: int) -> tuple[bool, int]:
        """Sort key: the F nearest to the loss, or the I nearest to the first stage, comes first."""
        action = self._actions[number]
        forward = action.kind is ActionKind.FORWARD
        return forward != self._forward_first, -action.stage if forward else action.stage

    def _weight(self, stages: Sequence[int], now: float, wait: float) -> int | None:
        """The oldest W that can run; None if waiting ``wait`` seconds for an F or I is better."""
        able = (n for n in self._coming(stages, SPLIT_KINDS[2:]) if self._scheduler.ready(n) <= now)
        weight = min(able, key=lambda n: self._actions[n].microbatch, default=None)
        return None if weight is None or wait < _PATIENCE * self._seconds[weight] else weight

    def _has_room(self, number: int) -> bool:
        """Whether a rank may start an action and still have room for the same microbatch on its
        later stages.

        Otherwise a rank with a later stage would fill up with activations that only the later stage
        can free.
        """
        action, memory = self._actions[number], self._costs.memory
        rank = self._empty.placement[action.stage]
        needed = memory[action.stage].change(action.kind).allocated
        if action.kind is ActionKind.FORWARD:
            later = (stage for stage in self._empty.stages_on(rank) if stage > action.stage)
            needed += sum(memory[stage].saved for stage in later)
        return self._kept[rank] + needed <= self._caps[rank] * ROUNDING
