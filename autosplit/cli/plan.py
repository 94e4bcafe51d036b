"""``autosplit plan``: where to cut a model, and how to run its stages."""

from __future__ import annotations

import functools
import json
import math
import os
import pathlib
import pickle
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import click
import torch
from torch import nn

from autosplit.compare.example import example_of, resized, samples_of
from autosplit.compare.factory import prepared
from autosplit.errors import AutosplitError, PlanError
from autosplit.mesh.costs import DeviceSpeed, Link, measure_device
from autosplit.pipeline.engine.launch import launch
from autosplit.pipeline.simulation.transfer import Transfer
from autosplit.planner.captured_model import WholeModel
from autosplit.planner.costs import Limits, ModelCosts
from autosplit.planner.cuts import CapError
from autosplit.planner.cutting import (
    check_seconds,
    device_of_trainer,
    grouped,
    measure_links,
    profile_together,
)
from autosplit.planner.estimate import DeviceKind, device_kind, estimate, link_of
from autosplit.planner.meta_model import meta_model
from autosplit.planner.plan import Plan, made_for, make_plan
from autosplit.planner.plan_search import (
    Configuration,
    SearchSpace,
    count_settings,
    search_plans,
)
from autosplit.planner.plan_tables import refused_table, search_table
from autosplit.planner.profile import BlockOptions
from autosplit.runtime.split_options import SplitOptions
from autosplit.text.figures import parse_size, size_text
from autosplit.text.files import write_text
from autosplit.text.progress import working

from .options import backend, counts, file_to_write, json_option, names, setting, typed_errors

_SECONDS = 60.0
_TIMEOUT = 24 * 3600.0  # a model may take long to capture; a rank that dies ends all at once


@dataclass(frozen=True)
class PlanRequest:
    """What is asked for.

    Attributes:
        devices: one rank each.
        batch: samples in a step; None: as many as the example inputs have.
        space: what is settled.
        limits: memory, and links that are known; else they are measured where several processes
            measure, and take no time elsewhere.
        estimated: from FLOPs and bytes, rather than measured.
        seconds: to measure for, in all.
        backend: how graphs are run.
        machine: what the plan is for, where that is not this machine.

    Raises:
        PlanError: seconds that are none.
    """

    devices: int
    batch: int | None
    space: SearchSpace
    limits: Limits
    estimated: bool = False
    seconds: float = _SECONDS
    backend: str = "eager"
    machine: DeviceKind | None = None

    def __post_init__(self) -> None:
        check_seconds(self.seconds)


@dataclass(frozen=True)
class PlanResult:
    """All configurations, the best first, and the plan of the best.

    Attributes:
        configurations: with steps predicted from blocks.
        plan: of the first.
    """

    configurations: list[Configuration]
    plan: Plan


def _computes_in(model: nn.Module) -> torch.dtype:
    """The dtype of most parameters' elements."""
    counts: Counter[torch.dtype] = Counter()
    for parameter in model.parameters():
        counts[parameter.dtype] += parameter.numel()
    return counts.most_common(1)[0][0] if counts else torch.float32


