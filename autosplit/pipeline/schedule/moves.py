"""Activations that are away for a while: which moves of a schedule belong together.

``EVICT`` stands where a rank begins to send what it holds of a microbatch to its partner, and
``ACCEPT`` in the partner's row where that takes it in; ``RETURN`` where the partner begins to send
it back, and ``LOAD`` where the owner takes that in. ``OFFLOAD`` and ``RELOAD`` are the same with
the rank's own store on the host. A microbatch may be away twice: while it is saved, from F to the
backward, and while it is deferred, from I to W.

None of these keeps its rank from going on. What must wait, and for what:

- I, B or W of a microbatch that is away, until it is all there again;
- a rank that is to hold more (F and RECOMPUTE by computing, ACCEPT, LOAD and RELOAD by their
  buffers), until all has left that its row sends away before the compute action before. A transfer
  so has at least one compute action to hide behind, and what a rank holds is bounded by the order
  of its row alone;
- the rank itself at an ``AWAIT``, until what its row sent away of that microbatch has left, be it
  its own or its partner's: where there is no room for what comes next beside it, at the price of a
  transfer that hides behind nothing.

``LevelByOrder`` has the most that a rank holds as it goes through its row, whenever its transfers
happen.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import repeat

from .schedule import ARRIVALS, BACKWARDS, DEPARTURES, Action, ActionKind, Schedule

TAKERS = ARRIVALS | {ActionKind.FORWARD, ActionKind.RECOMPUTE}
"""After which a rank holds more, and which therefore wait for what was sent away."""


@dataclass(frozen=True, slots=True)
class Journey:
    """One time that what a microbatch holds on a stage is away from its rank.

    Attributes:
        stage: whose it is.
        microbatch: of which microbatch.
        rank: the rank that runs the stage.
        leaves: the place in that rank's row of EVICT or OFFLOAD.
        comes: that of LOAD or RELOAD.
        used: that of the I, B or W behind it, which needs it.
        deferred: whether it is between I and W, rather than between F and the backward.
        partner: the rank that has it meanwhile; None for the host's store.
        accepted: the place in the partner's row of ACCEPT.
        returned: that of RETURN.
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
    """Whether anything of the step is away for a while."""
    return any(action.kind in DEPARTURES for row in schedule.ranks for action in row)


def offloads(schedule: Schedule) -> bool:
    """Whether any rank keeps anything in its store on the host."""
    kinds = {action.kind for row in schedule.ranks for action in row}
    return any(kind.is_move and not kind.is_shared for kind in kinds)


def journeys_of(schedule: Schedule) -> tuple[Journey, ...]:
    """All journeys, in the order of their departures, rank by rank.

    Of moves with the same text the first in a row belong together, then the second. What does not
    make a whole journey, as in an illegal schedule, is left out.
    """
    if not has_moves(schedule):
        return ()
    places = [_places(row) for row in schedule.ranks]
    found = (each for rank in range(len(places)) for each in _journeys(schedule, places, rank))
    return tuple(sorted(found, key=lambda each: (each.rank, each.leaves)))


def _places(row: Sequence[Action]) -> dict[Action, list[int]]:
    found: dict[Action, list[int]] = defaultdict(list)
    for place, action in enumerate(row):
        found[action].append(place)
    return found


def _journeys(
    schedule: Schedule, places: Sequence[Mapping[Action, Sequence[int]]], rank: int
) -> Iterator[Journey]:
    own, partner = places[rank], schedule.partner(rank)

    def at(action: Action, kind: ActionKind, rank: int = rank) -> Sequence[int]:
        return places[rank].get(replace(action, kind=kind), ())

    for action, leaves in [*own.items()]:
        ends: Iterable[tuple[int | None, int, int]] = repeat((None, -1, -1))
        if action.kind is ActionKind.EVICT and partner != rank:
            taken = at(action, ActionKind.ACCEPT, partner), at(action, ActionKind.RETURN, partner)
            ends = zip(repeat(partner), *taken, strict=False)
        elif action.kind is not ActionKind.OFFLOAD:
            continue
        back = ActionKind.RELOAD if action.kind is ActionKind.OFFLOAD else ActionKind.LOAD
        inputs = at(action, ActionKind.BACKWARD_INPUT)
        uses = sorted(place for kind in BACKWARDS for place in at(action, kind))
        for start, end, there in zip(leaves, at(action, back), ends, strict=False):
            used = next((place for place in uses if place > end), None)
            if used is not None:
                deferred = bool(inputs) and inputs[0] < start
                yield Journey(
                    action.stage, action.microbatch, rank, start, end, used, deferred, *there
                )


