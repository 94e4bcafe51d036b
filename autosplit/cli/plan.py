"""``autosplit plan``: the best stages, microbatches and schedule for a model on some devices, and
where to cut it.
"""

from __future__ import annotations

import functools
import json
import math
import pathlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import click
import torch
from tabulate import tabulate

from autosplit.compare.example import example_of, resized, samples_of
from autosplit.dump import milliseconds
from autosplit.errors import PlanError, ScheduleError
from autosplit.mesh.costs import DeviceSpeed, measure_device
from autosplit.pipeline.builders.build import SCHEDULES, ScheduleRequest, unknown_schedule
from autosplit.pipeline.simulation.step_graph import Transfer
from autosplit.planner.captured_model import WholeModel
from autosplit.planner.costs import BlockOptions, ModelCosts, estimate, profile
from autosplit.planner.cuts import CapError, Solution, solve
from autosplit.planner.meta_model import meta_model
from autosplit.runtime.build import SplitOptions
from autosplit.text.figures import few, size_text
from autosplit.text.files import write_text
from autosplit.text.progress import working
from autosplit.trainer.plan import Plan

from .options import (
    COUNTS,
    FILE,
    NAMES,
    SIZE,
    Read,
    backend,
    memory_option,
    setting,
    typed_errors,
)

_PER_DEVICE = (1, 2, 4)  # microbatches for each device, where their number is open
_CHUNKS = (2, 3, 4)  # stages a rank, where a schedule leaves that open
_REFINED = 6  # of the best configurations, whose cuts are worked on


class Configuration(NamedTuple):
    """One way to run a model.

    Attributes:
        stages: N.
        size: samples in a microbatch.
        request: the schedule, with M and the ranks.
        found: its stages and the predicted step, or why it cannot run.
    """

    stages: int
    size: int
    request: ScheduleRequest
    found: Solution | PlanError | ScheduleError

    @property
    def key(self) -> tuple[float, float]:
        """What is less is better: seconds of a step, to a hundredth, as no prediction is worth
        more, then bytes of the fullest rank. What cannot run comes last.
        """
        if not isinstance(self.found, Solution):
            return (math.inf, getattr(self.found, "least", math.inf))
        return (round(math.log(self.found.step), 2), max(self.found.peaks))


def search_plans(
    costs_of: Callable[[int], ModelCosts],
    devices: int,
    batch: int,
    *,
    stages: int | None = None,
    microbatches: Sequence[int] | None = None,
    schedules: Sequence[str] | None = None,
    **memory: Any,
) -> list[Configuration]:
    """All configurations, the best first; those that cannot run come last.

    Each gets cuts at even shares; those of the best are then refined, see ``solve``.

    Args:
        costs_of: gives the costs for microbatches of so many samples.
        devices: one rank each.
        batch: samples in a step.
        stages: N; None: one a device, or as many as a schedule wants.
        microbatches: Ms; None: those that divide the batch into about 1, 2 and 4 a device.
        schedules: names; None: all.
        memory: of a rank, and links: ``cap``, ``optimizer_state`` and ``links`` of ``solve``.

    Raises:
        PlanError: a batch that M does not divide, more stages than blocks, or nothing that can run.
        CapError: nothing fits under the cap; says the least cap that would do.
        ScheduleError: an unknown schedule.
    """
    for name in schedules or ():
        if name not in SCHEDULES:
            raise unknown_schedule(name)
    costs = {count: costs_of(batch // count) for count in _counts(devices, batch, microbatches)}

    def solved(count: int, number: int, name: str, *, refine: bool) -> Configuration:
        request = ScheduleRequest(name, count, devices)
        found: Solution | PlanError | ScheduleError
        try:
            found = solve(costs[count], number, request, refine=refine, **memory)
        except (PlanError, ScheduleError) as error:
            found = error
        return Configuration(number, batch // count, request, found)

    choices = [*_choices(schedules, stages, devices)]
    rough = [solved(count, *choice, refine=False) for count in costs for choice in choices]
    rough.sort(key=lambda each: each.key)
    best = [
        solved(each.request.microbatches, each.stages, each.request.name, refine=True)
        for each in rough[:_REFINED]
    ]
    found = sorted([*best, *rough[_REFINED:]], key=lambda each: each.key)
    lost = found[0].found
    if isinstance(lost, CapError):
        raise lost
    if not isinstance(lost, Solution):
        reasons = dict.fromkeys(str(each.found) for each in found)
        raise PlanError("nothing can run: " + "; ".join(reasons))
    return found


def _counts(devices: int, batch: int, microbatches: Sequence[int] | None) -> Sequence[int]:
    """The numbers of microbatches to try."""
    divisors = [count for count in range(1, batch + 1) if batch % count == 0]
    for count in microbatches or ():
        if count not in divisors:
            raise PlanError(
                f"a batch of {batch} cannot be cut into {count} equal microbatches; "
                f"it can into {few([*map(str, divisors)], 20)}"
            )
    wanted = (each * devices for each in _PER_DEVICE)
    near = (min(divisors, key=lambda d: abs(math.log(d / want))) for want in wanted)
    return sorted({*(microbatches or near)})


def _choices(
    schedules: Sequence[str] | None, stages: int | None, devices: int
) -> Iterator[tuple[int, str]]:
    """Every schedule, with the numbers of stages that it wants."""
    for name in schedules or SCHEDULES:
        chunks = SCHEDULES[name].chunks
        several = _CHUNKS if chunks is None else (chunks,)
        yield from ((n, name) for n in ([stages] if stages else [n * devices for n in several]))


def search_table(found: Sequence[Configuration], rows: int | None = None) -> str:
    """The best ``rows`` configurations that can run; then why others cannot.

    Args:
        found: the best first.
        rows: to show.
    """
    able = [(each, each.found) for each in found if isinstance(each.found, Solution)]
    best = able[0][1].step
    table = [
        [
            each.request.name,
            str(each.stages),
            str(each.request.microbatches),
            str(each.size),
            milliseconds(plan.step),
            f"{plan.step / best:.3f}x",
            f"{plan.bubble:.1%}",
            size_text(round(max(plan.peaks))),
        ]
        for each, plan in able[:rows]
    ]
    headers = ["schedule", "N", "M", "size", "step ms", "of the best", "bubble", "peak"]
    text = tabulate(table, headers, colalign=("left", *["right"] * 7), disable_numparse=True)
    if left_out := len(able) - len(table):
        text += f"\n... and {left_out} more (--rows shows them)"
    lost = [each for each in found if not isinstance(each.found, Solution)]
    reasons = "\n".join(dict.fromkeys(f"not {each.request.name}: {each.found}" for each in lost))
    return f"{text}\n\n{reasons}" if reasons else text


# --- the command ----------------------------------------------------------------------------------


_REACHED = 0.5  # the share of the rates in data sheets that models reach
_CALL = 5e-6  # seconds between two kernels, whatever they do
_LATENCY = 1e-5  # seconds of a message between two devices


def _data_sheet(text: str) -> float:
    """A positive number.

    Raises:
        ValueError: says what the option takes.
    """
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if value > 0:
        return value
    raise ValueError(
        f"{text!r} is no positive number: expected two of a data sheet, the TFLOPS of its matrix "
        "products and the GB/s of its memory, such as --device 989 3350 for an H100"
    )


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
    type=Read("FIGURE", _data_sheet),
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
    chosen = Plan(whole_of(found[0].size), best, options, limit)
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
