"""From what a trainer is given to what it is to run, before any rank is connected."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from autosplit.errors import PipelineError
from autosplit.pipeline.engine.execution.stage_assembly import StageFactory, split_stage
from autosplit.pipeline.engine.messages.default_group import process_count
from autosplit.pipeline.schedule.schedule import Schedule

from .auto_partition import Uncut
from .options import Options, check_joining, choose_schedule
from .stage_modules import LossFunction, Stages


@dataclass(frozen=True)
class Arrangement:
    """What is settled before ranks connect.

    Attributes:
        stages: the stages, none of them built yet.
        loss_fn: what the last one ends with.
        schedule: who runs which of them when.
        processes: how many take part.
        factory: makes a stage of a module.
    """

    stages: Stages
    loss_fn: LossFunction
    schedule: Schedule
    processes: int
    factory: StageFactory

    @classmethod
    def of(cls, whole: Stages | Uncut, loss_fn: LossFunction, options: Options) -> Arrangement:
        """Choose the schedule and the factory, and cut what is still whole.

        Raises:
            PipelineError: no process group, or options that do not fit the stages or each other.
            ScheduleError: an unknown schedule, or one that is not legal.
            SplitError: an unknown stage option; see ``split_stage``.
            CaptureError, PlanError: a whole model that cannot be cut; see ``Stages.cut``.
        """
        processes = process_count(options.ranks, whole.count)
        schedule = choose_schedule(
            options.schedule,
            whole.count,
            options.microbatches,
            split_backward=options.split_backward,
            weights=options.weights,
            ranks=processes,
        )
        check_joining(options.given_stage, schedule)
        # Stages of an uncut model are balanced for that.
        late = options.late_input or isinstance(whole, Uncut)
        factory = options.stage_factory or split_stage(**options.given_stage, late_input=late)
        if isinstance(whole, Uncut):
            stages, schedule = _cut(whole, schedule, processes, loss_fn, options)
        else:
            stages = whole
        return cls(stages, loss_fn, schedule, processes, factory)


def _cut(
    whole: Uncut, built: Schedule, processes: int, loss_fn: LossFunction, options: Options
) -> tuple[Stages, Schedule]:
    """Cut a whole model for ``built``, which by name is built anew for the stages' times."""
    if options.shapes > 1:
        raise PipelineError(
            f"shapes={options.shapes} has no effect on a whole model, which is cut for batches of "
            "one shape: pad the others to it, or give stages"
        )
    by_name = isinstance(options.schedule, str) and options.schedule != "auto"
    by_name &= built.mirror is None
    given = options.given_stage
    known: dict[str, Any] = {name: given[name] for name in ("backend", "memory") if name in given}
    return Stages.cut(
        whole,
        options.schedule if by_name else built,
        microbatches=options.microbatches,
        split_backward=options.split_backward,
        weights=options.weights,
        ranks=processes,
        autocast=options.autocast,
        loss_fn=loss_fn,
        **known,
    )
