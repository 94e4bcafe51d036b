"""Faults of what a schedule moves away and runs again, as texts with the places they are at."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator

from autosplit.pipeline.schedule.action import Action, ActionKind
from autosplit.pipeline.schedule.schedule import Schedule

from .grid import Cell

Found = tuple[str, tuple[Cell, ...]]
"""A fault's text, and its cells: rank and position in its row."""

_BACK = {ActionKind.LOAD: ActionKind.EVICT, ActionKind.RELOAD: ActionKind.OFFLOAD}
_COUNTERPART = {ActionKind.EVICT: ActionKind.ACCEPT, ActionKind.LOAD: ActionKind.RETURN}
_BACKWARDS = (ActionKind.BACKWARD_INPUT, ActionKind.BACKWARD)
_USES = (*_BACKWARDS, ActionKind.BACKWARD_WEIGHT, ActionKind.RECOMPUTE)


def partner_faults(schedule: Schedule) -> Iterator[str]:
    """Partners that are none, and bytes that no stage moves."""
    ranks, partners = len(schedule.ranks), schedule.partners
    if partners is not None:
        if len(partners) != ranks:
            yield f"partners must name a rank for each of the {ranks} ranks, got {len(partners)}"
        elif any(
            not 0 <= partner < ranks or partners[partner] != rank
            for rank, partner in enumerate(partners)
        ):
            yield f"partners must be pairs, each the other's partner; got {partners}"
    for stage, size in schedule.moved.items():
        if not 0 <= stage < schedule.stages or size < 0:
            yield f"moved names stage {stage} with {size} bytes; expected a stage and bytes >= 0"


def right_rank(action: Action, schedule: Schedule, rank: int) -> int | None:
    """The rank in whose row an action belongs that stands in that of ``rank``; None where the owner
    has no partner for it.
    """
    home = schedule.home(action.stage, action.microbatch)
    partner = None if schedule.partners is None else schedule.partners[home]
    if action.kind in (ActionKind.ACCEPT, ActionKind.RETURN):
        return partner
    return rank if action.kind is ActionKind.AWAIT and rank == partner else home


def move_faults(schedule: Schedule) -> Iterator[Found]:
    """Whatever is wrong with moves and recomputation, of actions that are on their ranks."""
    rows: dict[tuple[int, int, int], list[tuple[int, ActionKind]]] = defaultdict(list)
    moving = False
    for rank, row in enumerate(schedule.ranks):
        for place, action in enumerate(row):
            rows[rank, action.stage, action.microbatch].append((place, action.kind))
            moving = moving or action.kind.is_memory
    if not moving:
        return
    for (rank, stage, microbatch), events in rows.items():
        if rank == schedule.home(stage, microbatch):
            yield from _owner_faults(schedule, rank, stage, microbatch, events)
        else:
            yield from _holder_faults(rank, stage, microbatch, events)
    yield from _unmatched(schedule, rows)
    yield from _out_of_order(schedule)


def _owner_faults(
    schedule: Schedule,
    rank: int,
    stage: int,
    microbatch: int,
    events: list[tuple[int, ActionKind]],
) -> Iterator[Found]:
    """One microbatch on the rank that runs the stage: here, away, and back."""
    away: tuple[int, ActionKind] | None = None
    again = [place for place, kind in events if kind is ActionKind.RECOMPUTE]
    state = "not there yet"
    unused = False  # since it came back
    for place, kind in events:
        action, here = Action(stage, kind, microbatch), ((rank, place),)
        if kind in (ActionKind.EVICT, ActionKind.OFFLOAD):
            if kind is ActionKind.EVICT and (
                schedule.partners is None or schedule.partners[rank] == rank
            ):
                yield f"{action}: rank {rank} has no partner to send it to", here
            if away is not None:
                yield f"{action} sends away what is away already", ((rank, away[0]), *here)
            elif state != "held":
                yield f"{action} sends away what is {state}", here
            elif unused:
                yield f"{action} sends away what came back and was not used", here
            away = place, kind
        elif kind is ActionKind.AWAIT:
            if away is None:
                yield f"{action} waits for what no EVICT or OFFLOAD sent away", here
        elif kind in _BACK:
            if away is None or away[1] is not _BACK[kind]:
                yield f"{action} brings back what no {_BACK[kind].value} sent away", here
            away, unused = None, True
        elif away is not None and kind in _USES:
            yield (
                f"{action} uses what is away since {_text(stage, away[1], microbatch)}",
                ((rank, away[0]), *here),
            )
            away = None
        unused = unused and kind not in _USES
        if kind is ActionKind.FORWARD:
            state = "not there before its RECOMPUTE" if again else "held"
        elif kind is ActionKind.RECOMPUTE:
            if place != again[0]:
                yield f"{action} runs {len(again)} times, expected at most once", here
            elif state == "let go":
                yield f"{action} comes behind the backward that needs it", here
            state = "held"
        elif kind in (ActionKind.BACKWARD, ActionKind.BACKWARD_WEIGHT):
            state = "let go"
        elif kind is ActionKind.BACKWARD_INPUT:
            if again and state != "held":
                yield f"{action} comes before the RECOMPUTE that it needs", here
            state = "held"
    if away is not None:
        yield f"{_text(stage, away[1], microbatch)} is never brought back", ((rank, away[0]),)


