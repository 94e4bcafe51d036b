"""Rows that a solver finds: legal, within the caps, and as short as it says."""

from __future__ import annotations

import math
import sys
from dataclasses import replace

import pytest

from autosplit.mesh.link import Link
from autosplit.pipeline.search import limit_search
from autosplit.pipeline.search.exact.row_model import RowModel, solved_rows, solver_version
from autosplit.pipeline.search.measures import MEASURES
from autosplit.pipeline.search.order_changes import adds_in_order
from autosplit.pipeline.search.problem import Problem
from autosplit.pipeline.search.within_memory import search_within
from autosplit.pipeline.simulation.activation_memory import StageMemory, peak_memory
from autosplit.pipeline.simulation.step_costs import Costs
from autosplit.pipeline.simulation.transfer import Transfer
from autosplit.pipeline.validation.validate import validate

BOTH_AT_ONCE = Costs(
    [(3.0, 3.0, 2.0), (2.0, 4.0, 1.0)],
    [StageMemory(8.0, 4.0, 1.0), StageMemory(6.0, 4.0, 1.0)],
    Transfer(0.0, 8.0, host=Link(0.0, 4.0)),
)
LINKS = Transfer(0.0, 16.0, host=Link(0.0, 8.0))
NO_TIME = Transfer(0.0, 1e6, host=Link(0.0, 1e6))
WORKING = StageMemory(6.0, 3.0, 1.0, workspace=(0.5, 1.0, 0.5, 1.0))
DEFERRING = StageMemory(6.0, 9.0, 1.0)


def solved(
    costs: Costs, microbatches: int, cap: float, *, shorter_than: float = math.inf
) -> object:
    stages = len(costs.times)
    return solved_rows(
        costs,
        microbatches,
        [cap] * stages,
        range(stages),
        tuple(MEASURES),
        shorter_than=shorter_than,
        effort=1.0,
    )


@pytest.mark.parametrize(
    ("costs", "microbatches", "cap"),
    [
        (BOTH_AT_ONCE, 4, 14.0),
        (replace(BOTH_AT_ONCE, transfer=NO_TIME), 3, 12.0),
        (Costs([(2.0, 2.0, 2.0)] * 3, [StageMemory(6.0, 3.0, 1.0)] * 3, LINKS), 2, 9.0),
        (Costs([(2.0, 2.0, 2.0)] * 2, [WORKING] * 2, LINKS), 4, 13.0),
        (Costs([(2.0, 3.0, 2.0)] * 2, [DEFERRING] * 2, LINKS), 4, 16.0),
        (Costs([(2.0, 1e-6, 2.0), (2.0, 3.0, 2.0)], [StageMemory(6.0, 6.0, 1.0)] * 2, LINKS), 4, 9),
    ],
)
def test_a_solution_is_rows_that_keep_the_caps_and_take_no_longer(
    costs: Costs, microbatches: int, cap: float
) -> None:
    solver = pytest.importorskip("ortools.sat.python.cp_model")
    stages = len(costs.times)
    problem = Problem(costs, tuple(range(stages)), microbatches, (cap,) * stages)
    model = RowModel(solver, problem, tuple(MEASURES), math.inf)
    engine = solver.CpSolver()
    engine.parameters.num_workers = 1
    engine.parameters.max_deterministic_time = 0.5
    assert engine.solve(model.model) in (solver.OPTIMAL, solver.FEASIBLE)
    found = model.schedule(engine.value)
    validate(found)
    assert adds_in_order(found)
    assert max(peak_memory(found, costs.memory)) <= cap
    step = costs.timeline(found).makespan
    assert step <= model.units.value(engine.objective_value) * (1 + 1e-6)


def test_the_same_each_time_and_shorter_than_what_is_known() -> None:
    pytest.importorskip("ortools")
    first = solved(BOTH_AT_ONCE, 3, 14.0)
    assert first is not None
    assert solved(BOTH_AT_ONCE, 3, 14.0) == first
    assert solved(BOTH_AT_ONCE, 3, 14.0, shorter_than=1.0) is None


def test_it_finds_what_a_short_search_does_not(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("ortools")
    for name, work in {"_ALONE": 2_000, "_TOGETHER": 4_000, "_ORDERS": 1_500}.items():
        monkeypatch.setattr(limit_search, name, work)
    monkeypatch.setattr(limit_search, "_SOLVED", 1.0)
    without, found = (
        search_within(BOTH_AT_ONCE, 4, 14.0, placement=(0, 1), solver=solver)
        for solver in (False, True)
    )
    assert found.timeline.step_time < without.timeline.step_time
    assert max(found.peaks) <= 14.0
    validate(found.schedule)


def test_without_it_the_search_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limit_search, "_SOLVED", 1.0)
    monkeypatch.setitem(sys.modules, "ortools.sat.python", None)
    assert solver_version() is None
    assert solved(BOTH_AT_ONCE, 4, 14.0) is None
    found = search_within(BOTH_AT_ONCE, 4, 14.0, placement=(0, 1))
    alone = search_within(BOTH_AT_ONCE, 4, 14.0, placement=(0, 1), solver=False)
    assert found.schedule == alone.schedule


def test_what_it_does_not_model_or_is_too_large_is_left_alone() -> None:
    assert solved(BOTH_AT_ONCE, 40, 14.0) is None
    assert solved(replace(BOTH_AT_ONCE, early_weights=True), 4, 14.0) is None
