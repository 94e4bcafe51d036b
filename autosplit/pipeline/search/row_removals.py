"""What is taken out of a schedule's rows so that they stay legal: measures, journeys, AWAITs."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import replace

from autosplit.pipeline.schedule.action import Action, ActionKind
from autosplit.pipeline.schedule.moves import Journey, journeys_of
from autosplit.pipeline.schedule.schedule import Schedule


def without(schedule: Schedule, measure: str) -> Schedule:
    """The schedule with one measure less: the same where it is not taken."""
    gone: dict[int, set[int]] = defaultdict(set)
    if measure == "recompute":
        for rank, row in enumerate(schedule.ranks):
            again = (at for at, each in enumerate(row) if each.kind is ActionKind.RECOMPUTE)
            gone[rank].update(again)
    else:
        for journey in journeys_of(schedule):
            if (journey.partner is None) is (measure == "offload"):
                for rank, places in places_of(schedule, journey).items():
                    gone[rank] |= places
    return without_places(schedule, gone) if any(gone.values()) else schedule


def places_of(schedule: Schedule, journey: Journey) -> dict[int, set[int]]:
    """By rank, the places of all that a journey is made of."""
    found = {journey.rank: {journey.leaves, journey.comes, *awaits_of(schedule, journey)}}
    if journey.partner is not None:
        theirs, latest = schedule.ranks[journey.partner], journey.returned
        found[journey.partner] = {journey.accepted, latest}
        for place in range(latest + 1, len(theirs)):
            if theirs[place] == await_of(journey):
                found[journey.partner].add(place)
            elif (theirs[place].stage, theirs[place].microbatch) == (
                journey.stage,
                journey.microbatch,
            ):
                break  # the next journey of the same
    return found


def awaits_of(schedule: Schedule, journey: Journey) -> Iterator[int]:
    """Places of what waits for a journey's departure."""
    row = schedule.ranks[journey.rank]
    for place in range(journey.leaves + 1, journey.comes):
        if row[place] == await_of(journey):
            yield place


def await_of(journey: Journey) -> Action:
    """The action that waits for a journey's departure."""
    return Action(journey.stage, ActionKind.AWAIT, journey.microbatch)


def without_places(schedule: Schedule, gone: Mapping[int, set[int]]) -> Schedule:
    """The schedule without some places of its rows."""
    rows = (
        tuple(action for place, action in enumerate(row) if place not in gone[rank])
        if rank in gone
        else row
        for rank, row in enumerate(schedule.ranks)
    )
    return replace(schedule, ranks=tuple(rows))
