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
    find_deadlock,
)


def of_items(
    program: Mapping[int, Sequence[Any]],
    communicators: Mapping[str, tuple[tuple[int, ...], bool]],
) -> Programs:
    """Convert programs of tests/strict_group. Items of a rank are ``("op", communicator, kind,
    peers)``, ``("group", communicator, [(kind, peers), ...])`` and ``("wait", communicator,
    index)``; communicators have members, and whether they exist before the first operation.
    """
    return {rank: _rank(items, communicators) for rank, items in program.items()}


def judge(
    program: Mapping[int, Sequence[Any]],
    communicators: Mapping[str, tuple[tuple[int, ...], bool]],
    one_connection: bool = False,
) -> bool:
    """Whether such a program ends."""
    sharing: Sharing = "launches" if one_connection else "streams"
    return find_deadlock(of_items(program, communicators), sharing) is None


def _rank(items: Sequence[Any], communicators: Mapping[str, tuple[Any, bool]]) -> list[Operation]:
    results: list[Operation] = []
    places: dict[str, list[int]] = defaultdict(list)
    for subject, name, *more in items:
        if subject == "wait":
            text = f"waits for {name} {more[0]}"
            results.append(Operation(text, (HOST,), (), (places[name][more[0]],)))
            continue
        members, eager = communicators[name]
        if not eager and name not in places:
            part = Part(f"making of {name}", "make", tuple(members))
            results.append(Operation(f"makes {name}", (HOST,), (part,)))
        item = more[0] if subject == "group" else [tuple(more)]
        parts = tuple(Part(name, kind, tuple(sorted(peers))) for kind, peers in item)
        places[name] += [len(results)] * len(parts)
        results.append(Operation(f"{item[0][0]} over {name}", (name,), parts))
    return results


def items_of(programs: Programs) -> dict[int, list[Any]]:
    """The same of programs of one pipeline without a mesh. What its stream that computes waits for,
    the host does: what is enqueued then comes behind it either way.
    """
    results: dict[int, list[Any]] = {}
    for rank, operations in programs.items():
        items: list[Any] = []
        numbers: dict[int, tuple[str, int]] = {}
        counts: Counter[str] = Counter()
        waited: set[int] = set()
        for place, operation in enumerate(operations):
            for item in sorted({*operation.after}.intersection(numbers) - waited):
                items.append(("wait", *numbers[item]))
                waited.add(item)
            for name, kind, peers in operation.parts:
                if name != "hosts":
                    items.append(("op", name, kind, peers))
                    numbers[place] = name, counts[name]
                    counts[name] += 1
        results[rank] = items
    return results


def on_mesh(programs: Programs, sizes: Mapping[str, int]) -> Programs:
    """Copy the programs of one pipeline to every rank of a mesh."""
    places = list(itertools.product(*map(range, sizes.values())))
    count = len(programs)

    def number(rank: int, place: tuple[int, ...]) -> int:
        return places.index(place) * count + rank

    def placed(part: Part, rank: int, place: tuple[int, ...]) -> Part:
        name, kind, peers = part
        if name == "hosts":
            all_items = itertools.product(peers, places)
            return Part(name, kind, tuple(sorted(number(*item) for item in all_items)))
        along = [at for at, dimension in enumerate(sizes) if name.startswith(dimension)]
        if not along:  # between ranks of one pipeline
            return Part(f"{name} at {place}", kind, tuple(number(peer, place) for peer in peers))
        remaining = [p for p in places if all(p[at] == place[at] for at in _but(along[0], len(p)))]
        first = number(rank, min(remaining))
        return Part(f"{name} from {first}", kind, tuple(number(rank, other) for other in remaining))

    results = {}
    for rank, place in itertools.product(programs, places):
        row = []
        for operation in programs[rank]:
            parts = tuple(placed(part, rank, place) for part in operation.parts)
            both = zip(operation.parts, parts, strict=True)
            names = {old.communicator: new.communicator for old, new in both}
            queues = tuple(names.get(queue, queue) for queue in operation.queues)
            row.append(operation._replace(parts=parts, queues=queues))
        results[number(rank, place)] = row
    return results


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
