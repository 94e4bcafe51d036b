"""Which actions of a schedule a rank can run again while it waits for other ranks.

::

    rank 0   0F0 0F1 <wait> 0I0 0W0 <wait> 0I1 0W1
    step 1   before 0I0: 0F0        before 0I1: 0I0
    step 2   before 0I0: 0F1        before 0I1: 0W0
    never    0I1, 0W1: no wait follows them
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from autosplit.pipeline.schedule.schedule import Action, Schedule
from autosplit.pipeline.simulation.simulate import Durations, simulate

_MARGIN = 1.25
"""The time of an audit over that of its action: it also reads the results."""


class AuditPlan(NamedTuple):
    """The audits of a rank.

    Attributes:
        waits: by the action that a wait comes before, the actions that run again in the wait, one
            in each step; None: the wait at the step's end.
        never: actions after which no wait is long enough.
    """

    waits: dict[Action | None, list[Action]]
    never: list[Action]


def plan_audits(
    schedule: Schedule, rank: int, durations: Durations, is_auditable: Callable[[Action], bool]
) -> AuditPlan:
    """Plan the audits of a rank: a wait has at most one in a step, which is shorter than the wait,
    so that the step is not longer.

    Args:
        schedule: a schedule without moves.
        rank: the rank.
        durations: seconds of actions, see ``simulate``.
        is_auditable: whether an action can run again.
    """
    timeline = simulate(schedule, durations)
    spans = [span for span in timeline.spans if span.rank == rank]
    starts = [*(span.start for span in spans), timeline.window(rank)[1]]
    row = [*(span.action for span in spans), None]
    plan = AuditPlan({}, [])
    for number, span in enumerate(spans):
        seconds = _MARGIN * (span.end - span.start)
        waits = [
            row[place]
            for place in range(number + 1, len(starts))
            if starts[place] - spans[place - 1].end >= seconds > 0
        ]
        if waits and is_auditable(span.action):
            wait = min(waits, key=lambda wait: len(plan.waits.get(wait, ())))
            plan.waits.setdefault(wait, []).append(span.action)
        else:
            plan.never.append(span.action)
    return plan
