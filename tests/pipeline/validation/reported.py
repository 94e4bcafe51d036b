"""Deadlocks that people report, and the mends, as plain tuples (see ``programs.of_items``)."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from torch.distributed.pipelining import schedules
from torch.distributed.pipelining._schedule_visualizer import get_schedule_ops

from autosplit.pipeline.schedule.schedule import Action
from autosplit.pipeline.validation.programs import torch_programs
from tests.pipeline.validation.programs import items_of


class Case(NamedTuple):
    """Attributes:
    program: of each rank.
    communicators: their members, and whether each is there before anything is enqueued.
    ends: whether all of it comes to its end.
    """

    program: Mapping[int, Sequence[Any]]
    communicators: Mapping[str, tuple[tuple[int, ...], bool]]
    ends: bool


def _of(*ranks: Sequence[Any], ends: bool, lazy: str = "") -> Case:
    """A case of ranks' items; communicators whose names contain ``lazy`` are made when used."""
    members: dict[str, set[int]] = {}
    for rank, items in enumerate(ranks):
        for _, name, *_ in items:
            members.setdefault(name, set()).add(rank)
    built = {
        name: (tuple(sorted(item)), not (lazy and lazy in name)) for name, item in members.items()
    }
    return Case(dict(enumerate(ranks)), built, ends)


def _send(peer: int, over: str) -> Any:
    return "op", over, "send", (peer,)


def _receive(peer: int, over: str) -> Any:
    return "op", over, "receive", (peer,)


# --- torch's schedules ----------------------------------------------------------------------------

Rows = list[list[str]]


def _listed(ranks: int, microbatches: int) -> tuple[Rows, list[int]]:
    """The actions of torch's runtime under its interleaved 1F1B of two stages a rank."""
    result = get_schedule_ops(
        "Interleaved1F1B", ranks, num_microbatches=microbatches, with_comms=True,
        num_stages_per_rank=2,
    )  # fmt: skip
    rows = [[str(action) for action in row if action is not None] for row in result]
    return rows, [stage % ranks for stage in range(2 * ranks)]


def _late(rows: Rows) -> Rows:
    """With every receive right before what takes it."""
    results = []
    for row in rows:
        receives = {cell for cell in row if "RECV" in cell}
        late: list[str] = []
        for cell in row:
            if match := re.fullmatch("([0-9]+)([FIB])([0-9]+)", cell):
                stage, kind, microbatch = match.groups()
                late += receives & {f"{stage}RECV_{'F' if kind == 'F' else 'B'}{microbatch}"}
            late += [cell] * (cell not in receives)
        results.append(late)
    return results


def _deferred(rows: Rows, placement: Sequence[int]) -> Rows:
    """As torch 2.13's ``defer_pp_recv`` has them."""
    actions = {
        rank: [schedules._Action.from_str(cell) for cell in row] for rank, row in enumerate(rows)
    }
    result = schedules._defer_recv_ops(actions, placement.__getitem__)
    return [[*map(str, result[rank])] for rank in range(len(rows))]


DEFERS = hasattr(schedules, "_defer_recv_ops")


def _torch(
    ranks: int, change: Callable[[Rows, list[int]], Rows], communicators: str, *, ends: bool
) -> Case:
    rows, placement = _listed(ranks, 2 * ranks)
    changed = [[*map(Action.parse, row)] for row in change(rows, placement)]
    programs = torch_programs(changed, placement, communicators)
    return _of(*items_of(programs).values(), ends=ends)


def _as_listed(rows: Rows, _: object) -> Rows:
    return rows


# --- the threads ----------------------------------------------------------------------------------


def _steady(over: str) -> tuple[list[Any], list[Any]]:
    """Two stages in the steady phase of 1F1B, a message at a time."""
    first = [_send(1, over), ("wait", over, 0), _receive(1, over), ("wait", over, 1)]
    second = [_send(0, over), ("wait", over, 0), _receive(0, over), ("wait", over, 1)]
    return first, second


