"""The most that a rank holds as it goes through its row, whenever its transfers happen."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from .action import ARRIVALS, DEPARTURES, Action, ActionKind
from .moves import TAKERS, awaits

_LEAVES = (ActionKind.EVICT, ActionKind.OFFLOAD)


@dataclass(eq=False, slots=True)
class _Departure:
    """Attributes:
    action: that starts it.
    size: how much leaves.
    accepted: the number of the arrival by which it had come, of a guest.
    """

    action: Action
    size: float
    accepted: int | None


@dataclass(eq=False, slots=True)
class _Arrivals:
    """What may have come by now, and what has left if it has.

    Attributes:
        change: how much more there is once it has come.
        came: numbers of the arrivals.
        gone: the departures that they have waited for, and those before them have not.
    """

    change: float
    came: list[int]
    gone: list[_Departure]


class LevelByOrder:
    """What a rank may hold at most, by the order of its row alone; see ``moves``.

    What leaves counts until the rank has waited for it. What arrives may be there from its place
    in the row on, but then what it has waited for in its lane is not, though the rank went on
    meanwhile: of both only what is more counts, until an action has used what arrived.

    Go through a row with ``begin`` and ``end`` for each action.
    """

    __slots__ = ("_arrivals", "_begun", "_fresh", "_latest", "_level", "_passed")

    def __init__(self) -> None:
        self._level = 0.0  # while nothing of the arrivals below has come
        self._arrivals: list[_Arrivals] = []
        self._begun = 0
        self._latest: dict[tuple[int, int], int] = {}  # arrival of what is here or comes here
        self._fresh: list[_Departure] = []
        self._passed: list[_Departure] = []  # behind which an action has computed

    @property
    def most(self) -> float:
        """The most that there may be now."""
        most = now = self._level
        for arrivals in self._arrivals:
            now += arrivals.change
            if now > most:
                most = now
        return most

    def change(self, more: float) -> None:
        """There is so much more from here on, or less, of what stays here."""
        self._level += more

    def begin(self, action: Action, size: float = 0.0) -> None:
        """Come to an action, behind what it waits for; ``size`` is how much a move carries."""
        kind = action.kind
        if kind in ARRIVALS:
            self._arrive(action, size)
        elif kind in DEPARTURES:
            guest = kind is ActionKind.RETURN
            key = action.stage, action.microbatch
            accepted = self._latest.pop(key, None) if guest else None
            self._fresh.append(_Departure(action, size, accepted))
        elif kind is ActionKind.AWAIT:
            self._leave([each for each in self._pending if awaits(action, each.action)])
        elif kind in TAKERS:
            self._leave(self._passed)
        elif self._latest:
            for microbatch in action.microbatches:
                self._use(action.stage, microbatch)

    def end(self, action: Action) -> None:
        """The action has ended."""
        if self._fresh and action.kind.is_compute:
            self._passed += self._fresh
            self._fresh.clear()

    @property
    def _pending(self) -> list[_Departure]:
        return [*self._passed, *self._fresh]

    def _arrive(self, action: Action, size: float) -> None:
        self._begun += 1
        self._latest[action.stage, action.microbatch] = self._begun
        waited = [each for each in self._pending if self._is_waited_for(each)]
        if waited:
            size -= sum(each.size for each in waited)
            self._arrivals.append(_Arrivals(size, [self._begun], waited))
        elif self._arrivals:
            # With nothing gone for it, it may as well have come.
            self._arrivals[-1].change += size
            self._arrivals[-1].came.append(self._begun)
        else:
            self._level += size

    def _is_waited_for(self, departure: _Departure) -> bool:
        """Whether what arrives from here on waits for a departure, and nothing before it has."""
        fresh = departure in self._fresh
        if fresh and departure.action.kind is not ActionKind.OFFLOAD:
            return False
        return self._waiting(departure) is None

    def _waiting(self, departure: _Departure) -> _Arrivals | None:
        """The first arrivals that have waited for a departure."""
        return next((each for each in self._arrivals if departure in each.gone), None)

    def _use(self, stage: int, microbatch: int) -> None:
        """A microbatch is used: what was away of it has left before, and is here again."""
        arrival = self._latest.pop((stage, microbatch), None)
        if arrival is None:
            return
        self._come(arrival)
        away = ((each, each.action) for each in self._pending if each.action.kind in _LEAVES)
        self._leave([d for d, a in away if (a.stage, a.microbatch) == (stage, microbatch)])

    def _leave(self, departures: Sequence[_Departure]) -> None:
        """These have left for sure, and those before them in their lanes."""
        lanes: set[bool] = set()
        gone = []
        for departure in reversed(self._pending):
            lane = departure.action.kind is ActionKind.OFFLOAD
            if departure in departures or lane in lanes:
                lanes.add(lane)
                gone.append(departure)
        for departure in reversed(gone):
            if departure.accepted is not None:
                self._come(departure.accepted)
            if departure in self._passed or departure in self._fresh:  # not before what came
                self._go(departure)

    def _go(self, departure: _Departure) -> None:
        self._level -= departure.size
        arrivals = self._waiting(departure)
        if arrivals is not None:
            arrivals.change += departure.size
            arrivals.gone.remove(departure)
            if not arrivals.gone:
                self._merge(arrivals)
        self._forget([departure])

    def _merge(self, arrivals: _Arrivals) -> None:
        """What has nothing gone for it any more may as well have come."""
        place = self._arrivals.index(arrivals)
        if place:
            self._arrivals[place - 1].change += arrivals.change
            self._arrivals[place - 1].came += arrivals.came
        else:
            self._level += arrivals.change
        del self._arrivals[place]

    def _come(self, arrival: int) -> None:
        """An arrival is there for sure, and all that it has waited for is gone."""
        for place, each in enumerate(self._arrivals):
            if arrival in each.came:
                for come in self._arrivals[: place + 1]:
                    self._level += come.change
                    self._forget(come.gone)
                del self._arrivals[: place + 1]
                return

    def _forget(self, departures: Sequence[_Departure]) -> None:
        self._passed = [each for each in self._passed if each not in departures]
        self._fresh = [each for each in self._fresh if each not in departures]
