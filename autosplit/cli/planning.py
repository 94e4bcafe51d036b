"""What ``autosplit plan`` computes and writes."""

from __future__ import annotations

import json
import math
import os
import pickle
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from autosplit.compare.workload import example_of
from autosplit.dump.tables import size_text
from autosplit.errors import AutosplitError, PlanError
from autosplit.pipeline.builders.build import SCHEDULES
from autosplit.pipeline.builders.schedule_request import ScheduleRequest
from autosplit.pipeline.engine.processes.launch import launch
from autosplit.pipeline.simulation.transfer import Transfer
from autosplit.planner.costs.block_costs import ModelCosts
from autosplit.planner.costs.device_speed import DeviceSpeed, measure_device
from autosplit.planner.costs.estimate import estimate
from autosplit.planner.costs.limits import Limits
from autosplit.planner.costs.links import measure_links, profile_transfer
from autosplit.planner.costs.trial_run import can_run_trial
from autosplit.planner.cuts.cut_request import CutRequest
from autosplit.planner.cuts.rank_measurement import (
    check_seconds,
    device_of_trainer,
    grouped,
    profile_together,
    rehearsed,
)
from autosplit.planner.cuts.solve import Solution
from autosplit.planner.meta_init.meta_model import meta_model
from autosplit.planner.model.block_instance import StageOptions
from autosplit.planner.model.captured_model import WholeModel
from autosplit.planner.plan.alternatives import Configuration
from autosplit.planner.plan.from_solution import make_plan
from autosplit.planner.plan.plan import Plan, made_for
from autosplit.planner.plan.plan_search import SearchSpace, search, settings_of
from autosplit.planner.plan.plan_signature import PlanSignature
from autosplit.runtime.split_options import SplitOptions
from autosplit.text.writing import write_text
from autosplit.torch_internals.pytree import tree_flatten, tree_unflatten

_TIMEOUT = 24 * 3600.0  # a model may take long to capture; a rank that dies ends all at once


@dataclass(frozen=True)
class PlanRequest:
    """What is asked for.

    Attributes:
        devices: one rank each.
        batch: samples in a step; None: as many as the example inputs have.
        space: what is settled.
        limits: memory and links; links that take no time are measured, unless costs are estimated.
        estimated: from FLOPs and bytes, rather than measured.
        seconds: to measure for, in all.
        backend: how graphs are run.
        rehearse: run a few steps of the best stages, and correct them by that, where this machine
            can run all ranks.

    Raises:
        PlanError: seconds that are none.
    """

    devices: int
    batch: int | None
    space: SearchSpace
    limits: Limits
    estimated: bool = False
    seconds: float = 60.0
    backend: str = "eager"
    rehearse: bool = True

    def __post_init__(self) -> None:
        check_seconds(self.seconds)


@dataclass(frozen=True)
class PlanResult:
    """All configurations, the best first, and the plan of the best.

    Attributes:
        configurations: with steps predicted from blocks.
        plan: of the first.
        rehearsed: whether the plan's step and stages are those of a rehearsal.
    """

    configurations: list[Configuration]
    plan: Plan
    rehearsed: bool = False


def plan_factory(build: Callable[[], Any], name: str, request: PlanRequest) -> PlanResult:
    """Plan what a factory builds.

    Where this machine has a device or a core for each rank, so many processes measure at the same
    time, with one thread each, as ranks that ``launch`` or torchrun start have; else this process
    measures alone. Parameters take memory only while a block is measured, and in a rehearsal, which
    is left out where it would take more than half of the machine's.

    Args:
        build: returns what ``example_of`` takes.
        name: of the factory, for messages.
        request: what for.

    Raises:
        PlanError: nothing that can be done, see ``search``.
        PipelineError: the factory fails, or gives no example inputs.
        CaptureError: the model cannot be captured whole.
    """
    if request.estimated or request.devices == 1 or not _can_launch(build, request.devices):
        return _plan(build, name, request)
    outcomes = launch(
        _outcome, request.devices, (build, name, request), timeout=_TIMEOUT, threads=1
    )
    return _value(outcomes[0])


def _can_launch(build: Callable[[], Any], devices: int) -> bool:
    """Whether this machine has a device, or a core, for each rank, and processes can be told what
    to build.
    """
    try:
        pickle.dumps(build)
    except (pickle.PicklingError, AttributeError, TypeError):
        return False
    return devices <= (torch.cuda.device_count() or os.cpu_count() or 1)


def _outcome(
    build: Callable[[], Any], name: str, request: PlanRequest
) -> PlanResult | AutosplitError:
    """What a rank finds. A typed error goes back as it is, for launch would wrap it."""
    try:
        return _plan(build, name, request)
    except AutosplitError as error:
        return error


def _value(outcome: PlanResult | AutosplitError) -> PlanResult:
    if isinstance(outcome, AutosplitError):
        raise outcome
    return outcome