def waited_departures(row: Sequence[Action]) -> Iterator[tuple[int, list[int]]]:
    """Of every action of a row that is to hold more, its place, and those of what has to have left;
    and of every AWAIT, with that of what it waits for.

    What an F, a RECOMPUTE or an AWAIT has waited for is not told again.
    """
    fresh: list[int] = []
    passed: list[int] = []
    for place, action in enumerate(row):
        if action.kind is ActionKind.AWAIT:
            awaited = [each for each in (*passed, *fresh) if awaits(action, row[each])]
            passed = [each for each in passed if each not in awaited]
            fresh = [each for each in fresh if each not in awaited]
            if awaited:
                yield place, awaited
            continue
        if action.kind in ARRIVALS:
            awaited = [*passed, *(each for each in fresh if not row[each].kind.is_shared)]
            if awaited:
                yield place, awaited
        elif action.kind in TAKERS and passed:
            yield place, [*passed]
            passed.clear()
        if action.kind.is_compute:
            passed += fresh
            fresh.clear()
        elif action.kind in DEPARTURES:
            fresh.append(place)


def awaits(action: Action, departure: Action) -> bool:
    """Whether an AWAIT is for a departure before it in its row."""
    same = (action.stage, action.microbatch) == (departure.stage, departure.microbatch)
    return same and departure.kind in DEPARTURES


def recomputed(row: Sequence[Action]) -> frozenset[tuple[int, int]]:
    """Stage and microbatch of every RECOMPUTE of a row."""
    return frozenset(
        (action.stage, action.microbatch) for action in row if action.kind is ActionKind.RECOMPUTE
    )


_LEAVES = (ActionKind.EVICT, ActionKind.OFFLOAD)


@dataclass(eq=False, slots=True)
class _Transfer:
    """Attributes:
    action: that starts it.
    size: how much more the rank holds behind it; of a departure less than 0.
    came: the arrival by which it had come, of a guest that leaves.
    """

    action: Action
    size: float
    came: _Transfer | None = None


class LevelByOrder:
    """What a rank may hold at most, by the order of its row alone; see ``moves``.

    What leaves counts until the rank has waited for it. What arrives may be there from its place
    in the row on, but then what it has waited for in its lane is not, though the rank went on
    meanwhile: of both only what is more counts, until an action has used what arrived.

    Args:
        row: that of the rank; ``begin`` is called for each action of it in turn.
    """

    __slots__ = ("_latest", "_level", "_pending", "_place", "_unsure", "_waits")

    def __init__(self, row: Sequence[Action]) -> None:
        self._waits = dict(waited_departures(row))
        self._place = -1
        self._level = 0.0
        # Arrivals, each behind the departures that it and none before it has waited for: so much
        # of it as has happened by now is there from its beginning on.
        self._unsure: list[_Transfer] = []
        self._latest: dict[tuple[int, int], _Transfer] = {}  # what is here or comes here
        self._pending: dict[int, _Transfer] = {}  # departures by place that may not have happened

    @property
    def most(self) -> float:
        """The most that there may be now."""
        most = now = self._level
        for transfer in self._unsure:
            now += transfer.size
            if now > most:
                most = now
        return most

    def change(self, more: float) -> None:
        """There is so much more from here on, or less, of what stays here."""
        self._level += more

    def begin(self, action: Action, size: float = 0.0) -> None:
        """Come to the next action, behind what it waits for; ``size`` is what a move carries."""
        self._place += 1
        kind, key = action.kind, (action.stage, action.microbatch)
        waits = self._waits.get(self._place, ())
        waited = [self._pending[place] for place in waits if place in self._pending]
        if kind in ARRIVALS:
            arrival = self._latest[key] = _Transfer(action, size)
            self._unsure += [*(each for each in waited if each not in self._unsure), arrival]
        elif kind in DEPARTURES:
            came = self._latest.pop(key, None) if kind is ActionKind.RETURN else None
            self._pending[self._place] = _Transfer(action, -size, came)
        elif waited:
            self._leave(waited)
        elif self._latest and kind in BACKWARDS:
            self._use(*key)

    def _use(self, stage: int, microbatch: int) -> None:
        """A microbatch is used: what was away of it has left before, and is here again."""
        arrival = self._latest.pop((stage, microbatch), None)
        if arrival is None:
            return
        self._come(arrival)
        away = (each for each in self._pending.values() if each.action.kind in _LEAVES)
        key = stage, microbatch
        self._leave([each for each in away if (each.action.stage, each.action.microbatch) == key])

    def _leave(self, departures: Sequence[_Transfer]) -> None:
        """These have left for sure, and those before them in their lanes."""
        lanes: set[bool] = set()
        gone = []
        for departure in reversed(self._pending.values()):
            lane = departure.action.kind.is_shared
            if departure in departures or lane in lanes:
                lanes.add(lane)
                gone.append(departure)
        for departure in reversed(gone):
            if departure.came is not None:
                self._come(departure.came)
            if departure in self._pending.values():  # not before what came
                self._settle([departure])

    def _come(self, arrival: _Transfer) -> None:
        """An arrival is there for sure, and all that it has waited for is gone."""
        if arrival in self._unsure:
            self._settle(self._unsure[: self._unsure.index(arrival) + 1])

    def _settle(self, transfers: Sequence[_Transfer]) -> None:
        """These have happened."""
        self._level += sum(each.size for each in transfers)
        self._unsure = [each for each in self._unsure if each not in transfers]
        self._pending = {at: each for at, each in self._pending.items() if each not in transfers}
