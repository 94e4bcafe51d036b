"""Worst-case memory bounds every timing of a rank's transfers, and some timing attains it."""

from __future__ import annotations

from collections import defaultdict
from typing import NamedTuple

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autosplit.pipeline.schedule.moves import waited_departures
from autosplit.pipeline.schedule.schedule import ARRIVALS, DEPARTURES, Action, ActionKind
from autosplit.pipeline.simulation.activation_memory import Change, levels

FORWARD, INPUT, WEIGHT = (
    ActionKind.FORWARD,
    ActionKind.BACKWARD_INPUT,
    ActionKind.BACKWARD_WEIGHT,
)
WAYS = {ActionKind.EVICT: ActionKind.LOAD, ActionKind.OFFLOAD: ActionKind.RELOAD}
SAVED, DEFERRED = 5, 3  # of a microbatch


class Rank(NamedTuple):
    """A row, what its actions change, which arrival each uses and what each move is the end of."""

    row: list[Action]
    changes: list[Change]
    uses: dict[int, int]
    begun: dict[int, int]


def rank_of(actions: list[Action]) -> Rank:
    """Stage 0 is the rank's own; of stage 1 its partner's microbatches come."""
    changes: list[Change] = []
    uses: dict[int, int] = {}
    begun: dict[int, int] = {}
    latest: dict[tuple[int, int], int] = {}
    kept: dict[tuple[int, int], int] = {}
    for place, action in enumerate(actions):
        key, kind = (action.stage, action.microbatch), action.kind
        if kind in (FORWARD, ActionKind.ACCEPT):
            kept[key] = SAVED if kind is FORWARD else 2 + action.microbatch
        if kind in ARRIVALS or kind is FORWARD:
            changes.append(Change(kept[key], 0))
        elif kind in DEPARTURES:
            changes.append(Change(0, kept[key]))
        elif kind is INPUT:
            changes.append(Change(1, 1 + SAVED - DEFERRED))
            kept[key] = DEFERRED
        else:
            changes.append(Change(0, DEFERRED if kind is WEIGHT else 0))
        if kind in (INPUT, WEIGHT) and actions[latest[key]].kind in ARRIVALS:
            uses[place] = latest[key]
        elif kind in (*ARRIVALS, ActionKind.RETURN) and key in latest:
            begun[place] = latest[key]
        if kind is not ActionKind.AWAIT:
            latest[key] = place
    return Rank(actions, changes, uses, begun)


def next_actions(row: list[Action]) -> list[Action]:
    """Every action that may stand behind these."""
    last: dict[tuple[int, int], ActionKind] = {}
    for action in row:
        if action.kind is not ActionKind.AWAIT:
            last[action.stage, action.microbatch] = action.kind
    results = []
    for microbatch in range(3):
        kind = last.get((0, microbatch))
        able: list[ActionKind] = []
        if kind is None:
            able = [FORWARD]
        elif kind in (FORWARD, INPUT):
            able = [WEIGHT if kind is INPUT else INPUT, *WAYS]
        elif kind in WAYS:
            left = max(at for at, item in enumerate(row) if item == Action(0, kind, microbatch))
            later = row[left:]
            able = [WAYS[kind]] if any(item.kind.is_compute for item in later) else []
            awaited = Action(0, ActionKind.AWAIT, microbatch)
            able += [ActionKind.AWAIT] if awaited not in later else []
        elif kind in WAYS.values():
            able = [WEIGHT if Action(0, INPUT, microbatch) in row else INPUT]
        results += [Action(0, item, microbatch) for item in able]
    for microbatch in range(2):
        guest = last.get((1, microbatch))
        if guest is not ActionKind.RETURN:
            kind = ActionKind.RETURN if guest else ActionKind.ACCEPT
            results.append(Action(1, kind, microbatch))
    return results


@st.composite
def rows(draw: st.DrawFn) -> list[Action]:
    row: list[Action] = []
    for _ in range(draw(st.integers(4, 12))):
        able = next_actions(row)
        if not able:
            break
        row.append(draw(st.sampled_from(able)))
    return row


