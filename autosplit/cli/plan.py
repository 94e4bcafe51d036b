"""``autosplit plan`` finds the best stages, microbatches, schedule and cuts for a model on a number
of devices.
"""

from __future__ import annotations

import functools
import math
import pathlib
from collections.abc import Sequence
from typing import Any, cast

import click
import torch
from tabulate import tabulate

from autosplit.compare.example import example_of, resized, samples_of
from autosplit.errors import PlanError
from autosplit.mesh.costs import DataSheet, DeviceSpeed, Link, data_sheet, measure_device
from autosplit.pipeline.simulation.collectives import ParameterRanks
from autosplit.pipeline.simulation.step_graph import Transfer
from autosplit.planner.captured_model import WholeModel
from autosplit.planner.costs import BlockOptions, ModelCosts, estimate, profile
from autosplit.planner.cuts import Solution
from autosplit.planner.meta_model import meta_model
from autosplit.planner.plan_search import Configuration, search_plans
from autosplit.runtime.options import SplitOptions
from autosplit.text.figures import milliseconds, size_text
from autosplit.text.files import write_json
from autosplit.text.progress import working
from autosplit.trainer.plan import Plan

from .options import (
    COUNTS,
    FILE,
    NAMES,
    SIZE,
    Read,
    backend,
    json_option,
    memory_option,
    setting,
    typed_errors,
)


def search_rows(configurations: Sequence[Configuration]) -> list[dict[str, Any]]:
    """The configurations as rows for JSON, the best first. Times are in seconds, sizes in bytes."""
    rows = []
    for configuration in configurations:
        outcome = configuration.outcome
        row: dict[str, Any] = {
            "schedule": configuration.request.name,
            "stages": configuration.stages,
            "microbatches": configuration.request.microbatches,
        }
        if isinstance(outcome, Solution):
            row["samples_per_microbatch"] = configuration.size
            row |= {"step": outcome.step, "bubble": outcome.bubble}
            row["peak_memory"] = [round(peak) for peak in outcome.peaks]
        else:
            row["refused"] = str(outcome)
        rows.append(row)
    return rows


def search_table(configurations: Sequence[Configuration], rows: int) -> str:
    """Table of the best ``rows`` configurations that can run, and the errors of those that cannot.

    Args:
        configurations: the best first.
        rows: the number of rows to show.
    """
    runnable = [(c, c.outcome) for c in configurations if isinstance(c.outcome, Solution)]
    best = runnable[0][1].step
    table = [
        [
            configuration.request.name,
            str(configuration.stages),
            str(configuration.request.microbatches),
            str(configuration.size),
            milliseconds(plan.step),
            f"{plan.step / best:.3f}x",
            f"{plan.bubble:.1%}",
            size_text(round(max(plan.peaks))),
        ]
        for configuration, plan in runnable[:rows]
    ]
    headers = ["schedule", "N", "M", "size", "step ms", "of the best", "bubble", "peak"]
    text = tabulate(table, headers, colalign=("left", *["right"] * 7), disable_numparse=True)
    if left_out := len(runnable) - len(table):
        text += f"\n... and {left_out} more (--rows shows them)"
    refused = [c for c in configurations if not isinstance(c.outcome, Solution)]
    reasons = "\n".join(dict.fromkeys(f"not {c.request.name}: {c.outcome}" for c in refused))
    return f"{text}\n\n{reasons}" if reasons else text


_REACHED = 0.5  # the share of a data sheet's rates that models reach
_CALL = 5e-6  # the least seconds of a kernel
_LATENCY = 1e-5  # seconds of a message between two devices


