"""A schedule with its sends and receives, in an order in which none waits for another in a circle.

Between two ranks, operations run in the order in which each enqueued them, and a send may not be
complete before its receive is posted. So every send and its receive are put down in one go, behind
the action that makes the result: all ranks then see the messages in one common order.
"""

from __future__ import annotations

from collections import deque

from autosplit.errors import ScheduleError

from .action import Action, ActionKind
from .dependency import needs_of, result_of
from .routes import channel_of, parcels_of
from .schedule import Schedule
from .wiring import Feeds

_MESSAGES = {
    ActionKind.FORWARD: (ActionKind.SEND_F, ActionKind.RECV_F),
    ActionKind.BACKWARD_INPUT: (ActionKind.SEND_B, ActionKind.RECV_B),
}


def add_communication(schedule: Schedule) -> tuple[tuple[Action, ...], ...]:
    """Per rank, its actions with sends and receives between them.

    ``sSEND_Fm`` sends the outputs of stage s for microbatch m, ``sRECV_Fm`` receives what stage s
    takes; likewise with B for gradients. A rank runs its next action as soon as all that the action
    needs is listed, rank by rank in turn.

    Raises:
        ScheduleError: the schedule deadlocks.
    """
    feeds = Feeds(schedule.stages)
    todo = [deque(row) for row in schedule.ranks]
    rows: list[list[Action]] = [[] for _ in todo]
    made: set[Action] = set()
    moving = True
    while moving:
        moving = False
        for rank, row in enumerate(todo):
            if not row or not made.issuperset(needs_of(row[0], feeds)):
                continue
            moving = True
            action = row.popleft()
            rows[rank].append(action)
            made.add(result_of(action))
            _add_messages(schedule, result_of(action), feeds, rows)
    stuck = [str(row[0]) for row in todo if row]
    if stuck:
        raise ScheduleError(f"schedule {schedule.name!r} deadlocks: {', '.join(stuck)} wait")
    return tuple(map(tuple, rows))


def _add_messages(
    schedule: Schedule, result: Action, feeds: Feeds, rows: list[list[Action]]
) -> None:
    for parcel in parcels_of(result, feeds):
        channel = channel_of(parcel, schedule)
        if not channel.local:
            send, receive = _MESSAGES[result.kind]
            rows[channel.source_rank].append(Action(result.stage, send, result.microbatch))
            rows[channel.target_rank].append(
                Action(channel.target_stage, receive, result.microbatch)
            )