def plan_factory(build: Callable[[], Any], name: str, request: PlanRequest) -> PlanResult:
    """Plan what a factory builds.

    Where this machine has a device or a core for each rank, so many processes measure at the same
    time, with one thread each, as ranks that ``launch`` or torchrun start have; else this process
    measures alone, and links take no time. Parameters take memory only while a block is measured.

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
    if isinstance(outcomes[0], AutosplitError):
        raise outcomes[0]
    return outcomes[0]


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


def _plan(build: Callable[[], Any], name: str, request: PlanRequest) -> PlanResult:
    """The plan, measured by this process or by all of its group at once."""
    model, args, kwargs = meta_model(lambda: example_of(build(), name))
    limits, alone = request.limits, not grouped()
    if request.machine is not None:
        limits = request.machine.limits(limits)
    _check_hope(model, request.devices, limits)
    batch = samples_of((args, kwargs)) if request.batch is None else request.batch
    if not (request.estimated or alone) and limits.links == Transfer():
        limits = replace(limits, links=measure_links())
    share = request.seconds / count_settings(request.space, request.devices, batch)

    @functools.cache
    def speed() -> DeviceSpeed:
        if request.machine is None:
            return measure_device()
        return request.machine.speed(_computes_in(model))

    @functools.cache
    def whole_of(size: int) -> WholeModel:
        return WholeModel.capture(model, *resized((args, kwargs), size))

    @functools.cache
    def costs_of(size: int, memory: str | int) -> ModelCosts:
        whole, options = whole_of(size), _options(request, memory)
        if request.estimated:
            return estimate(whole, options, device=speed())
        return profile_together(whole, options, share, alone=alone)

    with working(f"comparing what {request.devices} devices can run"):
        found = search_plans(costs_of, request.devices, batch, space=request.space, limits=limits)
    best, solution = found[0], found[0].solution
    if solution is None:  # cannot be: the first of them can run
        raise PlanError(best.lost)
    plan = make_plan(
        solution,
        made_for(whole_of(best.microbatch_size)),
        limits,
        name=best.schedule,
        size=best.microbatch_size,
        split=SplitOptions(request.backend, best.memory),
    )
    return PlanResult(found, plan)


def _options(request: PlanRequest, memory: str | int) -> BlockOptions:
    device = device_of_trainer(alone=False)
    return BlockOptions(SplitOptions(request.backend, memory), device=device)


def _check_hope(model: nn.Module, devices: int, limits: Limits) -> None:
    """Refuse a limit that the parameters alone exceed, before anything is captured or measured."""
    trained = sum(each.nbytes for each in model.parameters() if each.requires_grad)
    least = math.ceil(limits.factor * trained / devices)
    if least > limits.cap:
        raise CapError(
            f"{devices} devices of {size_text(math.floor(limits.cap))} cannot hold the "
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
        "resting_memory": list(plan.resting_memory),
    }


def _limit(context: click.Context, parameter: click.Parameter, value: str | None) -> float:
    """Bytes of a device; any, where the option is left out."""
    try:
        return math.inf if value is None else parse_size(value)
    except PlanError as error:
        raise click.BadParameter(str(error)) from error


@click.command()
@click.argument("factory")
@setting
@backend
@click.option("--devices", required=True, type=click.IntRange(min=1), help="One process each.")
@click.option(
    "--batch", type=click.IntRange(min=1), help="Samples in a step; default: as the example has."
)
@click.option(
    "--memory",
    callback=names,
    help="Memory settings of the split to try: balanced, fast, lean. Default: all.",
)
@click.option("--limit", callback=_limit, help="Most that a device may hold, such as 80GiB.")
@click.option("--stages", type=click.IntRange(min=1), help="Default: as the schedules want.")
@click.option("--schedule", "schedules", callback=names, help="Default: try all.")
@click.option("--microbatches", callback=counts, help="Default: about 1, 2 and 4 a device.")
@click.option("--estimate", is_flag=True, help="From FLOPs and bytes; measure nothing.")
@click.option("--device", help="Plan for this device, such as h100, or TFLOPS,GB/s.")
@click.option("--link", help="Between devices: gigabytes a second, or a name such as ib-ndr.")
@click.option("--seconds", type=float, help="To measure blocks for, in all; 60.")
@click.option(
    "--optimizer-state",
    default=2.0,
    show_default=True,
    help="Bytes for each byte of parameters; Adam has 2.",
)
@click.option(
    "--rows",
    default=10,
    show_default=True,
    type=click.IntRange(min=1),
    help="Configurations to show.",
)
@file_to_write("--output", help="Write the plan to this file.")
@json_option
@typed_errors
def plan(
    factory: str,
    overrides: dict[str, str],
    rows: int,
    output: pathlib.Path | None,
    json_file: pathlib.Path | None,
    **options: Any,
) -> None:
    """Cut FACTORY's model into balanced stages and choose how to run them. FACTORY (MODULE:NAME)
    returns (model, args) or (model, args, kwargs).
    """
    request = _request(**options)
    build = prepared(factory, overrides)
    if not request.estimated:
        click.echo(
            f"capturing and measuring {factory}: about {request.seconds:g} s of measurement, "
            "beside the time to capture it; --estimate measures nothing",
            err=True,
        )
    found = plan_factory(build, factory, request)
    source = "measured block by block"
    if request.estimated:
        source = "estimated from FLOPs and bytes, nothing was measured"
    best = found.configurations[0].solution
    if request.devices > 1 and best is not None and best.costs.transfer.link(0, 1) == Link():
        source += "; links take no time (--link names one)"
    parts = [
        search_table(found.configurations, rows),
        refused_table(found.configurations),
        f"{found.plan.report()}; {source}",
    ]
    click.echo("\n\n".join(filter(None, parts)))
    if output:
        found.plan.save(output)
    if json_file:
        write_text(json_file, json.dumps(summary(found.plan), indent=2) + "\n")
    if files := [file for file in (output, json_file) if file]:
        click.echo("\nwritten: " + ", ".join(map(str, files)))


def _request(
    *,
    backend: str,
    devices: int,
    batch: int | None,
    limit: float,
    stages: int | None,
    schedules: tuple[str, ...],
    microbatches: tuple[int, ...] | None,
    memory: tuple[str, ...],
    estimate: bool,
    seconds: float | None,
    optimizer_state: float,
    device: str | None,
    link: str | None,
) -> PlanRequest:
    """What the options ask for; refuses those that others leave without effect.

    Raises:
        click.BadParameter: naming both.
    """
    if seconds is not None and (device is not None or estimate):
        why = "--estimate" if device is None else "--device"
        raise click.BadParameter(
            f"--seconds has no effect with {why}, by which nothing is measured here"
        )
    return PlanRequest(
        devices,
        batch,
        SearchSpace(stages, microbatches, schedules or None, memory or None),
        Limits(
            limit,
            optimizer_state,
            Transfer() if link is None else Transfer(*link_of(link)),
            measures=math.isfinite(limit),
        ),
        device is not None or estimate,
        _SECONDS if seconds is None else seconds,
        backend,
        None if device is None else device_kind(device, link),
    )
