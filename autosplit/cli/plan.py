"""``autosplit plan``: where to cut a model, and how to run its stages."""

from __future__ import annotations

import math
import pathlib
from typing import Any

import click

from .options import backend, counts, file_to_write, json_option, names, setting, typed_errors

_SECONDS = 60.0

# With any of these nothing can be measured here.
_ELSEWHERE = ("device", "flops", "bandwidth_memory", "link", "efficiency")


def _limit(context: click.Context, parameter: click.Parameter, value: str | None) -> float:
    """Bytes of a device; any, where the option is left out."""
    from autosplit.errors import PlanError
    from autosplit.text.figures import parse_size

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
@click.option("--device", help="Plan for this device, such as h100, by its data sheet.")
@click.option("--flops", type=float, help="Of the device, teraflops in the model's dtype.")
@click.option("--bandwidth-memory", type=float, help="Of its memory, gigabytes a second.")
@click.option("--link", help="Between devices: gigabytes a second, or a name such as ib-ndr.")
@click.option("--efficiency", type=float, help="Share of these rates that is reached; 0.5.")
@click.option("--seconds", type=float, help="To measure blocks for, in all; 60.")
@click.option(
    "--rehearse/--no-rehearse",
    default=None,
    help="Run a few steps of the best stages; default: where this machine can run all ranks.",
)
@click.option("--latency", type=float, help="Of a link, milliseconds; measures none.")
@click.option("--bandwidth", type=float, help="Of a link, gigabytes a second; measures none.")
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
@file_to_write("--picture", help="Draw the plan into this file.")
@json_option
@typed_errors
def plan(
    factory: str,
    overrides: dict[str, str],
    backend: str,
    rows: int,
    output: pathlib.Path | None,
    picture: pathlib.Path | None,
    json_file: pathlib.Path | None,
    **options: Any,
) -> None:
    """Cut FACTORY's model into balanced stages and choose how to run them. FACTORY (MODULE:NAME)
    returns (model, args) or (model, args, kwargs). Parameters get memory only in a rehearsal.
    """
    from autosplit.compare.factory import prepared
    from autosplit.report.plan_tables import (
        check_picture,
        draw_plan,
        measures_table,
        plan_table,
        refused_table,
        search_table,
        source_line,
    )

    from .planning import plan_factory, write_summary

    if picture:
        check_picture(picture)
    _settle(options)
    request = _request(backend=backend, **options)
    build = prepared(factory, overrides)
    if not request.estimated:
        click.echo(
            f"capturing and measuring {factory}: about {request.seconds:g} s of measurement, "
            "beside the time to capture it; --estimate measures nothing",
            err=True,
        )
    if math.isfinite(options["limit"]):
        click.echo("a step within the limit is searched for: up to a minute or two", err=True)
    found = plan_factory(build, factory, request)
    click.echo(search_table(found.configurations, rows))
    refused = refused_table(found.configurations)
    if refused:
        click.echo("\n" + refused)
    click.echo("\n" + plan_table(found.plan))
    if found.plan.measures:
        click.echo("\n" + measures_table(found.plan))
    click.echo(
        "\n" + source_line(found.plan, rehearsed=found.rehearsed, estimated=request.estimated)
    )
    files = []
    if output:
        found.plan.save(output)
        files.append(output)
    if json_file:
        write_summary(found.plan, json_file)
        files.append(json_file)
    if picture:
        draw_plan(found.plan, picture)
        files.append(picture)
    if files:
        click.echo("\nwritten: " + ", ".join(map(str, files)))


def _settle(options: dict[str, Any]) -> None:
    """Fill in what depends on other options, and refuse options that others leave without effect.

    Raises:
        click.BadParameter: naming both.
    """
    elsewhere = [name for name in _ELSEWHERE if options[name] is not None]
    if elsewhere or options["estimate"]:
        why = f"--{elsewhere[0].replace('_', '-')}" if elsewhere else "--estimate"
        for name in ("seconds", "rehearse"):
            if options[name] not in (None, False):
                raise click.BadParameter(
                    f"--{name} has no effect with {why}, by which nothing is measured here"
                )
    for name in ("latency", "bandwidth"):
        if options["link"] is not None and options[name] is not None:
            raise click.BadParameter(
                f"--link and --{name} both say what the link between devices is: leave one out"
            )
    for name in ("flops", "bandwidth_memory", "bandwidth", "latency"):
        value, least = options[name], name == "latency"
        if value is not None and not (value > 0.0 or (least and value == 0.0)):
            raise click.BadParameter(
                f"--{name.replace('_', '-')} must be {'>= 0' if least else '> 0'}, got {value!r}"
            )
    options["estimate"] = bool(elsewhere) or options["estimate"]
    options["seconds"] = _SECONDS if options["seconds"] is None else options["seconds"]
    options["rehearse"] = options["rehearse"] is not False


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
    device: str | None,
    flops: float | None,
    bandwidth_memory: float | None,
    link: str | None,
    efficiency: float | None,
    seconds: float,
    rehearse: bool,
    latency: float | None,
    bandwidth: float | None,
    optimizer_state: float,
) -> Any:
    from autosplit.pipeline.simulation.transfer import Transfer
    from autosplit.planner.costs.limits import Limits
    from autosplit.planner.plan.plan_search import SearchSpace

    from .plan_request import PlanRequest, machine_of

    links = Transfer((latency or 0.0) / 1e3, math.inf if bandwidth is None else 1e9 * bandwidth)
    return PlanRequest(
        devices,
        batch,
        SearchSpace(stages, microbatches, schedules or None, memory or None),
        Limits(limit, optimizer_state, links, measures=math.isfinite(limit)),
        estimate,
        seconds,
        backend,
        rehearse,
        machine_of(device, flops, bandwidth_memory, link, efficiency),
    )