def _plan(build: Callable[[], Any], name: str, request: PlanRequest) -> PlanResult:
    """The plan, measured by this process or by all of its group at once."""
    model, args, kwargs = example_of(meta_model(build), name)
    batch = _samples((args, kwargs)) if request.batch is None else request.batch
    limits = request.limits
    if not request.estimated and limits.links == Transfer():
        links = measure_links() if grouped() else profile_transfer()
        limits = replace(limits, links=links)
    source = _Costs(model, args, kwargs, request, batch)
    found = search(
        source,
        request.devices,
        batch,
        space=request.space,
        limits=limits,
    )
    best = found[0]
    seen = source.rehearsed(best, limits) if request.rehearse and not request.estimated else None
    made = source.made_for[best.microbatch_size]
    best = best if seen is None else replace(best, solution=seen)
    plan = make_plan(best, made, limits, backend=request.backend)
    return PlanResult(found, plan, rehearsed=seen is not None)


class _Costs:
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
        self._share = request.seconds / settings_of(request.space, request.devices, batch)

    def __call__(self, size: int, memory: str | int) -> ModelCosts:
        if (size, memory) not in self._known:
            self._known[size, memory] = self._find(self._whole(size), memory)
        return self._known[size, memory]

    def rehearsed(self, best: Configuration, limits: Limits) -> Solution | None:
        """The stages of a configuration after rehearsals; None where none can be run here."""
        solution = best.solution
        if solution is None or _needs(best, limits) > _room():
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
        return rehearsed(whole, costs, wanted.best, options, self._request.seconds)

    def _conditions(self, memory: str | int) -> StageOptions:
        device = device_of_trainer(alone=False)
        return StageOptions(SplitOptions(self._request.backend, memory), device=device)

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
        self._device = self._device or measure_device()
        return estimate(whole, options, device=self._device)


def _needs(best: Configuration, limits: Limits) -> float:
    """Bytes that all ranks hold in a rehearsal, which has no optimizer state."""
    if best.solution is None:
        return math.inf
    return sum(best.solution.peaks) - limits.optimizer_state * sum(best.solution.parameters)


def _room() -> float:
    """Bytes that a rehearsal may take: half of what the machine, or its devices, have."""
    if torch.cuda.device_count():
        devices = map(torch.cuda.get_device_properties, range(torch.cuda.device_count()))
        return sum(each.total_memory for each in devices) / 2
    if not hasattr(os, "sysconf"):
        return 0.0
    return float(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")) / 2


def resized(inputs: Any, size: int) -> Any:
    """Example inputs with ``size`` samples: repeated or cut along dimension 0.

    Only tensors with as many samples as the first one are; others, such as a mask that all samples
    share, stay as they are.

    Raises:
        PlanError: there is no tensor with samples, or this machine has no room for so many.
    """
    leaves, spec = tree_flatten(inputs)
    count = _samples(inputs)

    def has(leaf: Any) -> bool:
        return isinstance(leaf, Tensor) and leaf.dim() > 0 and len(leaf) == count

    needed = size * (8 + sum(leaf.nbytes // count for leaf in leaves if has(leaf)))
    if 0.0 < _room() < needed:
        raise PlanError(
            f"the inputs of a microbatch of {size:,} samples take {size_text(needed)}, more than "
            f"half of this machine's memory: take a smaller batch, or more microbatches"
        )
    rows = torch.arange(size) % count
    made = [leaf[rows.to(leaf.device)] if has(leaf) else leaf for leaf in leaves]
    return tree_unflatten(made, spec)


def _samples(inputs: Any) -> int:
    """Of the first tensor among example inputs, along dimension 0.

    Raises:
        PlanError: there is none.
    """
    leaves = tree_flatten(inputs)[0]
    counts = [len(leaf) for leaf in leaves if isinstance(leaf, Tensor) and leaf.dim() > 0]
    if not counts or not counts[0]:
        raise PlanError(
            "the example inputs hold no tensor with samples along dimension 0, of which a batch "
            "could be made"
        )
    return counts[0]


def summary(plan: Plan) -> dict[str, Any]:
    """What ``--json`` gives; ``stage_times`` are seconds of F, I and W together."""
    return {
        "stage_times": [sum(times) for times in plan.stage_times],
        "predicted_step_s": plan.predicted_step,
        "schedule": plan.schedule,
        "microbatches": plan.microbatches,
        "microbatch_size": plan.microbatch_size,
        "memory": plan.memory,
        "cuts": list(plan.cuts),
        "bubble": plan.bubble,
        "peak_memory": list(plan.peak_memory),
    }


def write_summary(plan: Plan, path: Path) -> None:
    """``summary`` as a JSON file."""
    write_text(path, json.dumps(summary(plan), indent=2) + "\n")
