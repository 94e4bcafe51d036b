"""Queues of pipelines and of replicas, and what becomes of them by a few changes, from a seed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from random import Random
from typing import Any

from .player import Communicators, Item, Program


@dataclass(eq=False)
class _Call:
    """What a host gives to a communicator: one operation, or several as a group."""

    communicator: str
    parts: list[tuple[str, tuple[int, ...]]]


@dataclass(eq=False)
class _Wait:
    """A host waits for the operation of some place in a call."""

    call: _Call
    place: int = 0


class Draft:
    """A program that can still be changed.

    Attributes:
        rows: by rank, calls and waits.
        members: of each communicator.
        eager: which are made eagerly.
    """

    def __init__(self, ranks: int) -> None:
        self.rows: list[list[_Call | _Wait]] = [[] for _ in range(ranks)]
        self.members: dict[str, tuple[int, ...]] = {}
        self.eager: dict[str, bool] = {}

    def know(self, name: str, members: Sequence[int], *, eager: bool) -> None:
        """There is such a communicator."""
        self.members.setdefault(name, tuple(members))
        self.eager.setdefault(name, eager)

    def written(self) -> tuple[Program, Communicators]:
        """As players take it; waits for what is not there yet are left out."""
        program = {rank: _items(row) for rank, row in enumerate(self.rows)}
        return program, {name: (self.members[name], self.eager[name]) for name in self.members}


def _items(row: Sequence[_Call | _Wait]) -> list[Item]:
    counts: dict[str, int] = {}
    first: dict[int, int] = {}
    items: list[Item] = []
    for each in row:
        if isinstance(each, _Wait):
            if id(each.call) in first:
                items.append(("wait", each.call.communicator, first[id(each.call)] + each.place))
            continue
        first[id(each)] = counts.get(each.communicator, 0)
        counts[each.communicator] = first[id(each)] + len(each.parts)
        single = len(each.parts) == 1
        items.append(
            ("op", each.communicator, *each.parts[0])
            if single
            else ("group", each.communicator, [*each.parts])
        )
    return items


# --- what pipelines and replicas enqueue ----------------------------------------------------------


def draft(random: Random) -> Draft:
    """A pipeline's messages, with sums over replicas behind them, or collectives alone."""
    return _pipeline(random) if random.random() < 0.7 else _collectives(random)


def _actions(rank: int, ranks: int, microbatches: int, *, late: bool) -> list[tuple[str, int]]:
    """1F1B, or all forwards first."""
    warm = microbatches if late else min(microbatches, ranks - rank)
    order = [("F", each) for each in range(warm)]
    for each in range(microbatches):
        order.append(("B", each))
        if warm + each < microbatches:
            order.append(("F", warm + each))
    return order


def _pipeline(random: Random) -> Draft:
    ranks, microbatches = random.randint(2, 4), random.randint(1, 4)
    over = random.choice(["direction", "pair", "all"])
    eager, late, ahead = random.random() < 0.5, random.random() < 0.5, random.randint(0, 2)
    patient, reduces = random.random() < 0.3, random.random() < 0.3
    made = Draft(ranks)

    def name(source: int, target: int) -> str:
        low, high = sorted((source, target))
        names = {"direction": f"{source}>{target}", "pair": f"{low}:{high}", "all": "all"}
        members = range(ranks) if over == "all" else (low, high)
        made.know(names[over], tuple(members), eager=eager)
        return names[over]

    for rank, row in enumerate(made.rows):
        actions = _actions(rank, ranks, microbatches, late=late)
        sources = [rank - 1 if kind == "F" else rank + 1 for kind, _ in actions]
        receives = [
            _Call(name(each, rank), [("receive", (each,))]) if 0 <= each < ranks else None
            for each in sources
        ]
        posted = 0
        sends: list[_Call] = []
        for place, (kind, _) in enumerate(actions):
            while posted <= min(place + ahead, len(actions) - 1):
                row += [each] if (each := receives[posted]) is not None else []
                posted += 1
            if (came := receives[place]) is not None:
                row.append(_Wait(came))
            target = rank + 1 if kind == "F" else rank - 1
            if 0 <= target < ranks:
                sends.append(_Call(name(rank, target), [("send", (target,))]))
                row += [sends[-1], _Wait(sends[-1])] if patient else [sends[-1]]
        row += map(_Wait, sends)
    if reduces:
        _reduce(made, random)
    return made


