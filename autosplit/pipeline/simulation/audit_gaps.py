"""The waits of a rank in a schedule, and the actions that it can run again there.

::

    rank 0   0F0 0F1 <wait> 0I0 0W0 <wait> 0I1 0W1
    step 1   before 0I0: 0F0        before 0I1: 0I0
    step 2   before 0I0: 0F1        before 0I1: 0W0
    late     0I1, 0W1: no wait follows them; in one of many steps, one runs again at the end
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

from autosplit.pipeline.schedule.schedule import Action, Schedule
from autosplit.pipeline.simulation.simulate import Durations, simulate

_MARGIN = 1.25
"""The time of an audit divided by the time of its action. An audit also reads the results."""
_SHARE = 0.01
"""The most by which late audits lengthen the mean step."""


class AuditPlan(NamedTuple):
    """The audits of a rank.

    Attributes:
        waits: maps the action after a wait to the actions that run again in this wait, one in each
            step. The key None is the wait at the step's end.
        late: actions after which no wait is long enough.
        never: actions that cannot run again.
        late_interval: the number of steps in which one late action runs again, at the end of a
            step.
    """

    waits: dict[Action | None, list[Action]]
    late: list[Action]
    never: list[Action]
    late_interval: int = 1


def plan_audits(
    schedule: Schedule, rank: int, durations: Durations, is_auditable: Callable[[Action], bool]
) -> AuditPlan:
    """Plan the audits of a rank.

    A wait has at most one audit in a step. The audit is shorter than the wait, so it does not
    lengthen the step. A late audit lengthens its step, but the mean step by at most 1%.

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
    plan, longest = AuditPlan({}, [], []), 0.0
    for number, span in enumerate(spans):
        seconds = _MARGIN * (span.end - span.start)
        waits = [
            row[place]
            for place in range(number + 1, len(starts))
            if starts[place] - spans[place - 1].end >= seconds > 0
        ]
        if not is_auditable(span.action):
            plan.never.append(span.action)
        elif waits:
            wait = min(waits, key=lambda wait: len(plan.waits.get(wait, ())))
            plan.waits.setdefault(wait, []).append(span.action)
        else:
            plan.late.append(span.action)
            longest = max(longest, seconds)
    interval = math.ceil(longest / (_SHARE * timeline.makespan))
    return plan._replace(late_interval=max(1, interval))
