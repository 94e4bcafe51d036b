"""Stages that a schedule alone cannot keep under a cap, run with measures of memory."""

from __future__ import annotations

from dataclasses import replace

from autosplit.pipeline.search.within_memory import LimitError, search_within
from autosplit.pipeline.simulation.activation_memory import StageMemory
from autosplit.planner.costs.limits import Limits

from .solve import CapError, Solution

NOT_COUNTED = "what operators take for themselves, messages and the batch come on top"
"""Of a plan that was not tried on its ranks."""


def within_limit(found: Solution, limits: Limits) -> Solution:
    """The same stages under the shortest step that is found in which no rank holds more than the
    cap: with some microbatches' state in the host's store (where the link to that is known) or made
    again. What partner ranks could take in is left to a trainer, which knows sizes exactly.

    Args:
        found: stages, under a schedule that may hold more.
        limits: the cap, and the links.

    Raises:
        CapError: nothing was found that keeps the cap; says the least cap that would do.
    """
    placement = found.schedule.placement
    resting = [0.0] * len(found.schedule.ranks)
    for stage, rank in enumerate(placement):
        resting[rank] += limits.factor * found.parameters[stage]
    costs = replace(found.costs, memory=_with_inputs(found))
    try:
        made = search_within(
            costs,
            found.schedule.microbatches,
            limits.cap,
            ranks=len(resting),
            placement=placement,
            fixed=resting,
            measures=("offload", "recompute") if limits.links.host else ("recompute",),
        )
    except LimitError as error:
        raise CapError(f"{error}; {NOT_COUNTED}", error.least) from error
    return replace(
        found,
        schedule=made.schedule,
        costs=costs,
        step=made.timeline.makespan,
        bubble=max(0.0, made.timeline.bubble_ratio()),
        peaks=tuple(map(sum, zip(made.peaks, resting, strict=True))),
        effects=made.effects,
    )


def _with_inputs(found: Solution) -> list[StageMemory]:
    """What stages keep, with what has to stay of a microbatch that is run again. The first stage's
    inputs are the batch's, and stay anyway.
    """
    crossing = found.costs.transfer.message_bytes
    taken = [0.0]
    for cut in range(len(found.parameters) - 1):
        size = crossing[cut] if isinstance(crossing, dict) else 0.0
        taken.append(size if isinstance(size, float) else float(sum(size)))
    return [
        replace(memory, inputs=inputs)
        for memory, inputs in zip(found.costs.memory, taken, strict=True)
    ]
