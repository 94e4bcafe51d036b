"""What it saves the planner to play one order with many ways to cut at once."""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from autosplit.pipeline.builders.schedule_request import ScheduleRequest
from autosplit.pipeline.simulation.event_loop import play
from autosplit.pipeline.simulation.replay import rows_of
from autosplit.pipeline.simulation.step_graph import StepGraph
from autosplit.planner.costs.block_costs import BlockCost, ModelCosts
from autosplit.planner.cuts.schedule_playback import PLACES, Order
from autosplit.planner.cuts.solve import Solution, solve
from autosplit.planner.cuts.stage_costs import StageCosts

from ..results import Rows, table

BLOCKS = 66  # those of a 7B Llama
STAGES = (4, 8, 16)
TURNS = 3


def measure(*, tiny: bool = False) -> Iterator[dict[str, Any]]:
    """The same cuts looked for both ways, in turns; links cost nothing."""
    costs = _model(12 if tiny else BLOCKS)
    for stages in STAGES[: 1 if tiny else None]:
        seconds: dict[str, list[float]] = {"at once": [], "one by one": []}
        found = set()
        for _ in range(1 if tiny else TURNS):
            for way, took in seconds.items():
                start = time.perf_counter()
                solution = _solve(costs, stages, one_by_one=way == "one by one")
                took.append(time.perf_counter() - start)
                found.add(solution.cuts)
        if len(found) > 1:
            raise AssertionError(f"two ways to play, two results: {sorted(found)}")
        yield {"name": f"N = {stages}", "seconds": seconds}


def _model(blocks: int) -> ModelCosts:
    """Attention and MLP in turns, an embedding before and a head behind them."""
    kinds = [(1.0, 1.1, 0.8), (1.6, 1.5, 1.6)]
    times = [(0.1, 0.0, 0.3), *(kinds[n % 2] for n in range(blocks - 2)), (2.0, 2.0, 2.0)]
    made = [BlockCost(f, i, w, 1.0, 0.8, 1.0, i + w) for f, i, w in times]
    return ModelCosts(tuple(made), (0.1,) * (blocks - 1))


def _solve(costs: ModelCosts, stages: int, *, one_by_one: bool) -> Solution:
    request = ScheduleRequest("1f1b", 2 * stages)
    if not one_by_one:
        return solve(costs, stages, request)
    with patch.object(Order, "steps", _one_by_one):
        return solve(costs, stages, request)


def _one_by_one(order: Order, stages: StageCosts) -> Tensor:
    """``Order.steps`` by the simulator's core, for each way to cut."""
    graph = StepGraph(order.schedule, own_needs=False)
    rows, places = rows_of(order.schedule), [PLACES[each.kind] for each in graph.actions]
    times = torch.cat([stages.times, stages.times[1:2] + stages.times[2:3]])
    steps = []
    for way in range(times.shape[2]):
        own = times[:, :, way].tolist()
        pairs = zip(places, graph.actions, strict=True)
        seconds = [own[place][action.stage] for place, action in pairs]
        steps.append(play(graph, rows, seconds).makespan)
    return torch.tensor(steps, dtype=torch.float64)


def render(rows: Rows) -> str:
    """Seconds of each way, and their ratio."""
    cells = []
    for row in rows:
        once, each = (statistics.median(row["seconds"][w]) for w in ("at once", "one by one"))
        cells.append([row["name"], f"{once:.2f}", f"{each:.2f}", f"{each / once:.1f}"])
    return table(["stages", "all at once s", "one by one s", "one by one / at once"], cells)
