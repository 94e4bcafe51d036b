"""What a model costs in each way that ``autosplit plan`` looks at."""

from __future__ import annotations

import itertools
import math
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import nn

from autosplit.compare.workload import example_of
from autosplit.mesh.costs import DeviceSpeed, measure_device
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
from autosplit.planner.meta_init.meta_model import meta_model
from autosplit.planner.model.block_instance import StageOptions
from autosplit.planner.model.captured_model import WholeModel
from autosplit.planner.plan.alternatives import Configuration
from autosplit.planner.plan.plan import made_for
from autosplit.planner.plan.plan_search import MEMORY, count_settings, microbatch_sizes
from autosplit.planner.plan.plan_signature import PlanSignature
from autosplit.runtime.split_options import SplitOptions

from .costs_ahead import CostsAhead
from .example_inputs import memory_for_trials, resized
from .plan_request import PlanRequest

_SLOW = 4.0
"""Seconds for a model to be captured, beyond which a second process is worth its start."""


class KnownCosts:
    """The costs of a model by microbatch size and memory setting, each found once.

    Estimates of a large model are made by two processes: one size each at a time.

    Args:
        model: the model.
        args: positional example inputs.
        kwargs: keyword example inputs.
        request: what is planned.
        batch: samples in a step.
        build: makes model and inputs again, in another process; None to have no other.
        device: how fast operators are, where that is known.
    """

    def __init__(
        self,
        model: nn.Module,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        request: PlanRequest,
        batch: int,
        build: Callable[[], Any] | None = None,
        device: DeviceSpeed | None = None,
    ) -> None:
        self.made_for: dict[int, PlanSignature] = {}
        self._model, self._args, self._kwargs = model, args, kwargs
        self._request = request
        self._wholes: dict[int, WholeModel] = {}
        self._known: dict[tuple[int, str | int], ModelCosts] = {}
        self._device = device
        self._build, self._batch = build, batch
        self._ahead: CostsAhead | None = None
        self._share = request.seconds / count_settings(request.space, request.devices, batch)

    def __call__(self, size: int, memory: str | int) -> ModelCosts:
        if (size, memory) not in self._known:
            self._take(size, memory)
        if (size, memory) not in self._known:
            start = time.monotonic()
            whole = self._whole(size)
            slow = time.monotonic() - start > _SLOW
            self._known[size, memory] = self._find(whole, memory)
            if slow:
                self._look_ahead(size)
        return self._known[size, memory]

    def close(self) -> None:
        """End what another process is still at."""
        if self._ahead is not None:
            self._ahead.close()

    def _look_ahead(self, size: int) -> None:
        """Have another process begin with the sizes that will be asked for last."""
        if self._build is None or self._ahead is not None or not self._request.estimated:
            return
        sizes = [
            each
            for each in microbatch_sizes(self._request.space, self._request.devices, self._batch)
            if each != size and each not in self._wholes
        ]
        theirs = sizes[(len(sizes) + 1) // 2 :]
        # In the order in which they are asked for.
        keys = list(itertools.product(self._request.space.memory or MEMORY, theirs))
        given = (self._build, self._request, self._batch, self._device)
        self._ahead = CostsAhead.start(_costs_of_keys, given, keys)

    def _take(self, size: int, memory: str | int) -> None:
        found = None if self._ahead is None else self._ahead.take((memory, size))
        if found is not None:
            self._known[size, memory], self.made_for[size] = found

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


def _costs_of_keys(
    build: Callable[[], Any],
    request: PlanRequest,
    batch: int,
    device: DeviceSpeed,
    keys: Sequence[tuple[str, int]],
) -> Iterator[tuple[ModelCosts, PlanSignature]]:
    """The costs under each memory setting and size, in a process that has no model yet."""
    model, args, kwargs = example_of(meta_model(build), "the factory")
    costs = KnownCosts(model, args, kwargs, request, batch, device=device)
    for memory, size in keys:
        yield costs(size, memory), costs.made_for[size]


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
