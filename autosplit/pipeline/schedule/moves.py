"""Activations that are away for a while: which moves of a schedule belong together.

``OFFLOAD`` stands where a rank begins to send what it holds of a microbatch to its store on the
host, and ``RELOAD`` where it begins to take that in again. A microbatch may be away twice: while it
is saved, from F to the backward, and while it is deferred, from I to W.

Neither keeps its rank from going on. What must wait, and for what:

- I, B or W of a microbatch that is away, until it is all there again;
- a rank that is to hold more (F and RECOMPUTE by computing, RELOAD by its buffers), until all has
  left that its row sends away before the compute action before. A transfer so has at least one
  compute action to hide behind, and what a rank holds is bounded by the order of its row alone;
- a RELOAD besides for all that its row sends away before it, as both go over one link;
- the rank itself at an ``AWAIT``, until what its row sent away of that microbatch has left: where
  there is no room for what comes next beside it, at the price of a transfer that hides behind
  nothing.

``LevelByOrder`` has the most that a rank holds as it goes through its row, whenever its transfers
happen.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from .action import Action, ActionKind
from .schedule import Schedule

TAKERS = frozenset({ActionKind.FORWARD, ActionKind.RECOMPUTE, ActionKind.RELOAD})
"""After which a rank holds more, and which therefore wait for what was sent away."""

_USES = (ActionKind.BACKWARD_INPUT, ActionKind.BACKWARD, ActionKind.BACKWARD_WEIGHT)


@dataclass(frozen=True, slots=True)
class Journey:
    """One time that what a microbatch holds on a stage is away from its rank.

    Attributes:
        stage: whose it is.
        microbatch: of which microbatch.
        rank: the rank that runs the stage.
        leaves: the place in that rank's row of OFFLOAD.
        comes: that of RELOAD.
        used: that of the I, B or W behind it, which needs it.
        deferred: whether it is between I and W, rather than between F and the backward.
    """

    stage: int
    microbatch: int
    rank: int
    leaves: int
    comes: int
    used: int
    deferred: bool


def offloads(schedule: Schedule) -> bool:
    """Whether any rank keeps anything in its store on the host."""
    return any(a.kind is ActionKind.OFFLOAD for row in schedule.ranks for a in row)


def journeys_of(schedule: Schedule) -> tuple[Journey, ...]:
    """All journeys, in the order of their departures, rank by rank.

    Of moves with the same text the first in a row belong together, then the second. What does not
    make a whole journey, as in an illegal schedule, is left out.
    """
    if not offloads(schedule):
        return ()
    found = (journey for rank, row in enumerate(schedule.ranks) for journey in _journeys(rank, row))
    return tuple(sorted(found, key=lambda each: (each.rank, each.leaves)))


def _journeys(rank: int, row: Sequence[Action]) -> Iterator[Journey]:
    places: dict[tuple[int, int], dict[ActionKind, list[int]]] = defaultdict(
        lambda: defaultdict(list)
    )
    for place, action in enumerate(row):
        places[action.stage, action.microbatch][action.kind].append(place)
    for (stage, microbatch), own in places.items():
        inputs = own[ActionKind.BACKWARD_INPUT]
        uses = sorted(place for kind in _USES for place in own[kind])
        ends = zip(own[ActionKind.OFFLOAD], own[ActionKind.RELOAD], strict=False)
        for leaves, comes in ends:
            used = next((place for place in uses if place > comes), None)
            if used is not None:
                deferred = bool(inputs) and inputs[0] < leaves
                yield Journey(stage, microbatch, rank, leaves, comes, used, deferred)


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
        elif action.kind is ActionKind.RELOAD and (passed or fresh):
            yield place, [*passed, *fresh]
        elif action.kind in TAKERS and passed:
            yield place, [*passed]
            passed.clear()
        if action.kind.is_compute:
            passed += fresh
            fresh.clear()
        elif action.kind is ActionKind.OFFLOAD:
            fresh.append(place)


def awaits(action: Action, departure: Action) -> bool:
    """Whether an AWAIT is for a departure before it in its row."""
    same = (action.stage, action.microbatch) == (departure.stage, departure.microbatch)
    return same and departure.kind is ActionKind.OFFLOAD


def recomputed(row: Sequence[Action]) -> frozenset[tuple[int, int]]:
    """Stage and microbatch of every RECOMPUTE of a row."""
    return frozenset(
        (action.stage, action.microbatch) for action in row if action.kind is ActionKind.RECOMPUTE
    )


@dataclass(eq=False, slots=True)
class _Transfer:
    """How much more a rank holds behind it; of a departure less than 0."""

    size: float


class LevelByOrder:
    """What a rank may hold at most, by the order of its row alone; see ``moves``.

    What leaves counts until the rank has waited for it. What arrives may be there from its place
    in the row on, but then what it has waited for is not, though the rank went on meanwhile: of
    both only what is more counts, until an action has used what arrived.

    Args:
        row: that of the rank; ``begin`` is called for each action of it in turn.
    """

    __slots__ = ("_arrivals", "_level", "_pending", "_place", "_unsure", "_waits")

    def __init__(self, row: Sequence[Action]) -> None:
        self._waits = dict(waited_departures(row))
        self._place = -1
        self._level = 0.0
        # Arrivals, each behind the departures that it and none before it has waited for: so much
        # of it as has happened by now is there from its beginning on.
        self._unsure: list[_Transfer] = []
        self._arrivals: dict[tuple[int, int], _Transfer] = {}
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
        if kind is ActionKind.RELOAD:
            arrival = self._arrivals[key] = _Transfer(size)
            waited = [each for each in self._pending.values() if each not in self._unsure]
            self._unsure += [*waited, arrival]
        elif kind is ActionKind.OFFLOAD:
            self._pending[self._place] = _Transfer(-size)
        elif departures := self._waits.get(self._place):  # and those before them in the lane
            last = departures[-1]
            self._settle([each for at, each in self._pending.items() if at <= last])
        elif self._arrivals and kind in _USES:
            arrived = self._arrivals.pop(key, None)
            if arrived in self._unsure:
                self._settle(self._unsure[: self._unsure.index(arrived) + 1])

    def _settle(self, transfers: Sequence[_Transfer]) -> None:
        """These have happened."""
        self._level += sum(each.size for each in transfers)
        self._unsure = [each for each in self._unsure if each not in transfers]
        self._pending = {at: each for at, each in self._pending.items() if each not in transfers}