def _reduce(made: Draft, random: Random) -> None:
    """Sums over two replicas of the pipeline, stage by stage."""
    ranks = len(made.rows)
    for rank in range(ranks):
        copied = {id(each): _copied(each, ranks) for each in made.rows[rank]}
        made.rows.append(
            [
                _Wait(copied[id(each.call)], each.place)
                if isinstance(each, _Wait)
                else copied[id(each)]
                for each in made.rows[rank]
            ]
        )
    for name, members in [*made.members.items()]:
        made.know(f"{name} again", [each + ranks for each in members], eager=made.eager[name])
    for rank in range(ranks):
        pair = (rank, rank + ranks)
        made.know(f"sums {rank}", pair, eager=random.random() < 0.5)
        for member in pair:
            call = _Call(f"sums {rank}", [("all_reduce", pair)])
            made.rows[member] += [call, _Wait(call)]


def _copied(item: _Call | _Wait, by: int) -> Any:
    if isinstance(item, _Wait):
        return None
    parts = [(kind, tuple(peer + by for peer in peers)) for kind, peers in item.parts]
    return _Call(f"{item.communicator} again", parts)


def _collectives(random: Random) -> Draft:
    ranks = random.randint(2, 4)
    made = Draft(ranks)
    names = [f"mesh {each}" for each in range(random.randint(1, 3))]
    for each in names:
        members = sorted(random.sample(range(ranks), random.randint(2, ranks)))
        made.know(each, members, eager=random.random() < 0.5)
    for _ in range(random.randint(2, 8)):
        name = random.choice(names)
        kind, waits = random.choice(["all_reduce", "all_gather"]), random.random() < 0.5
        for member in made.members[name]:
            call = _Call(name, [(kind, made.members[name])])
            made.rows[member] += [call, _Wait(call)] if waits else [call]
    return made


# --- changes --------------------------------------------------------------------------------------


def mutate(made: Draft, random: Random) -> str:
    """Change one thing; what."""
    change = random.choice([_swap, _drop, _delay, _merge, _make_otherwise, _group])
    change(made, random)
    return change.__name__.lstrip("_")


def _row(made: Draft, random: Random) -> list[_Call | _Wait]:
    return random.choice([row for row in made.rows if row] or made.rows)


def _swap(made: Draft, random: Random) -> None:
    row = _row(made, random)
    if len(row) > 1:
        at = random.randrange(len(row) - 1)
        row[at], row[at + 1] = row[at + 1], row[at]


def _drop(made: Draft, random: Random) -> None:
    if row := _row(made, random):
        row.pop(random.randrange(len(row)))


def _delay(made: Draft, random: Random) -> None:
    if row := _row(made, random):
        item = row.pop(at := random.randrange(len(row)))
        row.insert(random.randint(at, len(row)), item)


def _merge(made: Draft, random: Random) -> None:
    """Two communicators are one, of all their members, who all take part in its collectives."""
    if len(made.members) < 2:
        return
    kept, gone = random.sample(sorted(made.members), 2)
    members = tuple(sorted({*made.members[kept], *made.members.pop(gone)}))
    made.members[kept] = members
    made.eager.pop(gone)
    for row in made.rows:
        for call in row:
            if isinstance(call, _Call) and call.communicator in (kept, gone):
                call.communicator = kept
                call.parts = [
                    (kind, peers if kind in ("send", "receive") else members)
                    for kind, peers in call.parts
                ]


def _make_otherwise(made: Draft, random: Random) -> None:
    if made.eager:
        name = random.choice(sorted(made.eager))
        made.eager[name] = not made.eager[name]


def _group(made: Draft, random: Random) -> None:
    """Two calls on one communicator, one after the other, are coalesced."""
    row = _row(made, random)
    pairs = [
        (at, one, other)
        for at, (one, other) in enumerate(pairwise(row))
        if isinstance(one, _Call)
        and isinstance(other, _Call)
        and one.communicator == other.communicator
    ]
    if not pairs:
        return
    at, one, other = random.choice(pairs)
    for wait in row:
        if isinstance(wait, _Wait) and wait.call is other:
            wait.call, wait.place = one, wait.place + len(one.parts)
    one.parts += other.parts
    del row[at + 1]


def case(seed: int) -> tuple[Program, Communicators]:
    """A program with some changes."""
    random = Random(seed)
    made = draft(random)
    for _ in range(random.randint(0, 3)):
        mutate(made, random)
    return made.written()
