"""The shortest step there is, by an exact solver: the yardstick for ``search``."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from types import ModuleType
from typing import Any, NamedTuple

from autosplit.errors import ScheduleError
from autosplit.pipeline.schedule.schedule import Schedule, check_counts
from autosplit.pipeline.search.problem import Problem, Rows
from autosplit.pipeline.search.search import caps_of, placements, search
from autosplit.pipeline.simulation.step_costs import Costs
from autosplit.pipeline.validation.validate import validate

from .constraint_model import StepModel

_LARGEST = 400
"""Actions of a step: beyond, nothing is proved in minutes."""
_WORKERS = 8  # strategies that take turns


@dataclass(frozen=True)
class Exact:
    """The shortest step that was found, and a step that none is shorter than, in seconds.

    ``schedule`` is named ``"exact"`` and takes ``makespan`` when simulated.
    """

    schedule: Schedule
    makespan: float
    bound: float

    @property
    def proved(self) -> bool:
        """Whether no schedule is shorter by more than a thousandth of a percent."""
        return self.makespan <= self.bound * (1 + 1e-5)


def exact(
    costs: Costs,
    microbatches: int,
    *,
    ranks: int | None = None,
    placement: Sequence[int] | None = None,
    cap: float | Sequence[float] = math.inf,
    seconds: float = 60.0,
) -> Exact:
    """Prove the shortest step; for small cases (4 stages and 6 microbatches take seconds).

    The problem is a job shop with memory, transfers, links and wiring as ``simulate`` and
    ``peak_memory`` have them, and OR-tools' CP-SAT solves it:
    https://developers.google.com/optimization/cp. It leaves out Ws that run in waits, whole or in
    slices, so costs with ``early_weights`` are refused; two copies of the stages; steps that begin
    before the last one has ended; and placements that no named schedule has.

    Args:
        costs: of every stage.
        microbatches: M >= 1.
        ranks: number of processes; None means one for each stage.
        placement: the rank of every stage; None for the best of those of the named schedules.
        cap: the most a rank may keep of its microbatches, as for ``search``.
        seconds: how long to search on each placement; what is not proved by then is the best
            found, with the bound that was proved.

    Raises:
        ScheduleError: OR-tools is not installed; a bad count; too many actions; early weights; no
            schedule exists within the cap, or none was found in time.
    """
    stages = len(costs.times)
    ranks = stages if ranks is None else ranks
    check_counts(ranks=ranks, microbatches=microbatches)
    check_provable(stages, microbatches)
    if costs.early_weights:
        raise ScheduleError(
            "the exact solver knows Ws in one piece, where the schedule has them: leave out "
            "early_weights and slices, or use search"
        )
    if not seconds > 0:
        raise ScheduleError(f"seconds must be > 0, got {seconds!r}")
    caps, solver = caps_of(cap, ranks), _solver()
    bounds: list[float] = []
    found: list[Exact] = []
    for place in placements(costs, microbatches, ranks, placement):
        one, bound = _solved(solver, Problem(costs, place, microbatches, caps), seconds)
        bounds.append(bound)
        if one is not None:
            found.append(Exact(one, costs.timeline(one).makespan, bound))
    if not found:
        reason = "exists" if all(map(math.isinf, bounds)) else f"was found in {seconds:g} seconds"
        raise ScheduleError(
            f"no schedule within the cap {cap} {reason}: raise the cap, or cut the batch into more "
            "microbatches"
        )
    best = min(found, key=lambda each: each.makespan)
    return replace(best, bound=min(bounds))


def check_provable(stages: int, microbatches: int) -> None:
    """Refuse a step of which nothing would be proved.

    Raises:
        ScheduleError: it has too many actions.
    """
    actions = 3 * stages * microbatches
    if actions > _LARGEST:
        raise ScheduleError(
            f"a step of {actions:,} actions ({stages:,} stages, {microbatches:,} microbatches) is "
            f"more than the {_LARGEST} that the exact solver takes: leave out the proof (--exact) "
            "and have a step searched for under a cap, or take fewer stages or microbatches"
        )


def _solved(solver: ModuleType, problem: Problem, seconds: float) -> tuple[Schedule | None, float]:
    """The shortest schedule, if one was found, and what none is shorter than."""
    model, engine = StepModel(solver, problem, _hint(problem)), _engine(solver, seconds)
    status = engine.solve(model.model)
    if status == solver.INFEASIBLE:
        return None, math.inf
    slack = model.units.slack(problem.seconds)  # a path is no longer than all actions
    bound = max(0.0, model.units.value(engine.best_objective_bound) - slack)
    if status not in (solver.OPTIMAL, solver.FEASIBLE):
        return None, bound
    rows = tuple(map(tuple, model.rows(engine.value)))
    schedule = replace(problem.schedule("exact", []), ranks=rows)
    validate(schedule, memory=problem.costs.memory, caps=problem.caps)
    return schedule, bound


class Solved(NamedTuple):
    """Seconds of the best solution of a model, and what none takes less than; infinite where there
    is none, or none was found.
    """

    step: float
    bound: float


def solved(build: Callable[[ModuleType], StepModel], seconds: float) -> Solved:
    """The best solution of a model in so many seconds.

    Raises:
        ScheduleError: OR-tools is not installed.
    """
    solver = _solver()
    model, engine = build(solver), _engine(solver, seconds)
    status = engine.solve(model.model)
    if status == solver.INFEASIBLE:
        return Solved(math.inf, math.inf)
    slack = model.units.slack(model.problem.seconds)
    bound = max(0.0, model.units.value(engine.best_objective_bound) - slack)
    if status not in (solver.OPTIMAL, solver.FEASIBLE):
        return Solved(math.inf, bound)
    return Solved(model.units.value(engine.objective_value), bound)


def _engine(solver: ModuleType, seconds: float) -> Any:
    engine = solver.CpSolver()
    engine.parameters.max_time_in_seconds = seconds
    # The same answer every time, unless the time runs out.
    engine.parameters.interleave_search = True
    engine.parameters.num_workers = _WORKERS
    return engine


def _hint(problem: Problem) -> Rows | None:
    """What the search finds, to begin from."""
    try:
        found = search(
            problem.costs,
            problem.microbatches,
            ranks=len(problem.caps),
            placement=problem.placement,
            cap=problem.caps,
        )
    except ScheduleError:
        return None
    rows = problem.rows_of(found)
    return rows if all(map(problem.fits, rows, range(len(rows)))) else None


def _solver() -> ModuleType:
    try:
        from ortools.sat.python import cp_model
    except ModuleNotFoundError as error:
        raise ScheduleError(
            f"the exact solver needs OR-tools ({error}); run: pip install autosplit[exact]"
        ) from error
    found: ModuleType = cp_model
    return found
