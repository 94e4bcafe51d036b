"""Steps that are searched for, under caps and within limits: what may get better, but no worse."""

from __future__ import annotations

import inspect
import random
from collections.abc import Iterator
from itertools import product
from typing import Any

from autosplit.pipeline import Costs, Schedule, StageMemory, Transfer, build, peak_memory, search

from .costs import costs_of
from .moves import roomy
from .names import find
from .simulation import said, step


def cases() -> Iterator[tuple[str, Any]]:
    """Each step and its peaks."""
    yield from _searched()
    yield from _limited()


def _searched() -> Iterator[tuple[str, Any]]:
    for (stages, microbatches), share in product(((2, 4), (4, 8), (8, 8)), (2.0, 0.7)):
        for kind, costs in costs_of(stages):
            plain = build("1f1b", stages, microbatches)
            cap = share * max(peak_memory(plain, costs.memory))
            case = f"auto/{kind}/N{stages}/M{microbatches}/{share}"
            yield case, said(_auto, costs, microbatches, cap)


def _limited() -> Iterator[tuple[str, Any]]:
    """By all measures; of small steps also with the help of a solver, where there is one."""
    for seed, solver in product(range(8), (False, True)):
        case = f"within{', solver' if solver else ''}/{seed}"
        yield case, said(_within, *_small(seed), solver=solver)
    for stages, share in product((4, 8), (0.7, 0.5)):
        costs = roomy(stages)
        limit = share * max(peak_memory(build("1f1b", stages, 8), costs.memory))
        yield f"within/N{stages}/{share}", said(_within, costs, 8, limit, solver=False)


def _auto(costs: Costs, microbatches: int, cap: float) -> dict[str, Any]:
    return _numbers(search(costs, microbatches, cap=cap), costs)


def _within(costs: Costs, microbatches: int, limit: float, *, solver: bool) -> dict[str, Any]:
    within = find("search_within", "pipeline")
    given: dict[str, Any] = {"placement": tuple(range(len(costs.times)))}
    if "solver" in inspect.signature(within).parameters:
        given["solver"] = solver
    return _numbers(within(costs, microbatches, limit, **given).schedule, costs)


def _numbers(schedule: Schedule, costs: Costs) -> dict[str, Any]:
    """Of what a search finds, what may get better."""
    found = step(schedule, costs)
    return {"step": found["step"], "peaks by order": found["peaks by order"]}


def _small(seed: int) -> tuple[Costs, int, float]:
    """A small pipeline in small whole numbers, M, and a limit."""
    chance, link = random.Random(seed), find("Link", "mesh")
    stages = chance.choice((2, 2, 3))
    times = [
        (float(chance.randint(2, 4)), float(chance.randint(2, 4)), chance.choice((1.0, 2.0)))
        for _ in range(stages)
    ]
    memory = [StageMemory(chance.choice((4.0, 6.0, 8.0)), chance.choice((3.0, 4.0)), 1.0)] * stages
    links = Transfer(
        0.0, chance.choice((4.0, 8.0, 16.0)), host=link(0.0, chance.choice((2.0, 4.0, 8.0)))
    )
    return Costs(times, memory, links), chance.choice((3, 4)), chance.choice((10.0, 12.0, 16.0))
