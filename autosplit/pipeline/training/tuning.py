"""Which search a trainer's first steps are measured for."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import torch

from autosplit.pipeline.engine.groups import Groups
from autosplit.pipeline.engine.timing import measure_transfer
from autosplit.pipeline.schedule.routes import pairs_of
from autosplit.pipeline.schedule.wiring import Feeds
from autosplit.pipeline.training.memory.limited_schedule import LimitTuner
from autosplit.pipeline.training.memory.rank_size import RankSize
from autosplit.pipeline.training.replicas.model_replicas import ModelReplicas

from .auto_schedule import Tuner
from .options import TrainerOptions
from .training_setup import TrainingSetup


def tuner_for(
    setup: TrainingSetup,
    options: TrainerOptions,
    groups: Groups,
    feeds: Feeds,
    size: RankSize,
    replicas: ModelReplicas,
    device: torch.device,
) -> Tuner | None:
    """That of ``schedule="auto"`` or ``memory_limit=``; None where the schedule stays as it is."""
    if not options.tunes:
        return None
    links = partial(measure_transfer, groups, device, pairs_of(setup.schedule, feeds))
    known: dict[str, Any] = {
        "wiring": feeds.wiring,
        "reductions": replicas.measured,
    }
    if options.memory_limit is None:
        return Tuner(setup.schedule, groups, links=links, **known)
    return LimitTuner(
        setup.schedule,
        groups,
        limit=options.memory_limit,
        fixed=size.fixed_bytes,
        replay=size.replay,
        measured=size.measured,
        links=lambda: replace(links(), host=size.host_link(), moves=size.move_costs()),
        **known,
    )
