"""What a model costs in each way that ``autosplit plan`` looks at."""

from __future__ import annotations

import math
from collections import Counter
from typing import Any

import torch
from torch import nn

from autosplit.mesh.device_speed import DeviceSpeed, measure_device
from autosplit.pipeline.builders.build import SCHEDULES
from autosplit.pipeline.builders.schedule_request import ScheduleRequest
from autosplit.planner.costs.block_costs import ModelCosts
from autosplit.planner.costs.estimate import estimate
from autosplit.planner.costs.limits import Limits
from autosplit.planner.costs.trial_run import can_run_trial
from autosplit.planner.cuts.cut_request import CutRequest
from autosplit.planner.cuts.rank_measurement import (
    device_of_trainer,
    grouped,
    profile_together,
    refined_by_trial_runs,
)
from autosplit.planner.cuts.solve import Solution
from autosplit.planner.model.block_instance import StageOptions
from autosplit.planner.model.captured_model import WholeModel
from autosplit.planner.plan.alternatives import Configuration
from autosplit.planner.plan.plan import made_for
from autosplit.planner.plan.plan_search import count_settings
from autosplit.planner.plan.plan_signature import PlanSignature
from autosplit.runtime.split_options import SplitOptions

from .example_inputs import memory_for_trials, resized
from .plan_request import PlanRequest


class KnownCosts:
    """The costs of a model by microbatch size and memory setting, each found once."""

    def __init__(
        self,
        model: nn.Module,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        request: PlanRequest,
        batch: int,
    ) -> None:
        self.made_for: dict[int, PlanSignature] = {}
        self._model, self._args, self._kwargs = model, args, kwargs
        self._request = request
        self._wholes: dict[int, WholeModel] = {}
        self._known: dict[tuple[int, str | int], ModelCosts] = {}
        self._device: DeviceSpeed | None = None
        self._share = request.seconds / count_settings(request.space, request.devices, batch)

    def __call__(self, size: int, memory: str | int) -> ModelCosts:
        if (size, memory) not in self._known:
            self._known[size, memory] = self._find(self._whole(size), memory)
        return self._known[size, memory]

    def rehearsed(self, best: Configuration, limits: Limits) -> Solution | None:
        """The stages of a configuration after rehearsals; None where none can be run here."""
        solution = best.solution
        if solution is None or _needs(best, limits) > memory_for_trials():
            return None
        whole = self._whole(best.microbatch_size)
        if not can_run_trial(whole, solution.schedule):
            return None
        # A schedule that was searched for suits the cuts that it was searched for.
        own = best.schedule not in SCHEDULES
        wanted = CutRequest(
            best.stages,
            [cut + 1 for cut in solution.cuts] if own else None,
            ScheduleRequest(
                solution.schedule if own else best.schedule,
                best.microbatches,
                best.ranks,
                split_backward=own or not best.fused,
            ),
            limits,
        )
        costs = self(best.microbatch_size, str(best.memory))
        options = self._conditions(best.memory)
        return refined_by_trial_runs(whole, costs, wanted.best, options, self._request.seconds)

    def _conditions(self, memory: str | int) -> StageOptions:
        device = device_of_trainer(alone=False)
        return StageOptions(SplitOptions(self._request.backend, memory), device=device)

    def _speed(self) -> DeviceSpeed:
        if self._request.machine is None:
            return measure_device()
        return self._request.machine.speed(_computes_in(self._model))

    def _whole(self, size: int) -> WholeModel:
        if size not in self._wholes:
            args, kwargs = resized((self._args, self._kwargs), size)
            self._wholes[size] = WholeModel.capture(self._model, args, kwargs)
            self.made_for[size] = made_for(self._wholes[size])
        return self._wholes[size]

    def _find(self, whole: WholeModel, memory: str | int) -> ModelCosts:
        options = self._conditions(memory)
        if not self._request.estimated:
            return profile_together(whole, options, self._share, alone=not grouped())
        self._device = self._device or self._speed()
        return estimate(whole, options, device=self._device)


def _computes_in(model: nn.Module) -> torch.dtype:
    """The dtype of most parameters' elements."""
    counts: Counter[torch.dtype] = Counter()
    for parameter in model.parameters():
        counts[parameter.dtype] += parameter.numel()
    return counts.most_common(1)[0][0] if counts else torch.float32


def _needs(best: Configuration, limits: Limits) -> float:
    """Bytes that all ranks hold in a rehearsal, which has no optimizer state."""
    if best.solution is None:
        return math.inf
    return sum(best.solution.peaks) - limits.optimizer_state * sum(best.solution.parameters)
