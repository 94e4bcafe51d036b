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
from torch import nn

from autosplit.compare.workload import example_of
from autosplit.errors import AutosplitError
from autosplit.pipeline.engine.launch import launch
from autosplit.pipeline.simulation.transfer import Transfer
from autosplit.planner.costs.links import measure_links, profile_transfer
from autosplit.planner.cuts.rank_measurement import grouped, with_host
from autosplit.planner.cuts.solve import CapError
from autosplit.planner.meta_init.meta_model import meta_model
from autosplit.planner.plan.alternatives import Configuration
from autosplit.planner.plan.from_solution import make_plan
from autosplit.planner.plan.plan import Plan
from autosplit.planner.plan.plan_search import search_plans
from autosplit.text.figures import size_text
from autosplit.text.files import write_text

from .example_inputs import samples_of
from .plan_costs import KnownCosts
from .plan_request import PlanRequest

_TIMEOUT = 24 * 3600.0  # a model may take long to capture; a rank that dies ends all at once


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
        CapError: the parameters alone exceed the limit.
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
    if request.machine is not None:
        request = replace(request, limits=request.machine.limits(request.limits))
    _check_hope(model, request)
    batch = samples_of((args, kwargs)) if request.batch is None else request.batch
    limits = request.limits
    if not request.estimated and limits.links == Transfer():
        links = measure_links() if grouped() else profile_transfer()
        limits = replace(limits, links=links)
    if not request.estimated and limits.measures:
        limits = replace(limits, links=with_host(limits.links, alone=not grouped()))
    source = KnownCosts(model, args, kwargs, request, batch, build)
    try:
        found = search_plans(
            source,
            request.devices,
            batch,
            space=request.space,
            limits=limits,
        )
    finally:
        source.close()
    best = found[0]
    seen = source.rehearsed(best, limits) if request.rehearse and not request.estimated else None
    made = source.made_for[best.microbatch_size]
    best = best if seen is None else replace(best, solution=seen)
    plan = make_plan(best, made, limits, backend=request.backend)
    return PlanResult(found, plan, rehearsed=seen is not None)


def _check_hope(model: nn.Module, request: PlanRequest) -> None:
    """Refuse a limit that the parameters alone exceed, before anything is captured or measured."""
    limits = request.limits
    trained = sum(each.nbytes for each in model.parameters() if each.requires_grad)
    least = math.ceil(limits.factor * trained / request.devices)
    if least > limits.cap:
        raise CapError(
            f"{request.devices} devices of {size_text(math.floor(limits.cap))} cannot hold the "
            "model: its trained parameters, their gradients and the optimizer's state alone take "
            f"{size_text(least)} a device: raise the limit, or use more devices",
            float(least),
        )


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
        "measures": [
            {"measure": name, "seconds": seconds, "bytes_saved": list(saved)}
            for name, seconds, saved in plan.measures
        ],
    }


def write_summary(plan: Plan, path: Path) -> None:
    """``summary`` as a JSON file."""
    write_text(path, json.dumps(summary(plan), indent=2) + "\n")
