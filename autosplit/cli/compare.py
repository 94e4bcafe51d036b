"""``autosplit compare``: fused against split."""

from __future__ import annotations

import dataclasses
import json
import pathlib
from typing import Any

import click

from autosplit.compare.example import samples_of, trained_example
from autosplit.compare.run import compare as run
from autosplit.compare.settings import Comparison, Settings, comparison_table, durations_table
from autosplit.errors import ScheduleError
from autosplit.pipeline.builders.build import build
from autosplit.pipeline.builders.schedule_request import AUTO
from autosplit.report.timelines import write_timelines
from autosplit.runtime.split_options import check_backend
from autosplit.text.files import write_text

from .options import (
    backend,
    counts,
    folder_to_write,
    json_option,
    names,
    setting,
    tell_written,
    typed_errors,
)


@click.command()
@click.argument("factory")
@setting
@backend
@click.option("--stages", default=2, show_default=True, help="Pipeline stages.")
@click.option("--ranks", type=int, help="Processes; default: one for each stage.")
@click.option(
    "--schedule",
    "schedules",
    default="1f1b",
    show_default=True,
    callback=names,
    help="Schedule, or several with commas.",
)
@click.option(
    "--microbatches",
    default="2",
    show_default=True,
    callback=counts,
    help="Microbatches in a step, or several counts with commas.",
)
@click.option(
    "--weights",
    help="Where the split schedule puts weight gradients; left out: where suits it.",
)
@click.option("--steps", default=20, show_default=True, help="Timed steps of each.")
@click.option("--warmup", default=2, show_default=True, help="Steps before the timed ones.")
@click.option(
    "--lr", "learning_rate", default=1e-3, show_default=True, help="Learning rate of AdamW."
)
@click.option("--threads", default=1, show_default=True, help="Torch threads of each process.")
@click.option("--timeout", default=120.0, show_default=True, help="Seconds to wait for a rank.")
@folder_to_write(
    "--output",
    help="Folder for trace.json, timeline.png, results.json and the graphs.",
)
@json_option
@typed_errors
def compare(
    factory: str,
    output: pathlib.Path | None,
    json_file: pathlib.Path | None,
    stages: int,
    ranks: int | None,
    **options: Any,
) -> None:
    """Train FACTORY with the fused and with the split backward, alternating step by step, and print
    what changed. FACTORY (MODULE:NAME) returns (model, args), of a microbatch, or (model, args,
    kwargs). Trained is the output's own loss, or the output where it is a number; else its mean
    square stands in.
    """
    dump = str(output / "graphs") if output else None
    ranks = stages if ranks is None else ranks
    settings = Settings(factory=factory, stages=stages, ranks=ranks, dump=dump, **options)
    _check_before_launch(settings)
    found = run(settings)
    if found is None:
        return
    click.echo(comparison_table(found.rows))
    click.echo("\n" + durations_table(found.rows))
    if json_file:
        _write_json(found, json_file)
    if output:
        files = [*_write_timelines(found, output), output / "results.json", output / "graphs"]
        _write_json(found, output / "results.json")
        tell_written(files)


def _check_before_launch(settings: Settings) -> None:
    """Fail here, in one process, on what every rank would fail on."""
    check_backend(settings.backend)
    for name, count in settings.cases:
        if name == AUTO:
            raise ScheduleError(
                f"{AUTO!r} is searched while a trainer runs: compare schedules by name"
            )
        build(name, settings.stages, count, weights=settings.weights, ranks=settings.ranks)
    samples_of(trained_example(settings.factory, settings.overrides)[1])


def _write_json(comparison: Comparison, file: pathlib.Path) -> None:
    """``{"rows": [...]}`` with the fields of ``Row``."""
    rows: list[dict[str, Any]] = [dataclasses.asdict(row) for row in comparison.rows]
    write_text(file, json.dumps({"rows": rows}, indent=2) + "\n")


def _write_timelines(comparison: Comparison, folder: pathlib.Path) -> list[pathlib.Path]:
    """``write_timelines``, in whose trace each step is above what it would be if nothing were lost;
    returns the paths.
    """
    rows, both = [], []
    for row, timeline, ideal in zip(
        comparison.rows, comparison.timelines, comparison.ideals, strict=True
    ):
        rows.append((row.title, timeline))
        both += [(f"{row.title}, measured", timeline), (f"{row.title}, simulated", ideal)]
    title = f"{comparison.rows[0].stages} stages"
    return write_timelines(rows, folder, title=title, trace_rows=both)
