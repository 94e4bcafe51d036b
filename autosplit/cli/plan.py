"""``autosplit plan``: where to cut a model, and how to run its stages."""

from __future__ import annotations

import functools
import json
import math
import pathlib
from collections import Counter
from typing import Any

import click
import torch
from torch import nn

from autosplit.compare.example import example_of, resized, samples_of
from autosplit.errors import PlanError
from autosplit.mesh.costs import DeviceSpeed, Link, measure_device
from autosplit.pipeline.simulation.transfer import Transfer
from autosplit.planner.captured_model import WholeModel
from autosplit.planner.costs import BlockOptions, ModelCosts, check_seconds, estimate, profile
from autosplit.planner.cuts import Limits
from autosplit.planner.devices import DeviceKind, device_kind, link_of
from autosplit.planner.meta_model import meta_model
from autosplit.planner.plan import Plan
from autosplit.planner.plan_search import search_plans, search_table
from autosplit.runtime.split_options import SplitOptions
from autosplit.text.files import write_text
from autosplit.text.progress import working

from .options import COUNTS, FILE, NAMES, SIZE, backend, memory_option, setting, typed_errors


def _limits(
    machine: DeviceKind | None, limit: int | None, link: float | None, optimizer_state: float
) -> Limits:
    """Memory and links: as given, else the device's; others take no time."""
    links, cap = Transfer(), math.inf
    if machine is not None:
        links, cap = Transfer(*machine.link), machine.memory
    if link is not None:
        links = Transfer(*link_of(link))
    return Limits(cap if limit is None else limit, optimizer_state, links)


def _speed(machine: DeviceKind | None, model: nn.Module) -> DeviceSpeed:
    """The rates of the device, for the dtype of most parameters' elements."""
    if machine is None:
        return measure_device()
    elements: Counter[torch.dtype] = Counter()
    for parameter in model.parameters():
        elements[parameter.dtype] += parameter.numel()
    return machine.speed(max(elements, key=elements.__getitem__, default=torch.float32))


@click.command()
@click.argument("factory")
@setting
@backend
@click.option("--devices", required=True, type=click.IntRange(min=1), help="One process each.")
@click.option(
    "--batch", type=click.IntRange(min=1), help="Samples in a step; default: as the example has."
)
@memory_option
@click.option("--limit", type=SIZE, help="Most that a device may hold, such as 80GiB.")
@click.option("--stages", type=click.IntRange(min=1), help="Default: as the schedules want.")
@click.option("--schedule", "schedules", type=NAMES, default=(), help="Default: try all.")
@click.option("--microbatches", type=COUNTS, help="Default: about 1, 2 and 4 a device.")
@click.option("--estimate", "estimated", is_flag=True, help="From FLOPs and bytes, not measured.")
@click.option("--device", help="Plan for this device, such as h100, or TFLOPS,GB/s.")
@click.option(
    "--link",
    type=click.FloatRange(min=0.0, min_open=True),
    help="Between devices: gigabytes a second in one direction.",
)
@click.option(
    "--seconds", type=float, help="To measure blocks for, with each size of microbatches; 20."
)
@click.option(
    "--optimizer-state",
    default=2.0,
    show_default=True,
    help="Bytes for each byte of parameters; Adam has 2.",
)
@click.option("--rows", type=click.IntRange(min=1), default=10, help="Configurations to show.")
@click.option(
    "--output", type=FILE, help="Write what gives partition() the plan, and its figures, as JSON."
)
@typed_errors
def plan(
    factory: str,
    overrides: dict[str, object],
    backend: str,
    devices: int,
    batch: int | None,
    memory: str | int,
    limit: int | None,
    link: float | None,
    estimated: bool,
    device: str | None,
    seconds: float | None,
    optimizer_state: float,
    rows: int,
    output: pathlib.Path | None,
    **space: Any,
) -> None:
    """Cut FACTORY's model into balanced stages and choose how to run them. FACTORY (MODULE:NAME)
    returns (model, args) or (model, args, kwargs).
    """
    machine = None if device is None else device_kind(device)
    estimated = estimated or machine is not None
    if seconds is not None and estimated:
        why = "--estimate" if device is None else "--device"
        raise click.BadParameter(
            f"--seconds has no effect with {why}, by which nothing is measured here"
        )
    seconds = 20.0 if seconds is None else seconds
    check_seconds(seconds)
    split = SplitOptions(backend, memory)
    limits = _limits(machine, limit, link, optimizer_state)
    model, args, kwargs = meta_model(lambda: example_of(factory, overrides))
    batch = samples_of((args, kwargs)) if batch is None else batch
    here = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    options = BlockOptions(split, device=None if estimated else here)
    speed = _speed(machine, model) if estimated else None

    @functools.cache
    def whole_of(size: int) -> WholeModel:
        return WholeModel.capture(model, *resized((args, kwargs), size))

    def costs_of(size: int) -> ModelCosts:
        whole = whole_of(size)
        if speed is not None:
            return estimate(whole, options, device=speed)
        with working(f"measuring {len(whole.blocks)} blocks for microbatches of {size}"):
            return profile(whole, options, seconds=seconds)

    with working(f"comparing what {devices} devices can run"):
        found = search_plans(costs_of, devices, batch, limits=limits, **space)
    best = found[0].solution
    if best is None:  # cannot be: the first of them can run
        raise PlanError(found[0].lost)
    chosen = Plan(whole_of(found[0].size), best, split, limit)
    source = "measured block by block"
    if estimated:
        source = "estimated from FLOPs and bytes, nothing was measured"
    if devices > 1 and limits.links.link(0, 1) == Link():
        source += "; links take no time (--link says what one carries)"
    click.echo(f"{search_table(found, rows)}\n\n{chosen.report()}; {source}")
    if output:
        figures = {"predicted_step": chosen.predicted_step, "peak_memory": chosen.peak_memory}
        data = {"partition": chosen.arguments, **figures, "stage_times": chosen.stage_times}
        write_text(output, json.dumps(data, indent=1) + "\n")
        click.echo(f"\nwritten: {output}")
