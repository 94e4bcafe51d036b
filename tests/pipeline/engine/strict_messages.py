"""Would these sends and receives come to an end under the strictest rules of a network?

The rules are those of NCCL with one communicator for each pair of ranks: operations between two
ranks run in the order in which each rank enqueued them, both directions in one queue, and a send is
not complete before its receive is posted. Enqueuing does not block a rank; computing on what has
not arrived does.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Sequence

from autosplit.errors import ScheduleError
from autosplit.pipeline.schedule.action import Action, ActionKind
from autosplit.pipeline.schedule.routes import channel_of, needs_of, parcels_of, result_of
from autosplit.pipeline.schedule.schedule import Schedule
from autosplit.pipeline.schedule.wiring import Feeds

_SENDS = {ActionKind.SEND_F: ActionKind.FORWARD, ActionKind.SEND_B: ActionKind.BACKWARD_INPUT}
_RECEIVES = {ActionKind.RECV_F: ActionKind.FORWARD, ActionKind.RECV_B: ActionKind.BACKWARD_INPUT}


def check_messages(schedule: Schedule, rows: Sequence[Sequence[Action]]) -> None:
    """Refuse sends and receives that hang.

    Args:
        schedule: says which stage is where.
        rows: per rank, its actions with sends and receives, as ``add_communication`` lists them.

    Raises:
        ScheduleError: names what every rank that cannot go on waits for.
    """
    queues: dict[tuple[int, int], deque[tuple[str, Action]]] = defaultdict(deque)
    there: list[set[Action]] = [set() for _ in rows]
    places = [0] * len(rows)
    moving = True
    while moving:
        moving = False
        for rank, row in enumerate(rows):
            while places[rank] < len(row) and _can_run(schedule, row[places[rank]], there[rank]):
                _run(schedule, rank, row[places[rank]], there, queues)
                places[rank] += 1
                moving = True
        for one, other in list(queues):
            moving |= one < other and _deliver(one, other, queues, there)
    waits = [
        f"rank {rank} waits at {row[place]}"
        for rank, (row, place) in enumerate(zip(rows, places, strict=True))
        if place < len(row)
    ]
    waits += [
        f"rank {rank} and rank {peer} stand at {queue[0][0]} {queue[0][1]}"
        for (rank, peer), queue in sorted(queues.items())
        if queue
    ]
    if waits:
        raise ScheduleError(
            f"the messages of {schedule.name!r} hang when a send waits for its receive: "
            + "; ".join(waits)
        )


def _can_run(schedule: Schedule, action: Action, there: set[Action]) -> bool:
    if action.kind.is_compute:
        return there.issuperset(needs_of(action, Feeds(schedule.stages)))
    return action.kind in _RECEIVES or _message(action) in there


def _message(action: Action) -> Action:
    """The result that a send or receive carries."""
    if action.kind in _SENDS:
        return Action(action.stage, _SENDS[action.kind], action.microbatch)
    kind = _RECEIVES[action.kind]
    source = action.stage - 1 if kind is ActionKind.FORWARD else action.stage + 1
    return Action(source, kind, action.microbatch)


def _run(
    schedule: Schedule,
    rank: int,
    action: Action,
    there: list[set[Action]],
    queues: dict[tuple[int, int], deque[tuple[str, Action]]],
) -> None:
    """Compute, or enqueue a message."""
    if action.kind.is_compute:
        there[rank].add(result_of(action))
        return
    message = _message(action)
    (parcel,) = parcels_of(message, Feeds(schedule.stages))
    channel = channel_of(parcel, schedule)
    sending = action.kind in _SENDS
    peer = channel.target_rank if sending else channel.source_rank
    queues[rank, peer].append(("send" if sending else "receive", message))


def _deliver(
    one: int,
    other: int,
    queues: dict[tuple[int, int], deque[tuple[str, Action]]],
    there: list[set[Action]],
) -> bool:
    """Complete what stands first on both ranks, for as long as one sends what the other takes."""
    here, far = queues[one, other], queues[other, one]
    moved = False
    while here and far and here[0][1] == far[0][1] and here[0][0] != far[0][0]:
        message = here.popleft()[1]
        far.popleft()
        there[one].add(message)
        there[other].add(message)
        moved = True
    return moved
