"""Find the moves of activations in a schedule, and the actions that wait for them.

          rank      EVICT ----------------> ...  LOAD     OFFLOAD -> ... -> RELOAD
          partner         '-> ACCEPT ... RETURN -'        (between the rank and its host)

At ``EVICT`` a rank begins to send a microbatch's activations to its partner, and at ``ACCEPT`` the
partner receives them. At ``RETURN`` the partner begins to send them back, and at ``LOAD`` the owner
receives them. ``OFFLOAD`` and ``RELOAD`` do the same with the host's memory. A microbatch may move
twice: its saved tensors between F and the backward, and its deferred tensors between I and W.

Moves run beside computation. Three rules say which actions wait:

- I, B and W wait until all activations of their microbatch are back.
- Actions that allocate wait until the departures before the previous compute action have ended.
  These are F and RECOMPUTE, which compute, and ACCEPT, LOAD and RELOAD, which need buffers. So a
  transfer has at least one compute action to overlap with, and the order of a rank's row alone
  bounds the rank's memory.
- ``AWAIT`` waits until the activations of its microbatch have left the rank, whether they are the
  rank's own or its partner's. It is listed before an action that does not fit into memory together
  with these activations. Nothing overlaps with such a transfer.

``WorstCaseMemory`` computes the most that a rank holds along its row, however long transfers take.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import repeat

from .schedule import ARRIVALS, BACKWARDS, DEPARTURES, Action, ActionKind, Schedule

ALLOCATING = ARRIVALS | {ActionKind.FORWARD, ActionKind.RECOMPUTE}
"""Kinds that allocate activations, and therefore wait for departures."""


@dataclass(frozen=True, slots=True)
class ActivationMove:
    """One move of a microbatch's activations away from their rank and back.

    Attributes:
        stage: the stage that computed the activations.
        microbatch: the microbatch.
        rank: the rank that runs the stage.
        leaves: the place of EVICT or OFFLOAD in the rank's row.
        comes: the place of LOAD or RELOAD in the rank's row.
        used: the place of the next I, B or W of the microbatch, which needs the activations.
        deferred: True between I and W, False between F and the backward.
        partner: the rank that keeps the activations until they return; None for the host.
        accepted: the place of ACCEPT in the partner's row.
        returned: the place of RETURN in the partner's row.
    """

    stage: int
    microbatch: int
    rank: int
    leaves: int
    comes: int
    used: int
    deferred: bool
    partner: int | None = None
    accepted: int = -1
    returned: int = -1


def has_moves(schedule: Schedule) -> bool:
    """Whether the schedule moves any activations."""
    return not DEPARTURES.isdisjoint(schedule.kinds)


def offloads(schedule: Schedule) -> bool:
    """Whether any rank offloads activations to the host."""
    return any(kind.is_move and not kind.is_shared for kind in schedule.kinds)


def find_moves(schedule: Schedule) -> tuple[ActivationMove, ...]:
    """All moves, rank by rank, in the order of their departures.

    A row may list actions with the same text more than once. The first action of each row belongs
    to the first move, the second to the second. Incomplete moves, as in an illegal schedule, are
    left out.
    """
    if not has_moves(schedule):
        return ()
    places = [_places(row) for row in schedule.ranks]
    moves = (move for rank in range(len(places)) for move in _moves_of(schedule, places, rank))
    return tuple(sorted(moves, key=lambda move: (move.rank, move.leaves)))


def _places(row: Sequence[Action]) -> dict[Action, list[int]]:
    places: dict[Action, list[int]] = defaultdict(list)
    for place, action in enumerate(row):
        places[action].append(place)
    return places


def _moves_of(
    schedule: Schedule, places: Sequence[Mapping[Action, Sequence[int]]], rank: int
) -> Iterator[ActivationMove]:
    rank_places, partner = places[rank], schedule.partner(rank)

    def places_of(action: Action, kind: ActionKind, rank: int = rank) -> Sequence[int]:
        return places[rank].get(replace(action, kind=kind), ())

    for action, leaves in [*rank_places.items()]:
        ends: Iterable[tuple[int | None, int, int]] = repeat((None, -1, -1))
        if action.kind is ActionKind.EVICT and partner != rank:
            partner_places = (
                places_of(action, ActionKind.ACCEPT, partner),
                places_of(action, ActionKind.RETURN, partner),
            )
            ends = zip(repeat(partner), *partner_places, strict=False)
        elif action.kind is not ActionKind.OFFLOAD:
            continue
        arrival = ActionKind.RELOAD if action.kind is ActionKind.OFFLOAD else ActionKind.LOAD
        inputs = places_of(action, ActionKind.BACKWARD_INPUT)
        uses = sorted(place for kind in BACKWARDS for place in places_of(action, kind))
        for start, end, partner_ends in zip(leaves, places_of(action, arrival), ends, strict=False):
            used = next((place for place in uses if place > end), None)
            if used is not None:
                deferred = bool(inputs) and inputs[0] < start
                yield ActivationMove(
                    action.stage, action.microbatch, rank, start, end, used, deferred, *partner_ends
                )


def waited_departures(row: Sequence[Action]) -> Iterator[tuple[int, list[int]]]:
    """Yield (place of an action in the row, places of the departures that it waits for).

    A departure that an F, a RECOMPUTE or an AWAIT has waited for is not yielded again.
    """
    fresh: list[int] = []
    passed: list[int] = []
    for place, action in enumerate(row):
        if action.kind is ActionKind.AWAIT:
            awaited = [
                departure for departure in (*passed, *fresh) if awaits(action, row[departure])
            ]
            passed = [departure for departure in passed if departure not in awaited]
            fresh = [departure for departure in fresh if departure not in awaited]
            if awaited:
                yield place, awaited
            continue
        if action.kind in ARRIVALS:
            awaited = [
                *passed,
                *(departure for departure in fresh if not row[departure].kind.is_shared),
            ]
            if awaited:
                yield place, awaited
        elif action.kind in ALLOCATING and passed:
            yield place, [*passed]
            passed.clear()
        if action.kind.is_compute:
            passed += fresh
            fresh.clear()
        elif action.kind in DEPARTURES:
            fresh.append(place)


def awaits(action: Action, departure: Action) -> bool:
    """Whether the AWAIT ``action`` waits for the earlier ``departure`` of its row."""
    same = (action.stage, action.microbatch) == (departure.stage, departure.microbatch)
    return same and departure.kind in DEPARTURES


def recomputed_microbatches(row: Sequence[Action]) -> frozenset[tuple[int, int]]:
    """(stage, microbatch) of every RECOMPUTE of a row."""
    return frozenset(
        (action.stage, action.microbatch) for action in row if action.kind is ActionKind.RECOMPUTE
    )


_LEAVES = (ActionKind.EVICT, ActionKind.OFFLOAD)


@dataclass(eq=False, slots=True)
class _WorstCaseTransfer:
    """A transfer that may or may not have happened yet.

    Attributes:
        action: the action that starts it.
        size: by how much the rank's memory grows; negative for a departure.
        acceptance: for a RETURN, the arrival that brought the activations to this rank.
    """

    action: Action
    size: float
    acceptance: _WorstCaseTransfer | None = None


class WorstCaseMemory:
    """The most memory that a rank may hold, by the order of its row alone.

    A departure counts until the rank has waited for it. An arrival may be resident from its place
    in the row, but never together with the departures that it waits for in its lane (see
    ``step_graph``). So the larger of the arrival and these departures counts, until an action uses
    the arrival.

    Args:
        row: the rank's row; call ``begin_action`` for each of its actions in turn.
    """

    __slots__ = ("_latest", "_level", "_pending", "_place", "_unsure", "_waits")

    def __init__(self, row: Sequence[Action]) -> None:
        self._waits = dict(waited_departures(row))
        self._place = -1
        self._level = 0.0
        # Arrivals that may have happened, each after the departures for which it was the first to
        # wait. Any prefix of this list may have happened by now.
        self._unsure: list[_WorstCaseTransfer] = []
        # The last arrival of each microbatch, and by place the departures that may still come.
        self._latest: dict[tuple[int, int], _WorstCaseTransfer] = {}
        self._pending: dict[int, _WorstCaseTransfer] = {}

    @property
    def most(self) -> float:
        """The worst case of the rank's memory in the present action, in the unit of its sizes."""
        most = now = self._level
        for transfer in self._unsure:
            now += transfer.size
            if now > most:
                most = now
        return most

    def add_bytes(self, more: float) -> None:
        """Add ``more`` to the memory that does not move, from the present action on."""
        self._level += more

    def begin_action(self, action: Action, size: float = 0.0) -> None:
        """Begin the next action, after its waits; ``size`` is the memory that a move transfers."""
        self._place += 1
        kind, key = action.kind, (action.stage, action.microbatch)
        waits = self._waits.get(self._place, ())
        waited = [self._pending[place] for place in waits if place in self._pending]
        if kind in ARRIVALS:
            arrival = self._latest[key] = _WorstCaseTransfer(action, size)
            self._unsure += [
                *(transfer for transfer in waited if transfer not in self._unsure),
                arrival,
            ]
        elif kind in DEPARTURES:
            acceptance = self._latest.pop(key, None) if kind is ActionKind.RETURN else None
            self._pending[self._place] = _WorstCaseTransfer(action, -size, acceptance)
        elif waited:
            self._settle_departures(waited)
        elif self._latest and kind in BACKWARDS:
            self._record_use(*key)

    def _record_use(self, stage: int, microbatch: int) -> None:
        """Record that a microbatch is used, so that its departure and arrival have happened."""
        arrival = self._latest.pop((stage, microbatch), None)
        if arrival is None:
            return
        self._settle_arrival(arrival)
        departures = (
            transfer for transfer in self._pending.values() if transfer.action.kind in _LEAVES
        )
        key = stage, microbatch
        self._settle_departures(
            [
                transfer
                for transfer in departures
                if (transfer.action.stage, transfer.action.microbatch) == key
            ]
        )

    def _settle_departures(self, departures: Sequence[_WorstCaseTransfer]) -> None:
        """Record that these departures, and all earlier departures in their lanes, have
        happened.
        """
        lanes: set[bool] = set()
        gone = []
        for departure in reversed(self._pending.values()):
            lane = departure.action.kind.is_shared
            if departure in departures or lane in lanes:
                lanes.add(lane)
                gone.append(departure)
        for departure in reversed(gone):
            if departure.acceptance is not None:
                self._settle_arrival(departure.acceptance)
            if departure in self._pending.values():  # the arrival may have settled it
                self._settle([departure])

    def _settle_arrival(self, arrival: _WorstCaseTransfer) -> None:
        """Record that an arrival, and all departures that it waited for, have happened."""
        if arrival in self._unsure:
            self._settle(self._unsure[: self._unsure.index(arrival) + 1])

    def _settle(self, transfers: Sequence[_WorstCaseTransfer]) -> None:
        """Record that these transfers have happened."""
        self._level += sum(transfer.size for transfer in transfers)
        self._unsure = [transfer for transfer in self._unsure if transfer not in transfers]
        self._pending = {
            at: transfer for at, transfer in self._pending.items() if transfer not in transfers
        }
