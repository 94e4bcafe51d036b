"""Faults of what a schedule moves away and runs again, as texts with the places they are at."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence

from autosplit.pipeline.schedule.action import Action, ActionKind
from autosplit.pipeline.schedule.schedule import Schedule

from .grid import Cell

Found = tuple[str, tuple[Cell, ...]]
"""A fault's text, and its cells: rank and position in its row."""

_Event = tuple[int, ActionKind]
"""What a rank does with one microbatch of a stage: the place in its row, and the kind."""

_BACK = {ActionKind.LOAD: ActionKind.EVICT, ActionKind.RELOAD: ActionKind.OFFLOAD}
_COUNTERPART = {ActionKind.EVICT: ActionKind.ACCEPT, ActionKind.LOAD: ActionKind.RETURN}
_USES = (
    ActionKind.BACKWARD_INPUT,
    ActionKind.BACKWARD,
    ActionKind.BACKWARD_WEIGHT,
    ActionKind.RECOMPUTE,
)


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
    if not any(action.kind.is_memory for row in schedule.ranks for action in row):
        return
    rows: dict[tuple[int, int, int], list[_Event]] = defaultdict(list)
    for rank, row in enumerate(schedule.ranks):
        for place, action in enumerate(row):
            rows[rank, action.stage, action.microbatch].append((place, action.kind))
    for (rank, stage, microbatch), events in rows.items():
        if rank == schedule.home(stage, microbatch):
            yield from _owner_faults(schedule, rank, stage, microbatch, events)
        else:
            yield from _holder_faults(rank, stage, microbatch, events)
    yield from _unmatched(schedule, rows)
    yield from _out_of_order(schedule)


def _owner_faults(
    schedule: Schedule, rank: int, stage: int, microbatch: int, events: Sequence[_Event]
) -> Iterator[Found]:
    """One microbatch on the rank that runs the stage: here, away, and back; and run again."""
    again = [place for place, kind in events if kind is ActionKind.RECOMPUTE]
    states = [*_states(events, again=bool(again))]
    alone = schedule.partners is None or schedule.partners[rank] == rank
    away: tuple[int, ActionKind] | None = None
    unused = False  # since it came back
    for (place, kind), state in zip(events, states, strict=True):
        action, here = Action(stage, kind, microbatch), ((rank, place),)
        if kind is ActionKind.EVICT and alone:
            yield f"{action}: rank {rank} has no partner to send it to", here
        if kind in _BACK.values():
            if away is not None:
                yield f"{action} sends away what is away already", ((rank, away[0]), *here)
            elif state != "held":
                yield f"{action} sends away what is {state}", here
            elif unused:
                yield f"{action} sends away what came back and was not used", here
            away = place, kind
        elif kind is ActionKind.AWAIT and away is None:
            yield f"{action} waits for what no EVICT or OFFLOAD sent away", here
        elif kind in _BACK:
            if away is None or away[1] is not _BACK[kind]:
                yield f"{action} brings back what no {_BACK[kind].value} sent away", here
            away, unused = None, True
        elif away is not None and kind in _USES:
            left = Action(stage, away[1], microbatch)
            yield f"{action} uses what is away since {left}", ((rank, away[0]), *here)
            away = None
        unused = unused and kind not in _USES
        if kind is ActionKind.RECOMPUTE and place != again[0]:
            yield f"{action} runs {len(again)} times, expected at most once", here
        elif kind is ActionKind.RECOMPUTE and state == "let go":
            yield f"{action} comes behind the backward that needs it", here
        elif kind is ActionKind.BACKWARD_INPUT and again and state != "held":
            yield f"{action} comes before the RECOMPUTE that it needs", here
    if away is not None:
        yield f"{Action(stage, away[1], microbatch)} is never brought back", ((rank, away[0]),)


def _states(events: Sequence[_Event], *, again: bool) -> Iterator[str]:
    """What there is of a microbatch before each event; ``again``: its F is run again."""
    state = "not there yet"
    for _, kind in events:
        yield state
        if kind is ActionKind.FORWARD:
            state = "not there before its RECOMPUTE" if again else "held"
        elif kind in (ActionKind.RECOMPUTE, ActionKind.BACKWARD_INPUT):
            state = "held"
        elif kind in (ActionKind.BACKWARD, ActionKind.BACKWARD_WEIGHT):
            state = "let go"


def _holder_faults(
    rank: int, stage: int, microbatch: int, events: Sequence[_Event]
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
    schedule: Schedule, rows: Mapping[tuple[int, int, int], Sequence[_Event]]
) -> Iterator[Found]:
    """An ACCEPT for every EVICT, a RETURN for every LOAD, and no others."""
    if schedule.partners is None:
        return
    for key in sorted({(stage, microbatch) for _, stage, microbatch in rows}):
        stage, microbatch = key
        home = schedule.home(stage, microbatch)
        partner = schedule.partners[home]
        for one, other in _COUNTERPART.items():
            mine, theirs = Action(stage, one, microbatch), Action(stage, other, microbatch)
            here = [(home, p) for p, kind in rows.get((home, *key), ()) if kind is one]
            there = [(partner, p) for p, kind in rows.get((partner, *key), ()) if kind is other]
            if len(here) != len(there):
                yield (
                    f"rank {home} lists {mine} {len(here)} times, but its partner, rank {partner}, "
                    f"lists {theirs} {len(there)} times",
                    (*here, *there),
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