def _together(peer: int) -> list[Any]:
    both = [("send", (peer,)), ("receive", (peer,))]
    return [("group", "pp", both), ("wait", "pp", 0), ("wait", "pp", 1)]


def _ring(over: Callable[[int, int], str], ranks: int = 4) -> list[list[Any]]:
    """Every rank receives from the one before it, then sends to the one behind it."""
    results = []
    for rank in range(ranks):
        earlier, later = (rank - 1) % ranks, (rank + 1) % ranks
        results.append([_receive(earlier, over(earlier, rank)), _send(later, over(rank, later))])
    return results


def _round(rank: int, ranks: int = 4) -> list[Any]:
    """The same, batched on the communicator of all."""
    both = [("receive", ((rank - 1) % ranks,)), ("send", ((rank + 1) % ranks,))]
    return [("group", "pp", both), ("wait", "pp", 0), ("wait", "pp", 1)]


def _pair(one: int, other: int) -> str:
    return f"{min(one, other)}:{max(one, other)}"


def _apart(source: int, target: int) -> str:
    return f"{source} to {target}"


def _calls(*names: str, waits: Iterable[str] = ()) -> list[Any]:
    """Collectives of two ranks, each on its communicator; those in ``waits`` hold the host."""
    results: list[Any] = []
    for name in names:
        results.append(("op", name, name, (0, 1)))
        results += [("wait", name, 0)] if name in waits else []
    return results


def _one_queue(*kinds: str) -> list[Any]:
    return [("op", "experts", kind, (0, 1)) for kind in kinds]


def _early(over: Callable[[int, int], str]) -> list[list[Any]]:
    """Receives started before the sends in between."""
    present, returned = over(0, 1), over(1, 0)
    return [
        [_send(1, present), _receive(1, returned), _send(1, present), _receive(1, returned)],
        [_receive(0, present), _receive(0, present), _send(0, returned), _send(0, returned)],
    ]


CASES: dict[str, Case] = {
    "pytorch #172668: each receive right before its action": _torch(
        2, lambda rows, _: _late(rows), "pair", ends=False
    ),
    "pytorch #172668, mended as in #196666": _torch(
        2, lambda rows, _: _late(rows), "edge", ends=True
    ),
    "pytorch #188833: receives as torch lists them": _torch(2, _as_listed, "pair", ends=True),
    "pytorch #195760: a communicator for outputs, and one for gradients": _torch(
        4, lambda rows, _: _late(rows), "direction", ends=False
    ),
    "pytorch #195760, mended": _torch(4, lambda rows, _: _late(rows), "edge", ends=True),
    "pytorch #109401: sends and receives in turn": _of(*_early(_pair), ends=False),
    "pytorch #109401, with a communicator each way": _of(*_early(_apart), ends=True),
    "pytorch #126419: 1F1B, a message at a time": _of(*_steady("pp"), ends=False),
    "pytorch #126419, mended": _of(_together(1), _together(0), ends=True),
    "Megatron-LM #5240: communicators made at first use": _of(*_ring(_pair), ends=False, lazy=":"),
    "Megatron-LM #5240, mended": _of(*map(_round, range(4)), ends=True),
    "Megatron-LM #1810: collectives in another order": _of(
        _one_queue("dispatch", "combine"), _one_queue("combine", "dispatch"), ends=False
    ),
    "Megatron-LM #1810, mended": _of(*[_one_queue("dispatch", "combine")] * 2, ends=True),
    "torchrec #4149: hosts wait in between": _of(
        _calls("shards", "replicas", waits=["shards"]),
        _calls("replicas", "shards", waits=["replicas"]),
        ends=False,
    ),
    "torchrec #4149, where none waits": _of(
        _calls("shards", "replicas"), _calls("replicas", "shards"), ends=True
    ),
}
if DEFERS:
    CASES |= {
        "pytorch #178815: defer_pp_recv, still": _torch(2, _deferred, "pair", ends=False),
        "pytorch #178815, as in #196666": _torch(2, _deferred, "edge", ends=True),
    }
