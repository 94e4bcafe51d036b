"""A step with measures of memory as a constraint model: the yardstick for ``search_within``.

What a microbatch holds may be away at the partner or in the host's store, whole, or be made again.
Of moves the model has less than the engine keeps to: a transfer may begin at any moment and stands
in no row, and takes nothing of its rank, so no step of ours can be shorter than what it finds for
whole microbatches.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from autosplit.mesh.link import Link
from autosplit.pipeline.schedule.action import Action
from autosplit.pipeline.search.problem import FORWARD, FULL, INPUT, WEIGHT, Problem
from autosplit.pipeline.search.search import caps_of

from .constraint_model import StepModel
from .shortest_step import Solved, check_provable, solved
from .units import Units


def least_step(
    costs: Any,
    microbatches: int,
    limit: float | Sequence[float],
    *,
    placement: Sequence[int],
    measures: Sequence[str] = ("balance", "offload", "recompute"),
    seconds: float = 60.0,
) -> Solved:
    """The shortest step within a limit that a solver finds, and seconds that none undercuts, with
    whole microbatches moved; small cases.

    Args:
        costs: of every stage.
        microbatches: M >= 1.
        limit: of what a rank holds of its microbatches, one number or one for each rank.
        placement: the rank of every stage.
        measures: which may be taken.
        seconds: how long to search; what is not proved by then is the best and the bound so far.

    Raises:
        ScheduleError: OR-tools is not installed, or too many actions.
    """
    check_provable(len(costs.times), microbatches)
    caps = caps_of(limit, 1 + max(placement))
    problem = Problem(costs, placement, microbatches, caps)
    return solved(lambda solver: MemoryModel(solver, problem, measures), seconds)


class Move(NamedTuple):
    """What one action leaves for the next, away for a while, if that is chosen.

    Attributes:
        forward: the number of the F of that microbatch.
        deferred: whether it is what I leaves for W.
        rank: whose it is.
        holder: the rank that has it meanwhile; None for the host's store.
        chosen: whether it is.
        left: when it begins to leave, and ``gone``: has left.
        comes: when it begins to come back, and ``back``: is there again.
    """

    forward: int
    deferred: bool
    rank: int
    holder: int | None
    chosen: Any
    left: Any
    gone: Any
    comes: Any
    back: Any


class MemoryModel(StepModel):
    """The model of a problem with measures.

    Args:
        solver: the module ``ortools.sat.python.cp_model``.
        problem: the step, with caps.
        measures: which may be taken.
    """

    def __init__(self, solver: Any, problem: Problem, measures: Sequence[str]) -> None:
        self._measures = measures
        self._again: dict[int, tuple[Any, Any, Any]] = {}
        """By F, whether it is run again, and from when to when."""
        self._lanes: dict[tuple[int, object], list[Any]] = defaultdict(list)
        self._kept: dict[int, list[tuple[Any, int]]] = defaultdict(list)
        self._computes: dict[int, list[Any]] = defaultdict(list)
        """By rank, when it computes."""
        self._moves: list[Move] = []
        super().__init__(solver, problem, None, self._transfers(problem))

    def _transfers(self, problem: Problem) -> Iterator[float]:
        """Seconds of every transfer that there may be."""
        transfer = problem.costs.transfer
        for rank in range(len(problem.caps)):
            partner = len(problem.caps) - 1 - rank
            for link in (transfer.link(rank, partner), transfer.host or Link()):
                yield link.latency
                for stage, home in enumerate(problem.placement):
                    if home == rank:
                        kept = problem.costs.memory[stage]
                        yield from (size / link.bandwidth for size in (kept.saved, kept.deferred))

    def _add_ranks(self) -> None:
        spans = self._computes
        for number in self._numbers:
            start, end = self._starts[number], self._ends[number]
            rank = self.problem.ranks[number]
            spans[rank].append(self.model.new_interval_var(start, self._lasts(number), end, ""))
            if self.problem.actions[number].kind is FORWARD and "recompute" in self._measures:
                chosen, begin, finish = self.model.new_bool_var(""), self._moment(), self._moment()
                inputs = self.problem.part(number, INPUT)
                self.model.add(begin >= end).only_enforce_if(chosen)
                self.model.add(finish <= self._starts[inputs]).only_enforce_if(chosen)
                spans[rank].append(
                    self.model.new_optional_interval_var(
                        begin, self._took[number], finish, chosen, ""
                    )
                )
                self._again[number] = chosen, begin, finish
        for row in spans.values():
            self.model.add_no_overlap(row)

    def _add_memory(self, rank: int) -> None:
        """All ranks at once, with the last: what one evicts another holds."""
        if rank < len(self.problem.caps) - 1:
            return
        memory, count = self.problem.costs.memory, self.problem.microbatches
        numbers = (s for m in memory for s in (m.saved, m.deferred, m.inputs, *m.workspace))
        units = Units(numbers, finest=10**6)
        for forward in self._numbers:
            action = self.problem.actions[forward]
            if action.kind is not FORWARD:
                continue
            size, inputs = memory[action.stage], forward + count
            saved, deferred = units.above(size.saved), units.above(size.deferred)
            whole = self._fused.get(inputs)
            there = self.problem.ranks[forward]
            apart = True if whole is None else ~whole
            self._phase(forward, self._starts[forward], self._ends[forward], inputs, saved, True)
            self._keep(there, self._starts[inputs], self._ends[inputs], max(saved, deferred), apart)
            if whole is not None:
                self._keep(there, self._starts[inputs], self._ends[inputs], saved, whole)
            self._phase(
                inputs, self._ends[inputs], self._ends[inputs], inputs + count, deferred, apart
            )
            self._keep(
                there, self._starts[inputs + count], self._ends[inputs + count], deferred, apart
            )
            self._work(forward, units)
        for each, kept in self._kept.items():
            if not math.isinf(self.problem.caps[each]):
                room = units.below(self.problem.caps[each])
                self.model.add_cumulative([s for s, _ in kept], [d for _, d in kept], room)
        for lane in self._lanes.values():
            self.model.add_no_overlap(lane)

    def _work(self, forward: int, units: Units) -> None:
        """What actions on a microbatch hold while they run."""
        size = self.problem.costs.memory[self.problem.actions[forward].stage]
        inputs = forward + self.problem.microbatches
        whole = self._fused.get(inputs)
        spans = [
            (FORWARD, forward, True),
            (INPUT, inputs, True if whole is None else ~whole),
            (WEIGHT, inputs + self.problem.microbatches, True if whole is None else ~whole),
        ]
        if whole is not None:
            spans.append((FULL, inputs, whole))
        rank = self.problem.ranks[forward]
        for kind, number, present in spans:
            size_beside = units.above(size.beside(kind))
            self._keep(rank, self._starts[number], self._ends[number], size_beside, present)
        if forward in self._again:
            chosen, begin, finish = self._again[forward]
            self._keep(rank, begin, finish, units.above(size.beside(FORWARD)), chosen)

    def _phase(self, maker: int, start: Any, made: Any, use: int, size: int, present: Any) -> None:
        """What is held from one action to the start of the next: here, away, or made again."""
        model, rank = self.model, self.problem.ranks[maker]
        action: Action = self.problem.actions[maker]
        used = self._starts[use]
        choices = []
        stays = model.new_bool_var("")
        choices.append(stays)
        self._keep(rank, start, used, size, stays)
        partner = len(self.problem.caps) - 1 - rank
        ways: list[tuple[Link, tuple[int, object], tuple[int, object], int | None]] = []
        if "balance" in self._measures and partner != rank:
            link = self.problem.costs.transfer.link(rank, partner)
            ways.append((link, (rank, partner), (partner, rank), partner))
        if "offload" in self._measures:
            host = self.problem.costs.transfer.host or Link()
            ways.append((host, (rank, "out"), (rank, "in"), None))
        kept = self.problem.costs.memory[action.stage]
        bytes_there = kept.saved if action.kind is FORWARD else kept.deferred
        for link, out, back, holder in ways:
            chosen = model.new_bool_var("")
            choices.append(chosen)
            took = max(self.shortest, self.units.nearest(bytes_there / link.bandwidth))
            late = self.units.nearest(link.latency)
            left, gone, comes, there = (self._moment() for _ in range(4))
            for lane, first, last in ((out, left, gone), (back, comes, there)):
                self._lanes[lane].append(
                    model.new_optional_interval_var(first, took, last, chosen, "")
                )
            model.add(left >= made).only_enforce_if(chosen)
            model.add(comes >= gone + late).only_enforce_if(chosen)
            model.add(there + late <= used).only_enforce_if(chosen)
            deferred = action.kind is not FORWARD
            forward = maker - self.problem.microbatches * deferred
            move = Move(forward, deferred, rank, holder, chosen, left, gone, comes, there)
            self._moves.append(move)
            self._keep(rank, start, self._until(rank, gone, chosen, holder), size, chosen)
            self._keep(rank, comes, used, size, chosen)
            if holder is not None:
                self._keep(holder, left, self._until(holder, there, chosen, rank), size, chosen)
        if maker in self._again and action.kind is FORWARD:
            chosen, begin, _ = self._again[maker]
            choices.append(chosen)
            inputs = round(size * kept.inputs / kept.saved) if kept.saved else 0
            self._keep(rank, start, made, size, chosen)
            self._keep(rank, made, begin, inputs, chosen)
            self._keep(rank, begin, used, size, chosen)
        if present is True:
            model.add_exactly_one(choices)
        else:
            model.add(sum(choices) == 1).only_enforce_if(present)
            model.add(sum(choices) == 0).only_enforce_if(~present)

    def _until(self, rank: int, moment: Any, chosen: Any, taker: int | None) -> Any:
        """Until when what has left a rank at a moment counts there; ``taker``: for which rank."""
        return moment

    def _keep(self, rank: int, start: Any, end: Any, size: int, present: Any) -> None:
        if size:
            self._kept[rank].append((self._span(start, end, present), size))
