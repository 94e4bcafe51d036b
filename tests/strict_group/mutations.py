"""Queues of messages and collectives that end, and what becomes of them by a few changes."""

from __future__ import annotations

from random import Random
from typing import Any

from .player import Communicators, Item, Program

Rows = list[list[Any]]
"""By rank, what its host does; a wait says for how many entries before the last one it is."""


def case(seed: int, *, eager: bool = False) -> tuple[Program, Communicators]:
    """A program with some changes, from a seed; communicators are made eagerly, or some of them."""
    random = Random(seed)
    ranks = random.randint(2, 4)
    members, built = {}, {}
    for name in "abcd"[: random.randint(1, 4)]:
        members[name] = tuple(sorted(random.sample(range(ranks), random.randint(2, ranks))))
        built[name] = random.random() < 0.5
    rows: Rows = [[] for _ in range(ranks)]
    for _ in range(random.randint(2, 14)):  # all ranks in one order: nothing waits for ever
        name = random.choice([*members])
        taking = members[name]
        if random.random() < 0.4:
            parts = dict.fromkeys(taking, (random.choice(["all_reduce", "all_gather"]), taking))
        else:
            one, other = random.sample(taking, 2)
            parts = {one: ("send", (other,)), other: ("receive", (one,))}
        for rank, part in parts.items():
            rows[rank].append(("group", name, [part]))
            if random.random() < 0.4:
                rows[rank].append(("wait", name, random.randint(0, 1)))
    for _ in range(random.randint(0, 3)):
        _change(random, rows, built)
    program = {rank: _written(row) for rank, row in enumerate(rows)}
    return program, {name: (members[name], eager or built[name]) for name in members}


def _change(random: Random, rows: Rows, made: dict[str, bool]) -> None:
    row = random.choice([row for row in rows if row] or [[("wait", "a", 0)]])
    at = random.randrange(len(row))
    match random.choice(["swap", "drop", "delay", "make otherwise", "coalesce"]):
        case "swap":
            row.insert(at - 1 if at else 0, row.pop(at))
        case "drop":
            row.pop(at)
        case "delay":
            row.insert(random.randint(at, len(row)), row.pop(at))
        case "make otherwise":
            name = random.choice([*made])
            made[name] = not made[name]
        case "coalesce":
            later = [n for n in range(at + 1, len(row)) if row[n][:2] == row[at][:2]]
            if later and row[at][0] == "group":
                row[at] = ("group", row[at][1], row[at][2] + row.pop(later[0])[2])


def _written(row: list[Any]) -> list[Item]:
    """As players take it; who waits for what was coalesced waits for all of it."""
    items: list[Item] = []
    entries: dict[str, list[range]] = {}
    for subject, name, more in row:
        earlier = entries.setdefault(name, [])
        if subject == "group":
            start = earlier[-1].stop if earlier else 0
            earlier.append(range(start, start + len(more)))
            items.append((subject, name, more) if len(more) > 1 else ("op", name, *more[0]))
        elif len(earlier) > more:
            items += [(subject, name, at) for at in earlier[-1 - more]]
    return items
