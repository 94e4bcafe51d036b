"""Faults of what a schedule moves away and runs again, as texts with the places they are at."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence

from autosplit.pipeline.schedule.action import ActionKind
from autosplit.pipeline.schedule.schedule import Schedule

from .grid import Cell

Found = tuple[str, tuple[Cell, ...]]
"""A fault's text, and its cells: rank and position in its row."""

_NOT_YET, _HELD, _LET_GO = "not there yet", "held", "let go"
_UNMADE = "not there before its RECOMPUTE"
_OFFLOADED = "offloaded"
_BACK = "back and not used"

_RULES: dict[ActionKind, tuple[tuple[str, ...], str]] = {
    ActionKind.FORWARD: ((_NOT_YET,), _HELD),
    ActionKind.RECOMPUTE: ((_UNMADE,), _HELD),
    ActionKind.BACKWARD_INPUT: ((_HELD, _BACK), _HELD),
    ActionKind.BACKWARD_WEIGHT: ((_HELD, _BACK), _LET_GO),
    ActionKind.BACKWARD: ((_HELD, _BACK), _LET_GO),
    ActionKind.OFFLOAD: ((_HELD,), _OFFLOADED),
    ActionKind.RELOAD: ((_OFFLOADED,), _BACK),
    ActionKind.AWAIT: ((_OFFLOADED,), _OFFLOADED),
}
"""In which states an action may find a microbatch of a stage, and how it leaves that."""


def move_faults(schedule: Schedule) -> Iterator[Found]:
    """Whatever is wrong with moves and recomputation, of actions that are on their ranks."""
    for rank, row in enumerate(schedule.ranks):
        places: dict[tuple[int, int], list[int]] = defaultdict(list)
        moved = set()
        for place, action in enumerate(row):
            key = action.stage, action.microbatch
            if action.kind in _RULES and 0 <= action.stage < schedule.stages:
                places[key].append(place)
            if action.kind.is_memory:
                moved.add(key)
        for key, own in places.items():
            if key in moved and schedule.placement[key[0]] == rank:
                yield from _state_faults(schedule, rank, own)


def _state_faults(schedule: Schedule, rank: int, places: Sequence[int]) -> Iterator[Found]:
    """What happens to a microbatch of a stage, action by action."""
    actions = [schedule.ranks[rank][place] for place in places]
    again = any(action.kind is ActionKind.RECOMPUTE for action in actions)
    state = _NOT_YET
    before: tuple[Cell, ...] = ()
    for place, action in zip(places, actions, strict=True):
        here = rank, place
        expected, after = _RULES[action.kind]
        if state not in expected:
            wanted = " or ".join(expected)
            yield f"{action} finds what is {state}, expected {wanted}", (*before, here)
        state = _UNMADE if again and action.kind is ActionKind.FORWARD else after
        before = (here,)
    if state == _OFFLOADED:
        yield f"{actions[-1]} leaves what is {state}, and nothing brings it back", before