class Moment(NamedTuple):
    place: int
    running: bool
    over: frozenset[int]  # moves that have ended


def most_held(rank: Rank) -> tuple[list[float], list[float]]:
    """By place, the most that is held while it is run, and behind it, in all timings."""
    row, waits = rank.row, dict(waited_departures(rank.row))
    lanes: dict[str, list[int]] = defaultdict(list)
    for place, action in enumerate(row):
        if action.kind.is_move:
            lanes[_lane(action.kind)].append(place)
    running, between = [0.0] * len(row), [0.0] * len(row)
    seen: set[Moment] = set()
    todo = [Moment(-1, False, frozenset())]
    while todo:
        here = todo.pop()
        if here in seen:
            continue
        seen.add(here)
        kept = _held(rank, here)
        if here.place >= 0:
            result = running if here.running or not row[here.place].kind.is_compute else between
            result[here.place] = max(result[here.place], kept)
        begun = here.place if here.place >= 0 else -1
        for lane in lanes.values():
            first = next((item for item in lane if item not in here.over), None)
            if first is None or first > begun:
                continue
            needs = {*waits.get(first, ())} if row[first].kind in ARRIVALS else set()
            needs |= {rank.begun[first]} if first in rank.begun else set()
            if needs <= here.over:
                todo.append(here._replace(over=here.over | {first}))
        if here.running:
            todo.append(here._replace(running=False))
        elif here.place + 1 < len(row):
            place = here.place + 1
            needs = {*waits.get(place, ())} if not row[place].kind.is_move else set()
            needs |= {rank.uses[place]} if place in rank.uses else set()
            if needs <= here.over:
                todo.append(Moment(place, row[place].kind.is_compute, here.over))
    return running, between


def _lane(kind: ActionKind) -> str:
    if kind in (ActionKind.OFFLOAD, ActionKind.RELOAD):
        return kind.value
    return "out" if kind in DEPARTURES else "in"


def _held(rank: Rank, moment: Moment) -> float:
    """Memory at a moment: a departure counts until it is over, an arrival from then on."""
    kept = 0.0
    for place, change in enumerate(rank.changes[: moment.place + 1]):
        move = rank.row[place].kind.is_move
        if move:
            kept += (change.allocated - change.freed) * (place in moment.over)
        else:
            ended = place < moment.place or not moment.running
            kept += change.allocated - ended * change.freed
    return kept


@settings(deadline=None, max_examples=150)
@given(rows())
def test_a_bound_for_every_timing_and_one_attains_it(row: list[Action]) -> None:
    rank = rank_of(row)
    running, between = most_held(rank)
    bound = list(levels(rank.row, rank.changes))
    assert bound == running
    assert all(less <= most for less, most in zip(between, bound, strict=True))


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        # The offload beside F1 counts beside I1, too, which does not wait for it.
        ("0F0 0OFFLOAD0 0F1 0I1 0F2", [5, 5, 10, 11, 8]),
        # It may be there still, or what waits for it in a lane may be: not both.
        ("0F0 0OFFLOAD0 0F1 1ACCEPT0 0I1", [5, 5, 10, 10, 11]),
        ("0F0 0OFFLOAD0 0F1 1ACCEPT1 0I1 0F2", [5, 5, 10, 10, 11, 11]),
        # The rank waits for what it sends away.
        ("0F0 0OFFLOAD0 0AWAIT0 0F1", [5, 5, 0, 5]),
        # I waits for what it uses, and so for what that has waited for.
        ("0F0 0F1 0OFFLOAD0 0I1 0RELOAD0 0I0", [5, 10, 10, 11, 8, 9]),
    ],
)
def test_levels_of_a_row(text: str, expected: list[float]) -> None:
    rank = rank_of([Action.parse(item) for item in text.split()])
    assert list(levels(rank.row, rank.changes)) == expected
