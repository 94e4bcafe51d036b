"""Prepare a schedule: the steps from its name to the messages of each rank."""

from __future__ import annotations

from collections.abc import Sequence

from autosplit.pipeline.builders.build import ScheduleRequest
from autosplit.pipeline.builders.placement import StageTimes
from autosplit.pipeline.schedule.schedule import Schedule
from autosplit.pipeline.validation.validate import validate


def prepare_schedule(
    request: ScheduleRequest,
    stages: int,
    times: Sequence[StageTimes] | None = None,
) -> Schedule:
    """Prepare the schedule of a step.

    These are the steps, each with its file in ``pipeline/``. This function goes as far as the
    Schedule; the executor's builder makes the ``PreparedSchedule``::

        ScheduleRequest     a name, or a Schedule from a user, a file or a search
          |  build          the family's rows of F and B for each rank      builders/families.py
          |  split, place   B becomes I and W; W runs where a rank waits    builders/placement.py
          |  expand         a block of stages runs as one stage would       builders/build.py
          |  validate       all faults of a given Schedule at once          validation/validate.py
        Schedule
          |  search         only for "auto" or a memory limit, and by the   search/
          |                 trainer: other rows for measured times, with
          |                 offloads, moves to a partner, recomputations
        PreparedSchedule
          |  moves          the departure and the arrival of activations    schedule/moves.py
          |  routes         the messages of each rank, in order             schedule/routes.py
          |  recv_posts     when each receive is posted                     simulation/playing.py
        Transport, Moves, Executor                                          engine/

    Args:
        request: the schedule and its options.
        stages: the number of stages.
        times: (F, I, W) of each stage, for schedules that place Ws by time; None: F = I = W.

    Raises:
        ScheduleError: an option does not fit the schedule; or the request's Schedule is illegal, or
            for other numbers of stages, microbatches or ranks.
    """
    schedule = request.build(stages, times)
    if isinstance(request.schedule, Schedule):  # builders make legal ones
        validate(schedule)
    return schedule
