"""The yardstick: proved optima, against which the search is held."""

from __future__ import annotations

import math
import sys

import pytest

from autosplit.errors import ScheduleError
from autosplit.mesh.link import Link
from autosplit.pipeline.builders.build import build
from autosplit.pipeline.search.exact.shortest_step import exact
from autosplit.pipeline.search.exact.units import Units
from autosplit.pipeline.search.problem import Problem
from autosplit.pipeline.search.search import search
from autosplit.pipeline.simulation.activation_memory import StageMemory, peak_memory
from autosplit.pipeline.simulation.simulate import simulate
from autosplit.pipeline.simulation.step_costs import Costs
from autosplit.pipeline.simulation.transfer import Transfer
from autosplit.pipeline.validation.validate import validate

pytest.importorskip("ortools")

ALIKE = [(18.5, 18.1, 9.3)]
UNEVEN = [(2.0, 0.0, 4.0), (3.0, 3.0, 2.0), (1.0, 2.0, 1.0), (4.0, 3.0, 3.0)]
GAP = 0.02
"""How much longer than the shortest step the search's may be."""


def costs_of(
    times: list[tuple[float, float, float]], deferred: float, transfer: Transfer | None = None
) -> Costs:
    memory = [StageMemory(1.0, deferred)] * len(times)
    return Costs(times, memory, transfer or Transfer())


@pytest.mark.parametrize(
    ("costs", "microbatches", "ranks", "cap"),
    [
        (costs_of(ALIKE * 2, 1.0), 4, 2, math.inf),
        (costs_of(ALIKE * 2, 1.0), 4, 2, 2.0),
        (costs_of(ALIKE * 4, 1.0), 6, 4, 5.0),
        (costs_of(UNEVEN, 0.75), 4, 4, math.inf),
        (costs_of(UNEVEN, 0.75, Transfer(0.5, 2.0, 1.0)), 6, 4, 4.0),
        (costs_of(UNEVEN, 1.4), 4, 4, 3.0),
        (costs_of([(2.0, 2.0, 6.0), (7.0, 4.0, 2.0), (1.0, 8.0, 1.0)], 1.3), 3, 3, 2.0),
        (costs_of([(3.0, 9.0, 1.0), (9.0, 2.0, 5.0), (2.0, 5.0, 2.0)], 0.75), 4, 3, 2.5),
        (costs_of(UNEVEN, 0.75, Transfer(0.5, 2.0, 1.0)), 2, 2, 4.0),
        (costs_of(UNEVEN, 0.75, Transfer(0.5, 2.0, 1.0, pairs={(1, 2): Link(2.0)})), 4, 4, 4.0),
    ],
)
def test_the_search_is_near_the_optimum(
    costs: Costs, microbatches: int, ranks: int, cap: float
) -> None:
    best = exact(costs, microbatches, ranks=ranks, cap=cap)
    assert best.proved
    validate(best.schedule, memory=costs.memory, caps=[cap] * ranks)
    step = simulate(best.schedule, costs.seconds, transfer=costs.transfer).makespan
    assert step == pytest.approx(best.makespan) == pytest.approx(best.bound)
    found = search(costs, microbatches, ranks=ranks, cap=cap)
    auto = simulate(found, costs.seconds, transfer=costs.transfer).makespan
    assert best.makespan * (1 - 1e-6) <= auto <= best.makespan * (1 + GAP)


def test_more_memory_is_never_worse_and_less_is_refused() -> None:
    costs = costs_of(ALIKE * 3, 1.0)
    steps = [exact(costs, 4, cap=cap).makespan for cap in (1.0, 2.0, 3.0, 4.0)]
    assert steps == sorted(steps, reverse=True)
    assert steps[0] > steps[-1]
    with pytest.raises(ScheduleError, match=r"no schedule within the cap 0\.9 exists"):
        exact(costs, 4, cap=0.9)


def test_a_link_keeps_the_order_of_sending() -> None:
    """Messages of two boundaries share a link; none overtakes another, as in the simulator."""
    transfer = Transfer(0.0, 1.0, {0: 6.0, 1: 1.0, 2: 1.0, 3: 6.0})
    costs = Costs([(1.0, 1.0, 1.0)] * 4, [StageMemory(1.0, 1.0)] * 4, transfer)
    placement = build("interleaved", 4, 2, ranks=2).placement
    best = exact(costs, 2, ranks=2, placement=placement)
    assert best.proved
    assert best.schedule.placement == placement
    step = simulate(best.schedule, costs.seconds, transfer=transfer).makespan
    assert step == pytest.approx(best.bound)


def test_a_full_backward_counts_as_one_piece() -> None:
    costs = Costs([(2.0, 2.0, 2.0)] * 2, [StageMemory(1.0, 1.0)] * 2, full=[3.0, 3.0])
    best = exact(costs, 3)
    assert best.makespan < exact(Costs(costs.times, costs.memory), 3).makespan
    assert simulate(best.schedule, costs.seconds).makespan == pytest.approx(best.bound)


def test_it_plays_what_it_holds_back() -> None:
    """Where deferred is more than saved, the peak is that of ``peak_memory``."""
    costs = costs_of([(3.0, 2.0, 1.0)] * 2, 1.5)
    tight, wide = exact(costs, 4, cap=2.0), exact(costs, 4, cap=3.0)
    assert max(peak_memory(tight.schedule, costs.memory)) <= 2.0
    assert wide.makespan < tight.makespan


def test_numbers_become_integers() -> None:
    short = Units([0.0185, 0.0181, 0.0093])
    assert short.exact
    assert [short.nearest(x) for x in (0.0185, 0.0181, 0.0093)] == [185, 181, 93]
    assert short.value(185) == pytest.approx(0.0185)
    assert Units([1.3 * 1.5]).nearest(1.95) == 1  # 1.9500000000000002
    odd = Units([math.pi, 1e-3])
    assert not odd.exact
    assert odd.above(1e-7) == 1
    assert odd.below(1e-7) == 0
    assert abs(odd.value(odd.nearest(1.0)) - 1.0) <= odd.slack([None])


def test_bad_arguments_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    costs = costs_of(ALIKE * 4, 1.0)
    with pytest.raises(ScheduleError, match=r"1,200 actions .* more than the 400"):
        exact(costs, 100)
    with pytest.raises(ScheduleError, match="seconds must be > 0"):
        exact(costs, 2, seconds=0.0)
    monkeypatch.setitem(sys.modules, "ortools.sat.python", None)
    with pytest.raises(ScheduleError, match=r"pip install autosplit\[exact\]"):
        exact(costs, 2)


def test_a_problem_knows_where_a_full_backward_is_better() -> None:
    def whole(deferred: float, cap: float, full: float) -> bool:
        costs = Costs([(1.0, 1.0, 1.0)], [StageMemory(1.0, deferred)], full=[full])
        return Problem(costs, (0,), 1, (cap,)).whole[0]

    assert not whole(1.0, 2.0, 2.0)
    assert whole(1.5, 2.0, 2.0)
    assert not whole(1.5, math.inf, 2.0)
    assert whole(1.0, math.inf, 1.9)
