"""Plans made from a solution of the cut search."""

from __future__ import annotations

import math

from autosplit.errors import PlanError
from autosplit.planner.costs.limits import Limits

from .alternatives import Configuration
from .plan import Plan
from .plan_signature import PlanSignature


def make_plan(
    one: Configuration, made_for: PlanSignature, limits: Limits, *, backend: str = "eager"
) -> Plan:
    """The plan of a configuration, not bound to a model.

    Args:
        one: with a solution.
        made_for: the model that its costs are of; its blocks are those of the costs.
        limits: those that it was found under.
        backend: how its graphs are run.

    Raises:
        PlanError: the configuration cannot run.
    """
    found = one.solution
    if found is None:
        raise PlanError(f"{one.schedule} cannot run: {one.lost}")
    schedule = found.schedule
    resting = [0.0] * one.ranks
    for stage, rank in enumerate(schedule.placement):
        resting[rank] += limits.factor * found.parameters[stage]
    crossing = found.costs.transfer.message_bytes
    sizes = [crossing[cut] if isinstance(crossing, dict) else 0.0 for cut in range(one.stages - 1)]
    return Plan(
        cuts=tuple(made_for.blocks[cut + 1] for cut in found.cuts),
        ranks=one.ranks,
        placement=schedule.placement,
        microbatches=one.microbatches,
        microbatch_size=one.microbatch_size,
        schedule=one.schedule,
        actions=tuple(" ".join(map(str, row)) for row in schedule.ranks),
        memory=one.memory,
        backend=backend,
        stage_times=tuple(found.costs.times),
        stage_parameters=found.parameters,
        crossing=tuple(sizes),
        predicted_step=found.step,
        bubble=found.bubble,
        peak_memory=found.peaks,
        resting_memory=tuple(resting),
        made_for=made_for,
        memory_limit=int(limits.cap) if limits.measures and math.isfinite(limits.cap) else None,
        measures=tuple(
            (each.measure, max(0.0, each.seconds), tuple(max(0.0, size) for size in each.saved))
            for each in found.effects
        ),
    )
