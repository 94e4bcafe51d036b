"""Faults of what a schedule moves away and runs again, as texts with the places they are at."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from itertools import zip_longest

from autosplit.pipeline.schedule.action import Action, ActionKind
from autosplit.pipeline.schedule.schedule import Schedule

from .grid import Cell

Found = tuple[str, tuple[Cell, ...]]
"""A fault's text, and its cells: rank and position in its row."""

_NOT_YET, _HELD, _LET_GO = "not there yet", "held", "let go"
_UNMADE = "not there before its RECOMPUTE"
_EVICTED, _OFFLOADED = "evicted", "offloaded"
_BACK = "back and not used"
_NOT_HERE, _GUEST, _RETURNED = "not here", "here", "given back"

_RULES: dict[ActionKind, tuple[tuple[str, ...], str]] = {
    ActionKind.FORWARD: ((_NOT_YET,), _HELD),
    ActionKind.RECOMPUTE: ((_UNMADE,), _HELD),
    ActionKind.BACKWARD_INPUT: ((_HELD, _BACK), _HELD),
    ActionKind.BACKWARD_WEIGHT: ((_HELD, _BACK), _LET_GO),
    ActionKind.BACKWARD: ((_HELD, _BACK), _LET_GO),
    ActionKind.EVICT: ((_HELD,), _EVICTED),
    ActionKind.OFFLOAD: ((_HELD,), _OFFLOADED),
    ActionKind.LOAD: ((_EVICTED,), _BACK),
    ActionKind.RELOAD: ((_OFFLOADED,), _BACK),
    ActionKind.ACCEPT: ((_NOT_HERE, _RETURNED), _GUEST),
    ActionKind.RETURN: ((_GUEST,), _RETURNED),
    ActionKind.AWAIT: ((_EVICTED, _OFFLOADED, _RETURNED), ""),
}
"""In which states an action may find a microbatch of a stage on its rank, and how it leaves that;
an AWAIT as it was. The rank that runs the stage begins with one that is not there yet, its partner
with one that is not here.
"""

_TRANSFERS = {
    ActionKind.EVICT: True,
    ActionKind.ACCEPT: True,
    ActionKind.LOAD: False,
    ActionKind.RETURN: False,
}
"""Between partners: whether it leaves the rank that runs the stage."""


def right_ranks(action: Action, schedule: Schedule) -> tuple[int, ...]:
    """The ranks in whose rows an action may stand."""
    home = schedule.placement[action.stage]
    if action.kind in (ActionKind.ACCEPT, ActionKind.RETURN):
        return (schedule.partner(home),)
    return (home, schedule.partner(home)) if action.kind is ActionKind.AWAIT else (home,)


def move_faults(schedule: Schedule) -> Iterator[Found]:
    """Whatever is wrong with moves and recomputation, of actions that are on their ranks."""
    rows: dict[tuple[int, int, int], list[int]] = defaultdict(list)
    moved = set()
    for rank, row in enumerate(schedule.ranks):
        for place, action in enumerate(row):
            key = rank, action.stage, action.microbatch
            if action.kind in _RULES and 0 <= action.stage < schedule.stages:
                rows[key].append(place)
            if action.kind.is_memory:
                moved.add(key)
    for key, places in rows.items():
        if key in moved:
            yield from _state_faults(schedule, *key, places)
    for low in range(len(schedule.ranks) // 2):
        yield from _order_faults(schedule, low, schedule.partner(low))


def _state_faults(
    schedule: Schedule, rank: int, stage: int, microbatch: int, places: Sequence[int]
) -> Iterator[Found]:
    """What happens to a microbatch of a stage on a rank, action by action."""
    actions = [schedule.ranks[rank][place] for place in places]
    again = any(action.kind is ActionKind.RECOMPUTE for action in actions)
    alone = schedule.partner(rank) == rank
    state = _NOT_YET if schedule.placement[stage] == rank else _NOT_HERE
    before: tuple[Cell, ...] = ()
    for place, action in zip(places, actions, strict=True):
        here = rank, place
        expected, after = _RULES[action.kind]
        if action.kind is ActionKind.EVICT and alone:
            yield f"{action}: rank {rank} has no partner to send it to", (here,)
        if state not in expected:
            wanted = " or ".join(expected)
            yield f"{action} finds what is {state}, expected {wanted}", (*before, here)
        state = _UNMADE if again and action.kind is ActionKind.FORWARD else after or state
        before = (here,)
    if state in (_EVICTED, _OFFLOADED):
        yield f"{actions[-1]} leaves what is {state}, and nothing brings it back", before


def _order_faults(schedule: Schedule, low: int, high: int) -> Iterator[Found]:
    """Two partners begin every transfer between them in one order, or one waits for ever."""
    ends = [
        [
            ((action.stage, action.microbatch, _TRANSFERS[action.kind]), place)
            for place, action in enumerate(schedule.ranks[rank])
            if action.kind in _TRANSFERS
        ]
        for rank in (low, high)
    ]
    for mine, theirs in zip_longest(*ends, fillvalue=(None, -1)):
        if mine[0] != theirs[0]:
            one, other = (
                str(schedule.ranks[rank][place]) if what is not None else "its end"
                for rank, (what, place) in ((low, mine), (high, theirs))
            )
            cells = ((low, mine[1]), (high, theirs[1]))
            yield (
                f"rank {low} comes to {one} where its partner, rank {high}, comes to {other}; two "
                "ranks list the transfers between them in one order",
                tuple(cell for cell in cells if cell[1] >= 0),
            )
            return
