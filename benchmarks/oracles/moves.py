"""Schedules that keep a limit by one measure: what moves or is run again, steps and peaks."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from typing import Any

from autosplit.pipeline import Costs, Schedule, StageMemory, Transfer, peak_memory

from .names import find
from .schedules import FORMS, written
from .simulation import built, said, step

_MEASURES = ("balance", "offload", "recompute")
_SHARES = (0.9, 0.7, 0.5)
"""Of what the fullest rank holds, limits."""


def cases() -> Iterator[tuple[str, Any]]:
    """Schedules that keep a limit by one measure, or why none was found."""
    for (name, form), stages, measure, share in product(
        product(("gpipe", "1f1b", "zb-h1", "interleaved", "zb-v"), ("plain", "fused")),
        (2, 4, 8),
        _MEASURES,
        _SHARES,
    ):
        schedule = built(name, stages, 6, FORMS[form])
        if schedule is not None:
            costs = roomy(stages)
            limit = share * max(peak_memory(schedule, costs.memory))
            case = f"{measure}/{name}/{form}/N{stages}/{share}"
            yield case, said(_measured, measure, schedule, costs, limit)


def _measured(measure: str, schedule: Schedule, costs: Costs, limit: float) -> dict[str, Any]:
    take = find(measure, "pipeline")
    if measure == "balance":
        found = take(schedule, limit, costs=costs)
    else:
        found = take(schedule, costs, limit)
    return {"schedule": written(found), **step(found, costs)}


def roomy(stages: int) -> Costs:
    """Like stages whose microbatches are a quarter of an F on their way to a partner."""
    link = find("Link", "mesh")
    memory = [StageMemory(16.0, 12.0, 1.0, tensors=16)] * stages
    return Costs([(1.0, 1.0, 1.0)] * stages, memory, Transfer(0.01, 64.0, host=link(0.01, 32.0)))
