"""What a trainer runs, resolved before any rank is connected."""

from __future__ import annotations

from dataclasses import dataclass

from autosplit.mesh.dimensions import RankLayout
from autosplit.pipeline.engine.stages import StageFactory
from autosplit.pipeline.schedule.schedule import Schedule

from .options import TrainerOptions
from .stage_modules import LossFunction, StageSource


@dataclass(frozen=True)
class TrainingSetup:
    """Stages, schedule and stage factory, known before ranks connect.

    Attributes:
        stages: the stages, none of them built yet.
        loss_fn: what the last one ends with.
        schedule: who runs which of them when.
        layout: which ranks take part, in which pipeline.
        factory: makes a stage of a module.
    """

    stages: StageSource
    loss_fn: LossFunction
    schedule: Schedule
    layout: RankLayout
    factory: StageFactory

    @classmethod
    def of(
        cls,
        stages: StageSource,
        loss_fn: LossFunction,
        options: TrainerOptions,
        schedule: Schedule | None = None,
    ) -> TrainingSetup:
        """What these stages are run with.

        Args:
            stages: the stages.
            loss_fn: what the last one ends with.
            options: how to train.
            schedule: what the stages were cut for; None builds what the options ask for.

        Raises:
            PipelineError: no process group, or options that do not fit the stages or each other.
            ScheduleError: an unknown schedule, or one that is not legal.
        """
        layout = options.layout(stages.count)
        if schedule is None:
            schedule = options.schedule_for(stages.count, len(layout.pipeline))
        factory = options.factory_for(cut=stages.cut)
        return cls(stages, loss_fn, schedule, layout, factory)
