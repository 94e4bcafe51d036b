"""Simulated steps and predicted peaks of every schedule."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import product
from typing import Any

from autosplit.errors import ScheduleError
from autosplit.pipeline import SCHEDULES, Costs, Schedule, build, peak_memory

from .costs import costs_of
from .names import find
from .schedules import COUNTS, FORMS, refused


def cases() -> Iterator[tuple[str, Any]]:
    """Each step as numbers."""
    yield from _played()
    yield from _sharded()


def step(schedule: Schedule, costs: Costs) -> dict[str, Any]:
    """What a step takes, and what its ranks hold by the order of their rows."""
    timeline = costs.timeline(schedule)
    return {
        "makespan": timeline.makespan,
        "step": timeline.step_time,
        "busy": [timeline.busy(rank) for rank in range(timeline.ranks)],
        "starts": sum(span.start * sum(map(ord, str(span.action))) for span in timeline.spans),
        "spans": len(timeline.spans),
        "hidden": timeline.reduction_hidden,
        "peaks by order": peak_memory(schedule, costs.memory),
    }


def _played() -> Iterator[tuple[str, Any]]:
    """Every schedule in every form, with every kind of costs."""
    for stages in COUNTS:
        for (kind, costs), name, form in product(costs_of(stages), SCHEDULES, FORMS):
            for microbatches in COUNTS:
                schedule = built(name, stages, microbatches, FORMS[form])
                if schedule is not None:
                    case = f"{kind}/{name}/{form}/N{stages}/M{microbatches}"
                    yield case, said(step, schedule, costs)


def _sharded() -> Iterator[tuple[str, Any]]:
    """Schedules that gather their stages."""
    gathered = find("with_sharding", "pipeline")
    for name, stages, microbatches in product(SCHEDULES, (2, 4), (2, 5)):
        schedule = built(name, stages, microbatches, {})
        costs = dict(costs_of(stages))["replicas"]
        if schedule is not None:
            yield (
                f"gathered/{name}/N{stages}/M{microbatches}",
                said(step, gathered(schedule), costs),
            )


def built(name: str, stages: int, microbatches: int, options: dict[str, Any]) -> Schedule | None:
    if refused(name, stages, microbatches):
        return None
    try:
        return build(name, stages, microbatches, **options)
    except ScheduleError:
        return None


def said(make: Callable[..., Any], *given: Any, **named: Any) -> Any:
    """What it gives, or why it refuses."""
    try:
        return make(*given, **named)
    except ScheduleError as error:
        return f"refused: {error}"
