"""How a comparison's trainers get their stages: built one by one, or cut from a whole model."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist

from autosplit.pipeline.engine.messages.default_group import gather
from autosplit.planner.costs.block_costs import ModelCosts, average
from autosplit.planner.costs.profile import profile
from autosplit.planner.cuts.rank_measurement import device_of_trainer
from autosplit.planner.model.block_instance import StageOptions
from autosplit.planner.model.captured_model import WholeModel
from autosplit.runtime.split_options import SplitOptions

from .settings import Settings
from .workload import Workload


def measured_costs(workload: Workload, settings: Settings) -> ModelCosts | None:
    """What the blocks of the whole model cost, measured on all ranks at once; None where the
    workload has stages of its own.
    """
    if workload.model_fn is None:
        return None
    inputs, targets = workload.batch_fn(0, workload.microbatch_size)
    whole = WholeModel.capture(workload.model_fn(), inputs)
    options = StageOptions(
        split=SplitOptions(settings.backend),
        loss_fn=workload.loss_fn,
        targets=targets,
        device=device_of_trainer(alone=False),
    )
    costs = profile(whole, options, seconds=settings.profiling)
    if not dist.is_initialized():
        return costs
    return average(gather(costs))


def stages_for(workload: Workload, settings: Settings, costs: ModelCosts | None) -> dict[str, Any]:
    """Arguments of a trainer: the stages, or the whole model that it cuts for what it runs."""
    if workload.model_fn is None:
        return {
            "model": lambda index: workload.stage_fn(index, settings.stages),
            "shared_parameters": workload.shared_parameters(settings.stages),
        }
    inputs, _ = workload.batch_fn(0, workload.microbatch_size)
    return {"model": workload.model_fn(), "example": inputs, "planning": {"costs": costs}}