def _holder_faults(
    rank: int, stage: int, microbatch: int, events: list[tuple[int, ActionKind]]
) -> Iterator[Found]:
    """The same on the partner: taken in, given back."""
    holds = gave = False
    for place, kind in events:
        action, here = Action(stage, kind, microbatch), ((rank, place),)
        if kind is ActionKind.AWAIT and not gave:
            yield f"{action} waits for what no RETURN sent away", here
        gave = gave or kind is ActionKind.RETURN
        if kind is ActionKind.ACCEPT:
            if holds:
                yield f"{action} takes in what rank {rank} has already", here
            holds = True
        elif kind is ActionKind.RETURN:
            if not holds:
                yield f"{action} gives back what rank {rank} has not", here
            holds = False


def _unmatched(
    schedule: Schedule, rows: dict[tuple[int, int, int], list[tuple[int, ActionKind]]]
) -> Iterator[Found]:
    """An ACCEPT for every EVICT, a RETURN for every LOAD, and no others."""
    if schedule.partners is None:
        return
    for stage, microbatch in sorted({(stage, microbatch) for _, stage, microbatch in rows}):
        home = schedule.home(stage, microbatch)
        partner = schedule.partners[home]
        for one, other in _COUNTERPART.items():
            here = [p for p, kind in rows.get((home, stage, microbatch), ()) if kind is one]
            there = [p for p, kind in rows.get((partner, stage, microbatch), ()) if kind is other]
            if len(here) != len(there):
                yield (
                    f"rank {home} lists {_text(stage, one, microbatch)} {len(here)} times, but its "
                    f"partner, rank {partner}, lists {_text(stage, other, microbatch)} "
                    f"{len(there)} times",
                    (*((home, place) for place in here), *((partner, place) for place in there)),
                )


def _out_of_order(schedule: Schedule) -> Iterator[Found]:
    """Between two ranks every transfer begins at both ends in one order, or one waits for ever."""
    for low, high in enumerate(schedule.partners or ()):
        if low >= high:
            continue
        mine, theirs = _transfers(schedule, low), _transfers(schedule, high)
        wrong = next(
            (pair for pair in zip(mine, theirs, strict=False) if pair[0][0] != pair[1][0]), None
        )
        if wrong is not None:
            (_, place), (_, other) = wrong
            yield (
                f"rank {low} comes to {schedule.ranks[low][place]} where its partner, rank {high}, "
                f"comes to {schedule.ranks[high][other]}; two ranks list the transfers between "
                "them in one order",
                ((low, place), (high, other)),
            )


def _transfers(schedule: Schedule, rank: int) -> list[tuple[tuple[int, int, bool], int]]:
    """What a rank exchanges with its partner: of whom, whether it goes out, and its place."""
    out = ActionKind.EVICT, ActionKind.ACCEPT
    kinds = *out, ActionKind.LOAD, ActionKind.RETURN
    return [
        ((action.stage, action.microbatch, action.kind in out), place)
        for place, action in enumerate(schedule.ranks[rank])
        if action.kind in kinds
    ]


def _text(stage: int, kind: ActionKind, microbatch: int) -> str:
    return str(Action(stage, kind, microbatch))
