"""Run an I and the W right behind it as one B."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from autosplit.pipeline.schedule.action import Action, ActionKind
from autosplit.pipeline.schedule.routes import result_of
from autosplit.pipeline.schedule.schedule import Schedule
from autosplit.pipeline.schedule.wiring import Feeds
from autosplit.pipeline.simulation.simulate import Costs
from autosplit.pipeline.simulation.step_graph import StepGraph
from autosplit.pipeline.simulation.timeline import Timeline

_TOLERANCE = 1e-9  # ends that differ by rounding are equal


def fuse_adjacent(schedule: Schedule, costs: Costs) -> Schedule:
    """Replace each I that its own W follows by one B, which costs less than both and keeps nothing.

    A B hands its gradient on only when it is done, later than the I would have. So only those pairs
    become one that takes no longer than both and whose gradient nobody waits for before it ends, so
    that no other rank starts anything later, and none if the step would be longer.

    Args:
        schedule: a legal one.
        costs: of its stages.

    Raises:
        ScheduleError: the schedule deadlocks, or something that it needs is not known.
    """
    timeline = costs.timeline(schedule)
    urgent = _urgent(schedule, costs, timeline)
    fused = replace(schedule, ranks=tuple(tuple(_fused(row, urgent)) for row in schedule.ranks))
    # A message that comes later may still hold up another one behind it.
    longest = timeline.makespan * (1 + _TOLERANCE)
    return fused if costs.timeline(fused).makespan <= longest else schedule


def _fused(row: Sequence[Action], urgent: frozenset[Action]) -> Iterator[Action]:
    skip = False
    for place, action in enumerate(row):
        if skip:
            skip = False
            continue
        weight = replace(action, kind=ActionKind.BACKWARD_WEIGHT)
        if (
            action.kind is ActionKind.BACKWARD_INPUT
            and row[place + 1 : place + 2] == (weight,)
            and action not in urgent
        ):
            skip = True
            yield replace(action, kind=ActionKind.BACKWARD)
        else:
            yield action


def _urgent(schedule: Schedule, costs: Costs, timeline: Timeline) -> frozenset[Action]:
    """Is whose gradient another rank would still wait for while a B runs."""
    spans = {span.action: span for span in timeline.spans}
    takers = {result_of(action): span.start for action, span in spans.items()}
    feeds = None if costs.wiring is None else Feeds(schedule.stages, costs.wiring)
    graph = StepGraph(schedule, feeds=feeds, transfer=costs.transfer)
    urgent = set()
    for made, rank, messages in zip(graph.actions, graph.ranks, graph.makes, strict=True):
        weight = spans.get(replace(made, kind=ActionKind.BACKWARD_WEIGHT))
        if made.kind is not ActionKind.BACKWARD_INPUT or weight is None:
            continue
        arrivals = (
            takers[replace(made, stage=graph.parcels[parcel].stage)] < weight.end + took + latency
            for parcel, _, took, latency in messages
            if graph.takers[parcel] != rank
        )
        if any(arrivals):
            urgent.add(made)
    return frozenset(urgent)
