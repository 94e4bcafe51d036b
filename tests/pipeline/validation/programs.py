"""Programs of ranks, written down: as plain tuples, and for all ranks of a mesh."""

from __future__ import annotations

import itertools
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

from autosplit.pipeline.validation.communicators import (
    HOST,
    RECEIVE,
    SEND,
    Operation,
    Part,
    Programs,
    Sharing,
    stuck,
)


def of_items(
    program: Mapping[int, Sequence[Any]],
    communicators: Mapping[str, tuple[tuple[int, ...], bool]],
) -> Programs:
    """Those of tests/strict_group: per rank ``("op", communicator, kind, peers)``, ``("group",
    communicator, [(kind, peers), ...])`` and ``("wait", communicator, index)``; of each
    communicator its members, and whether it is there before anything is enqueued.
    """
    return {rank: _rank(items, communicators) for rank, items in program.items()}


def judge(
    program: Mapping[int, Sequence[Any]],
    communicators: Mapping[str, tuple[tuple[int, ...], bool]],
    one_connection: bool = False,
) -> bool:
    """Whether such a program ends."""
    sharing: Sharing = "launches" if one_connection else "streams"
    return stuck(of_items(program, communicators), sharing) is None


def _rank(items: Sequence[Any], communicators: Mapping[str, tuple[Any, bool]]) -> list[Operation]:
    found: list[Operation] = []
    places: dict[str, list[int]] = defaultdict(list)
    for what, name, *more in items:
        if what == "wait":
            text = f"waits for {name} {more[0]}"
            found.append(Operation(text, (HOST,), (), (places[name][more[0]],)))
            continue
        members, eager = communicators[name]
        if not eager and name not in places:
            part = Part(f"making of {name}", "make", tuple(members))
            found.append(Operation(f"makes {name}", (HOST,), (part,)))
        each = more[0] if what == "group" else [tuple(more)]
        parts = tuple(Part(name, kind, tuple(sorted(peers))) for kind, peers in each)
        places[name] += [len(found)] * len(parts)
        found.append(Operation(f"{each[0][0]} over {name}", (name,), parts))
    return found


def items_of(programs: Programs) -> dict[int, list[Any]]:
    """The same of programs of one pipeline without a mesh. What its stream that computes waits for,
    the host does: what is enqueued then comes behind it either way.
    """
    found: dict[int, list[Any]] = {}
    for rank, operations in programs.items():
        items: list[Any] = []
        numbers: dict[int, tuple[str, int]] = {}
        counts: Counter[str] = Counter()
        waited: set[int] = set()
        for place, operation in enumerate(operations):
            for each in sorted({*operation.after}.intersection(numbers) - waited):
                items.append(("wait", *numbers[each]))
                waited.add(each)
            for name, kind, peers in operation.parts:
                if name != "hosts":
                    items.append(("op", name, kind, peers))
                    numbers[place] = name, counts[name]
                    counts[name] += 1
        found[rank] = items
    return found


def on_mesh(programs: Programs, sizes: Mapping[str, int]) -> Programs:
    """Those of every rank of a mesh, of those of one pipeline, which stand for all."""
    places = list(itertools.product(*map(range, sizes.values())))
    count = len(programs)

    def number(rank: int, place: tuple[int, ...]) -> int:
        return places.index(place) * count + rank

    def placed(part: Part, rank: int, place: tuple[int, ...]) -> Part:
        name, kind, peers = part
        if name == "hosts":
            every = itertools.product(peers, places)
            return Part(name, kind, tuple(sorted(number(*each) for each in every)))
        along = [at for at, dimension in enumerate(sizes) if name.startswith(dimension)]
        if not along:  # between ranks of one pipeline
            return Part(f"{name} at {place}", kind, tuple(number(each, place) for each in peers))
        others = [p for p in places if all(p[at] == place[at] for at in _but(along[0], len(p)))]
        first = number(rank, min(others))
        return Part(f"{name} from {first}", kind, tuple(number(rank, each) for each in others))

    found = {}
    for rank, place in itertools.product(programs, places):
        row = []
        for operation in programs[rank]:
            parts = tuple(placed(part, rank, place) for part in operation.parts)
            both = zip(operation.parts, parts, strict=True)
            names = {old.communicator: new.communicator for old, new in both}
            queues = tuple(names.get(queue, queue) for queue in operation.queues)
            row.append(operation._replace(parts=parts, queues=queues))
        found[number(rank, place)] = row
    return found


def _but(one: int, count: int) -> list[int]:
    return [at for at in range(count) if at != one]


def held_up(program: Sequence[Operation]) -> int:
    """How many sends stand right behind a receive in a queue: they wait for what may come late."""
    last: dict[str, str] = {}
    count = 0
    for operation in program:
        for part in operation.parts:
            count += part.kind == SEND and last.get(part.communicator) == RECEIVE
            last[part.communicator] = part.kind
    return count
