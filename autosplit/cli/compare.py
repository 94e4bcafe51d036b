"""``autosplit compare`` trains with fused and with split backwards, and compares them."""

from __future__ import annotations

import dataclasses
import itertools
import pathlib
from collections.abc import Sequence
from typing import Any

import click

from autosplit.backends.backend import check_backend
from autosplit.compare.example import samples_of, trained_example
from autosplit.compare.run import ComparisonRow, Settings
from autosplit.compare.run import compare as run
from autosplit.compare.tables import Row, comparison_table, durations_table
from autosplit.pipeline.builders.build import AUTO, build
from autosplit.report import write_timelines
from autosplit.text.files import write_json

from .options import (
    COUNTS,
    FOLDER,
    NAMES,
    backend,
    json_option,
    setting,
    tell_written,
    typed_errors,
)


@click.command()
@click.argument("factory")
@setting
@backend
@click.option("--stages", default=2, show_default=True, help="Pipeline stages.")
@click.option("--ranks", type=click.IntRange(1, 256), help="Processes; default: one a stage.")
@click.option("--schedule", type=NAMES, default="1f1b", show_default=True, help="One or more.")
@click.option(
    "--microbatches", type=COUNTS, default="2", show_default=True, help="In a step: one or more."
)
@click.option(
    "--steps", type=click.IntRange(min=1), default=20, show_default=True, help="Timed, of each."
)
@click.option(
    "--loss",
    metavar="MODULE:NAME",
    help="Your loss(output, target); such as torch.nn.functional:cross_entropy.",
)
@click.option("--output", type=FOLDER, help="For trace.json, timeline.png and results.json.")
@json_option
@typed_errors
def compare(
    factory: str,
    output: pathlib.Path | None,
    json_file: pathlib.Path | None,
    stages: int,
    ranks: int | None,
    schedule: tuple[str, ...],
    microbatches: tuple[int, ...],
    **options: Any,
) -> None:
    """Train FACTORY with the fused and with the split backward, alternating step by step, and print
    throughput, times and memory of both. FACTORY (MODULE:NAME) returns (model, args), of a
    microbatch, or (model, args, kwargs), and with --loss a target as the last item. Without --loss,
    the output's own loss is trained, or the output if it is a number, else its mean square.
    """
    cases = [*itertools.product(schedule, microbatches)]
    ranks = stages if ranks is None else ranks
    settings = Settings(factory, stages=stages, ranks=ranks, cases=cases, **options)
    _check_before_launch(settings)
    results = run(settings)
    if results is None:
        return
    rows = [result.row for result in results]
    click.echo(comparison_table(rows))
    click.echo("\n" + durations_table(rows))
    if json_file:
        _write_json(rows, json_file)
    if output:
        files = [*_write_timelines(results, output), output / "results.json"]
        _write_json(rows, files[-1])
        tell_written(files)


def _check_before_launch(settings: Settings) -> None:
    """Raise in this process the errors that otherwise every rank would raise."""
    check_backend(settings.backend)
    for name, count in settings.cases:
        build("1f1b" if name == AUTO else name, settings.stages, count, ranks=settings.ranks)
    example = trained_example(settings.factory, settings.overrides, settings.loss)
    samples_of(example.inputs)


def _write_json(rows: Sequence[Row], file: pathlib.Path) -> None:
    """Write ``{"rows": [...]}``: the fields of each ``Row``, and samples and tokens per second."""
    data: list[dict[str, Any]] = []
    for row in rows:
        rates = {"samples_per_s": row.samples_per_s, "tokens_per_s": row.tokens_per_s}
        data.append(dataclasses.asdict(row) | rates)
    write_json(file, {"rows": data})


def _write_timelines(results: Sequence[ComparisonRow], folder: pathlib.Path) -> list[pathlib.Path]:
    """Write a trace and a picture of the typical steps, and return the paths. Below each measured
    step, the trace has the simulated step, in which actions wait for nothing but their inputs.
    """
    rows, trace_rows = [], []
    for row, timeline, ideal in results:
        name = f"{row.title}, step {row.drawn_step}"
        rows.append((name, timeline))
        trace_rows += [(f"{name}, measured", timeline), (f"{row.title}, simulated", ideal)]
    names = ", ".join(dict.fromkeys(result.row.schedule for result in results))
    title = f"{names} over {results[0].row.stages} stages: the steps nearest to the medians"
    return write_timelines(rows, folder, title=title, trace_rows=trace_rows)