@click.command()
@click.argument("factory")
@setting
@backend
@click.option("--devices", required=True, type=click.IntRange(min=1), help="One process each.")
@click.option(
    "--batch",
    type=click.IntRange(1, 1_000_000),
    help="Samples in a step; default: those of the example.",
)
@memory_option
@click.option("--limit", type=SIZE, help="The most memory of a device, such as 80GiB.")
@click.option("--stages", type=click.IntRange(min=1), help="Default: as the schedules need.")
@click.option("--schedule", "schedules", type=NAMES, default=(), help="Default: try all.")
@click.option("--microbatches", type=COUNTS, help="Default: about 1, 2 and 4 per device.")
@click.option("--estimate", "estimated", is_flag=True, help="From FLOPs and bytes, not measured.")
@click.option(
    "--device",
    type=Read("DEVICE", data_sheet),
    help="Plan for this device: h100, or TFLOPS and GB/s of its data sheet, as 989,3350.",
)
@click.option(
    "--link",
    type=click.FloatRange(min=0.0, min_open=True),
    help="Bandwidth between devices, in gigabytes per second and direction.",
)
@click.option("--replicas", type=click.IntRange(min=1), default=1, help="Copies of each stage.")
@click.option("--shards", type=click.IntRange(min=1), default=1, help="Shards of each stage.")
@click.option(
    "--seconds",
    default=20.0,
    show_default=True,
    help="Time to measure blocks, for each size of microbatches.",
)
@click.option(
    "--optimizer-state",
    type=click.FloatRange(min=0.0),
    default=2.0,
    show_default=True,
    help="Bytes per byte of parameters; 2 for Adam.",
)
@click.option("--rows", type=click.IntRange(min=1), default=10, help="Configurations to show.")
@click.option(
    "--output",
    type=FILE,
    help="Write the arguments for partition(), and the plan's figures, as JSON.",
)
@json_option
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
    replicas: int,
    shards: int,
    estimated: bool,
    device: DataSheet | None,
    seconds: float,
    optimizer_state: float,
    rows: int,
    output: pathlib.Path | None,
    json_file: pathlib.Path | None,
    **space: Any,
) -> None:
    """Cut FACTORY's model into balanced stages and choose how to run them. FACTORY (MODULE:NAME)
    returns (model, args) or (model, args, kwargs).
    """
    split = SplitOptions(backend=backend, memory=memory)
    model, args, kwargs, _ = meta_model(lambda: example_of(factory, overrides))
    batch = samples_of((args, kwargs)) if batch is None else batch
    speed = None
    if device is not None:
        speed = DeviceSpeed(
            _REACHED * 1e12 * device.teraflops, _REACHED * 1e9 * device.gigabytes_per_second, _CALL
        )
    elif estimated:
        speed = measure_device()
    here = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    options = BlockOptions(split, device=None if speed else here)
    links = None if link is None else Transfer(_LATENCY, 1e9 * link)
    copies = None
    if replicas * shards > 1:
        if links is None:
            raise PlanError("--replicas and --shards need the speed of their link: give --link")
        copies = ParameterRanks(Link(links.latency, links.bandwidth), replicas, shards)
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
        configurations = search_plans(
            costs_of,
            devices,
            batch,
            cap=cap,
            optimizer_state=optimizer_state,
            links=links,
            copies=copies,
            **space,
        )
    best = cast("Solution", configurations[0].outcome)  # search_plans raises if none can run
    chosen = Plan(whole_of(configurations[0].size), best, options, limit)
    source = "measured block by block"
    if speed is not None:
        source = "estimated from FLOPs and bytes, nothing was measured"
    if devices > 1 and links is None:
        source += "; links take no time (give their bandwidth as --link)"
    click.echo(f"{search_table(configurations, rows)}\n\n{chosen.report()}; {source}")
    if json_file:
        write_json(json_file, {"rows": search_rows(configurations)})
    if output:
        figures = {"predicted_step": chosen.predicted_step, "peak_memory": chosen.peak_memory}
        data = {"partition": chosen.arguments, **figures, "stage_times": chosen.stage_times}
        write_json(output, data)
        click.echo(f"\nwritten: {output}")
