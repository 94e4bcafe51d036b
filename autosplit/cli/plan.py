"""``autosplit plan``: where to cut a model, and how to run its stages."""

from __future__ import annotations

import functools
import json
import math
import pathlib
from typing import Any

import click
import torch

from autosplit.compare.example import example_of, resized, samples_of
from autosplit.mesh.costs import DeviceSpeed, measure_device
from autosplit.pipeline.simulation.transfer import Transfer
from autosplit.planner.captured_model import WholeModel
from autosplit.planner.costs import BlockOptions, ModelCosts, estimate, profile
from autosplit.planner.cuts import Solution
from autosplit.planner.meta_model import meta_model
from autosplit.planner.plan import Plan
from autosplit.planner.plan_search import search_plans, search_table
from autosplit.runtime.build import SplitOptions
from autosplit.text.files import write_text
from autosplit.text.progress import working

from .options import COUNTS, FILE, NAMES, SIZE, backend, memory_option, setting, typed_errors

_REACHED = 0.5  # the share of the rates in data sheets that models reach
_CALL = 5e-6  # seconds between two kernels, whatever they do
_LATENCY = 1e-5  # seconds of a message between two devices


@click.command()
@click.argument("factory")
@setting
@backend
@click.option("--devices", required=True, type=click.IntRange(min=1), help="One process each.")
@click.option(
    "--batch",
    type=click.IntRange(1, 1_000_000),
    help="Samples in a step; default: as the example has.",
)
@memory_option
@click.option("--limit", type=SIZE, help="Most that a device may hold, such as 80GiB.")
@click.option("--stages", type=click.IntRange(min=1), help="Default: as the schedules want.")
@click.option("--schedule", "schedules", type=NAMES, default=(), help="Default: try all.")
@click.option("--microbatches", type=COUNTS, help="Default: about 1, 2 and 4 a device.")
@click.option("--estimate", "estimated", is_flag=True, help="From FLOPs and bytes, not measured.")
@click.option(
    "--device",
    nargs=2,
    type=click.FloatRange(min=0.0, min_open=True),
    metavar="TFLOPS GB/S",
    help="Plan for this device: what its data sheet says of products, and of its memory.",
)
@click.option(
    "--link",
    type=click.FloatRange(min=0.0, min_open=True),
    help="Between devices: gigabytes a second in one direction.",
)
@click.option(
    "--seconds",
    default=20.0,
    show_default=True,
    help="To measure blocks for, with each size of microbatches.",
)
@click.option(
    "--optimizer-state",
    type=click.FloatRange(min=0.0),
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
    device: tuple[float, float] | None,
    seconds: float,
    optimizer_state: float,
    rows: int,
    output: pathlib.Path | None,
    **space: Any,
) -> None:
    """Cut FACTORY's model into balanced stages and choose how to run them. FACTORY (MODULE:NAME)
    returns (model, args) or (model, args, kwargs).
    """
    split = SplitOptions(backend, memory)
    model, args, kwargs = meta_model(lambda: example_of(factory, overrides))
    batch = samples_of((args, kwargs)) if batch is None else batch
    speed = None
    if device is not None:
        speed = DeviceSpeed(_REACHED * 1e12 * device[0], _REACHED * 1e9 * device[1], _CALL)
    elif estimated:
        speed = measure_device()
    here = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    options = BlockOptions(split, device=None if speed else here)
    links = None if link is None else Transfer(_LATENCY, 1e9 * link)
    cap = math.inf if limit is None else limit

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
        found = search_plans(
            costs_of,
            devices,
            batch,
            cap=cap,
            optimizer_state=optimizer_state,
            links=links,
            **space,
        )
    best = found[0].found
    if not isinstance(best, Solution):  # cannot be: the first of them can run
        raise best
    chosen = Plan(whole_of(found[0].size), best, split, limit)
    source = "measured block by block"
    if speed is not None:
        source = "estimated from FLOPs and bytes, nothing was measured"
    if devices > 1 and links is None:
        source += "; links take no time (--link says what one carries)"
    click.echo(f"{search_table(found, rows)}\n\n{chosen.report()}; {source}")
    if output:
        figures = {"predicted_step": chosen.predicted_step, "peak_memory": chosen.peak_memory}
        data = {"partition": chosen.arguments, **figures, "stage_times": chosen.stage_times}
        write_text(output, json.dumps(data, indent=1) + "\n")
        click.echo(f"\nwritten: {output}")
