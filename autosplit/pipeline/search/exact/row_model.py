"""A step with measures of memory as rows can have it: a start for ``search_within``.

What leaves and what comes counts while a rank computes as if it were there from the start of that
action to its end, and what is to hold more waits for what was sent away before. So a solution has
rows that keep the limit by their order, and take no longer but for what moves take of their ranks
(``Transfer.moves``), which is not in the model: whoever takes them simulates them. Some rows are
better than that: those in which one transfer comes in place of another while a rank computes.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import replace
from importlib.metadata import version
from types import ModuleType
from typing import Any, NamedTuple

from autosplit.pipeline.schedule.action import Action, ActionKind
from autosplit.pipeline.schedule.schedule import Schedule
from autosplit.pipeline.search.problem import FORWARD, FULL, INPUT, Problem
from autosplit.pipeline.simulation.step_costs import Costs

from .memory_model import MemoryModel, Move

_LARGEST = 48  # actions of a step: of more, little is found in seconds
_Pair = tuple[ActionKind | None, ActionKind | None]
_FINER = 1 - 1e-3  # of the best so far: what is hardly shorter is not worth a solution

_ENDS: dict[bool, tuple[_Pair, _Pair]] = {
    True: ((ActionKind.EVICT, ActionKind.ACCEPT), (ActionKind.RETURN, ActionKind.LOAD)),
    False: ((ActionKind.OFFLOAD, None), (None, ActionKind.RELOAD)),
}
"""By whether a partner has it: what begins at both ends as it leaves, and as it comes back."""

_AWAITS, _MOVES, _LATE = range(3)  # at one moment: what takes no time is awaited behind it

Computed = Sequence[tuple[int, int, Action]]
"""When each action of a rank begins and ends."""


class _Key(NamedTuple):
    """What a row is sorted by: where in what its rank computes, and when."""

    place: int
    computes: bool
    moment: int
    kind: int
    tie: tuple[int, ...] = ()


def solver_version() -> str | None:
    """That of OR-tools; None where it is not installed. With the same one the same is found."""
    if _solver() is None:
        return None
    return version("ortools")


def _solver() -> ModuleType | None:
    try:
        from ortools.sat.python import cp_model
    except ModuleNotFoundError:
        return None
    found: ModuleType = cp_model
    return found


def solved_rows(
    costs: Costs,
    microbatches: int,
    caps: Sequence[float],
    placement: Sequence[int],
    measures: Sequence[str],
    *,
    shorter_than: float,
    effort: float,
) -> Schedule | None:
    """A schedule that a solver finds; None where it is not installed, or finds none.

    The same on every machine with the same ``solver_version``.

    Args:
        costs: of every stage, Ws in one piece.
        microbatches: M >= 1.
        caps: per rank, the most that it may hold of its microbatches.
        placement: the rank of every stage.
        measures: which may be taken.
        shorter_than: seconds of the best that is known; infinite where nothing is.
        effort: of the solver, in its own deterministic seconds.
    """
    if costs.early_weights or effort <= 0.0 or min(caps) <= 0.0:
        return None
    solver = _solver() if 3 * len(placement) * microbatches <= _LARGEST else None
    if solver is None:
        return None
    problem = Problem(costs, placement, microbatches, caps)
    model = RowModel(solver, problem, measures, shorter_than)
    engine = solver.CpSolver()
    engine.parameters.num_workers = 1
    engine.parameters.random_seed = 0
    engine.parameters.linearization_level = 0  # whole numbers only, alike on every processor
    engine.parameters.max_deterministic_time = effort
    if engine.solve(model.model) not in (solver.OPTIMAL, solver.FEASIBLE):
        return None
    return model.schedule(engine.value)


class RowModel(MemoryModel):
    """The model of a problem with measures, of what rows can have.

    Args:
        solver: the module ``ortools.sat.python.cp_model``.
        problem: the step, with caps.
        measures: which may be taken.
        shorter_than: seconds.
    """

    finest = 200  # rows have an order, and play tells their times: small numbers are quick
    shortest = 1  # all stand at places of their own: what leaves behind what made it

    def __init__(
        self, solver: Any, problem: Problem, measures: Sequence[str], shorter_than: float
    ) -> None:
        self._points: dict[int, list[Any]] = defaultdict(list)
        """By rank, moments at which it does not compute."""
        super().__init__(solver, problem, measures)
        for rank, points in self._points.items():
            self.model.add_no_overlap([*self._computes[rank], *points])
        self._add_waits()
        self._add_sums()
        most = shorter_than * _FINER
        if most < self.units.value(self._horizon):
            for end in self._ends.values():
                self.model.add(end <= self.units.below(most))

    def _add_sums(self) -> None:
        """Gradients add up in the order of microbatches, also where Bs are better."""
        for number in self._numbers:
            if number + 1 in self._ends and (
                self.problem.actions[number + 1].kind is self.problem.actions[number].kind
                and self.problem.actions[number + 1].stage == self.problem.actions[number].stage
            ):
                self.model.add(self._starts[number + 1] >= self._ends[number])

    def _until(self, rank: int, moment: Any, chosen: Any, taker: int | None) -> Any:
        """What goes to a partner counts until the end of what is computed meanwhile. In place of
        what goes to the host something may come before: that waits for it.
        """
        if taker is None:
            return moment
        ends = self._moment()
        self._points[rank].append(self.model.new_optional_interval_var(ends, 0, ends, chosen, ""))
        self.model.add(ends >= moment).only_enforce_if(chosen)
        return ends

    def _add_waits(self) -> None:
        """What is to hold more waits for what was sent away before the action before."""
        model = self.model
        arrivals: dict[int, list[tuple[Any, Any]]] = defaultdict(list)
        departures: dict[int, list[tuple[Any, Any, Any]]] = defaultdict(list)
        for move in self._moves:
            arrivals[move.rank].append((move.comes, move.chosen))
            departures[move.rank].append((move.left, move.gone, move.chosen))
            if move.holder is not None:
                arrivals[move.holder].append((move.left, move.chosen))
                departures[move.holder].append((move.comes, move.back, move.chosen))
        for rank, leaving in departures.items():
            takers = [
                (self._starts[number], None)
                for number in self._numbers
                if self.problem.ranks[number] == rank
                and self.problem.actions[number].kind is FORWARD
            ]
            takers += [
                (begin, chosen)
                for number, (chosen, begin, _) in self._again.items()
                if self.problem.ranks[number] == rank
            ]
            takers += arrivals[rank]
            for left, gone, chosen in leaving:
                # While it does not compute, from the one to the other, it may begin to leave.
                early, late = self._moment(), self._moment()
                idle = model.new_optional_interval_var(early, self._moment(), late, chosen, "")
                model.add_no_overlap([*self._computes[rank], idle])
                model.add(early <= left).only_enforce_if(chosen)
                for begins, taken in takers:
                    before = model.new_bool_var("")
                    both = [chosen] if taken is None else [chosen, taken]
                    model.add(begins <= late).only_enforce_if([before, *both])
                    model.add(begins >= gone).only_enforce_if([~before, *both])

    def schedule(self, value: Any) -> Schedule:
        """The rows of a solution; ``value`` gives a variable's."""
        computed = self._computed(value)
        placed = [
            [(_Key(start, True, start, 0), action) for start, _, action in row] for row in computed
        ]
        taken = [move for move in self._moves if value(move.chosen)]
        for move in taken:
            for rank, key, action in self._carried(move, computed, value):
                placed[rank].append((key, action))
        rows = tuple(_in_order(row) for row in placed)
        partners = None
        if any(move.holder is not None for move in taken):
            partners = tuple(reversed(range(len(rows))))
        return replace(self.problem.schedule("exact", []), ranks=rows, partners=partners)

    def _computed(self, value: Any) -> list[list[tuple[int, int, Action]]]:
        """Per rank, when each action begins and ends."""
        found = []
        for row in self.rows(value):
            times = []
            for action in row:
                number = self.problem.number[action]
                if action.kind is FULL:
                    number = self.problem.part(number, INPUT)
                times.append((value(self._starts[number]), value(self._ends[number]), action))
            found.append(times)
        for number, (chosen, begin, finish) in self._again.items():
            if value(chosen):
                action = replace(self.problem.actions[number], kind=ActionKind.RECOMPUTE)
                span = value(begin), value(finish), action
                found[self.problem.ranks[number]].append(span)
        return found

    def _carried(
        self, move: Move, computed: Sequence[Computed], value: Any
    ) -> Iterator[tuple[int, _Key, Action]]:
        """What a move is made of: rank, place, and action."""
        first = self.problem.actions[move.forward]
        ends = (
            (move.rank, move.holder, value(move.left), value(move.gone)),
            (move.holder, move.rank, value(move.comes), value(move.back)),
        )
        kinds = _ENDS[move.holder is not None]
        for (sender, taker, begins, over), (leaves, arrives) in zip(ends, kinds, strict=True):
            # Both ends list what partners exchange in one order.
            tie = over, first.stage, first.microbatch, sender == move.rank
            for rank, kind in ((sender, leaves), (taker, arrives)):
                if rank is not None and kind is not None:
                    place = max(
                        (s for s, e, _ in computed[rank] if s <= begins < e), default=begins
                    )
                    yield rank, _Key(place, False, begins, _MOVES, tie), replace(first, kind=kind)
            if sender is None:
                continue
            rests = max((e for s, e, _ in computed[sender] if s < over < e), default=over)
            if sender != move.rank or rests <= value(move.comes):
                awaited = _Key(rests, False, rests, _AWAITS if over > begins else _LATE)
                yield sender, awaited, replace(first, kind=ActionKind.AWAIT)


def _in_order(placed: Sequence[tuple[_Key, Action]]) -> tuple[Action, ...]:
    """A row. Of what begins at one place, what arrives before something has gone to the host comes
    first, for it would wait for that.
    """
    found: list[Action] = []
    beside: list[tuple[int, _Key, Action]] = []

    def settle() -> None:
        found.extend(action for _, _, action in sorted(beside, key=lambda each: each[:2]))
        beside.clear()

    for key, action in sorted(placed, key=lambda each: each[0]):
        if action.kind.is_move:
            gone = key.tie[0] if action.kind is ActionKind.OFFLOAD else key.moment
            beside.append((gone, key, action))
            continue
        settle()
        found.append(action)
    settle()
    return tuple(found)
