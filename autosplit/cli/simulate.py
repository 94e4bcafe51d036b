"""``autosplit simulate``: all schedules side by side."""

from __future__ import annotations

import pathlib
from typing import Any

import click

from .options import folder_to_write, json_option, numbers, typed_errors


@click.command()
@click.option("--stages", required=True, type=click.IntRange(min=1), help="Stages, one a rank.")
@click.option("--microbatches", required=True, type=click.IntRange(min=1), help="In a step.")
@click.option(
    "--times",
    required=True,
    callback=numbers,
    metavar="F,I,W[,F,I,W...]",
    help="Milliseconds of F, I and W: of every stage, or of each in turn.",
)
@click.option(
    "--memory",
    default="1,1",
    show_default=True,
    callback=numbers,
    metavar="SAVED,DEFERRED[,...]",
    help="What a stage keeps of a microbatch from F to I and from I to W, in any unit.",
)
@click.option(
    "--chunks",
    default=2,
    show_default=True,
    type=click.IntRange(min=2),
    help="Stages a rank in interleaved schedules; each stage is cut into as many.",
)
@click.option("--latency", default=0.0, show_default=True, help="Milliseconds of a transfer.")
@click.option("--bandwidth", type=float, help="Of a link, in gigabytes a second.")
@click.option("--message", type=float, help="Megabytes of a microbatch between two stages.")
@click.option("--cap", type=float, help="Search the shortest step that keeps no more on any rank.")
@click.option("--schedule", help="Draw this one's timeline; default: the shortest step's.")
@folder_to_write("--output", help="Folder for pareto.png, timeline.png and .html, and trace.json.")
@json_option
@typed_errors
def simulate(
    output: pathlib.Path | None,
    json_file: pathlib.Path | None,
    schedule: str | None,
    **options: Any,
) -> None:
    """Simulate every schedule on a pipeline of the given stages, and print them side by side."""
    from autosplit.pipeline.validation.grid import format_schedule
    from autosplit.report.schedule_table import survey_table

    from .projection import choose_schedule, project, write_pictures, write_rows

    found = project(**options)
    shown = choose_schedule(found, schedule)
    click.echo(survey_table(found))
    for name, reason in found.refused.items():
        click.echo(f"\nnot {name}: {reason}")
    if json_file:
        write_rows(found, json_file)
    if output:
        files = write_pictures(found, shown, output)
        click.echo("\nwritten: " + ", ".join(map(str, files)))
    elif schedule:
        click.echo("\n" + format_schedule(shown.schedule))
