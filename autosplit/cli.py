"""The command line: ``autosplit compare``, ``autosplit simulate`` and ``autosplit inspect``."""

from __future__ import annotations

import functools
import pathlib
from collections.abc import Callable
from typing import Any

import click

from .errors import AutosplitError


def _typed_errors(command: Callable[..., None]) -> Callable[..., None]:
    """Print an autosplit error as a message; anything else is a bug and keeps its traceback."""

    @functools.wraps(command)
    def run(*args: Any, **kwargs: Any) -> None:
        try:
            command(*args, **kwargs)
        except AutosplitError as error:
            raise click.ClickException(f"{type(error).__name__}: {error}") from error

    return run


_backend = click.option(
    "--backend",
    default="eager",
    show_default=True,
    help="How graphs are run: eager, inductor, cudagraphs.",
)


def _overrides(
    context: click.Context, parameter: click.Parameter, values: tuple[str, ...]
) -> dict[str, str]:
    pairs = [value.partition("=") for value in values]
    wrong = [name for name, sign, _ in pairs if not (name and sign)]
    if wrong:
        raise click.BadParameter(f"expected NAME=VALUE, got {wrong[0]!r}")
    return {name: value for name, _, value in pairs}


def _names(context: click.Context, parameter: click.Parameter, value: str) -> tuple[str, ...]:
    return tuple(part.strip() for part in value.split(",") if part.strip())


def _counts(context: click.Context, parameter: click.Parameter, value: str) -> tuple[int, ...]:
    try:
        counts = tuple(int(part) for part in value.split(","))
    except ValueError as error:
        raise click.BadParameter(f"expected counts such as 2,4, got {value!r}") from error
    if min(counts) < 1:
        raise click.BadParameter(f"expected counts of at least 1, got {value!r}")
    return counts


def _memory(context: click.Context, parameter: click.Parameter, value: str) -> str | int:
    return int(value) if value.isdigit() else value


def _numbers(context: click.Context, parameter: click.Parameter, value: str) -> tuple[float, ...]:
    try:
        return tuple(float(part) for part in value.split(","))
    except ValueError as error:
        raise click.BadParameter(f"expected numbers such as 2,1.5, got {value!r}") from error


_setting = click.option(
    "--set",
    "overrides",
    multiple=True,
    metavar="NAME=VALUE",
    callback=_overrides,
    help="Keyword setting for the factory; may be repeated.",
)


_json_option = click.option(
    "--json",
    "json_file",
    type=click.Path(path_type=pathlib.Path, dir_okay=False),
    help="Write the rows to this file.",
)


@click.group()
@click.version_option(package_name="autosplit")
def main() -> None:
    """Split backward passes into input and weight gradients, and drive the halves."""


@main.command()
@click.argument("factory")
@_setting
@_backend
@click.option("--stages", default=2, show_default=True, help="Pipeline stages.")
@click.option("--ranks", type=int, help="Processes; default: one for each stage.")
@click.option(
    "--schedule",
    "schedules",
    default="1f1b",
    show_default=True,
    callback=_names,
    help="Schedule, or several with commas.",
)
@click.option(
    "--microbatches",
    default="2",
    show_default=True,
    callback=_counts,
    help="Microbatches in a step, or several counts with commas.",
)
@click.option(
    "--weights",
    help="Where the split schedule puts weight gradients; left out: where suits it.",
)
@click.option("--steps", default=20, show_default=True, help="Timed steps of each.")
@click.option("--warmup", default=2, show_default=True, help="Steps before the timed ones.")
@click.option("--lr", "learning_rate", default=1e-3, show_default=True, help="AdamW's.")
@click.option("--threads", default=1, show_default=True, help="Torch threads of each process.")
@click.option("--timeout", default=120.0, show_default=True, help="Seconds to wait for a rank.")
@click.option(
    "--output",
    type=click.Path(path_type=pathlib.Path, file_okay=False),
    help="Folder for timeline.png, timeline.html, trace.json, results.json and the graphs.",
)
@_json_option
@_typed_errors
def compare(
    factory: str,
    output: pathlib.Path | None,
    json_file: pathlib.Path | None,
    stages: int,
    ranks: int | None,
    **options: Any,
) -> None:
    """Train FACTORY (MODULE:NAME, returning a Workload) with the fused and with the split
    backward, alternating step by step, and print what changed.
    """
    from .compare.run import compare as run
    from .compare.run import write_json, write_pictures
    from .compare.settings import Settings
    from .report.comparison import comparison_table, durations_table

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
        write_json(found, json_file)
    if output:
        write_json(found, output / "results.json")
        files = [*write_pictures(found, output), output / "results.json", output / "graphs"]
        click.echo("\nwritten: " + ", ".join(map(str, files)))


def _check_before_launch(settings: Any) -> None:
    """Fail here, in one process, on what every rank would fail on."""
    from .compile import check_backend
    from .pipeline.schedules import build
    from .workload import load_workload

    check_backend(settings.backend)
    load_workload(settings.factory, settings.overrides)
    for name in settings.schedules:
        for count in settings.microbatches:
            build(name, settings.stages, count, weights=settings.weights, ranks=settings.ranks)


@main.command()
@click.option("--stages", required=True, type=click.IntRange(min=1), help="Stages, one a rank.")
@click.option("--microbatches", required=True, type=click.IntRange(min=1), help="In a step.")
@click.option(
    "--times",
    required=True,
    callback=_numbers,
    metavar="F,I,W[,F,I,W...]",
    help="Milliseconds of F, I and W: of every stage, or of each in turn.",
)
@click.option(
    "--memory",
    default="1,1",
    show_default=True,
    callback=_numbers,
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
@click.option(
    "--output",
    type=click.Path(path_type=pathlib.Path, file_okay=False),
    help="Folder for pareto.png, timeline.png and trace.json.",
)
@_json_option
@_typed_errors
def simulate(
    output: pathlib.Path | None,
    json_file: pathlib.Path | None,
    schedule: str | None,
    **options: Any,
) -> None:
    """Simulate every schedule on a pipeline of the given stages, and print them side by side."""
    from .pipeline.grid import format_schedule
    from .projection import choose, project, write_pictures, write_rows
    from .report.survey import survey_table

    found = project(**options)
    shown = choose(found, schedule)
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


@main.command()
@click.argument("factory")
@_setting
@_backend
@click.option("--stages", default=1, show_default=True, help="For a Workload: stages.")
@click.option("--stage", default=0, show_default=True, help="For a Workload: which one.")
@click.option(
    "--no-input-grads", is_flag=True, help="Inputs need no gradient, as in a first stage."
)
@click.option(
    "--memory",
    default="balanced",
    show_default=True,
    callback=_memory,
    help="fast, balanced, lean, or the bytes that one microbatch may hold between I and W.",
)
@click.option(
    "--dump",
    "folder",
    type=click.Path(path_type=pathlib.Path, file_okay=False),
    help="Write the graphs to this folder.",
)
@_typed_errors
def inspect(
    factory: str,
    overrides: dict[str, str],
    backend: str,
    stages: int,
    stage: int,
    no_input_grads: bool,
    memory: str | int,
    folder: pathlib.Path | None,
) -> None:
    """Report how FACTORY's model is split. FACTORY (MODULE:NAME) returns a Workload or
    (model, args) or (model, args, kwargs).
    """
    from .inspection import example
    from .module import split
    from .workload import load_factory

    made = load_factory(factory)(**overrides)
    model, args, kwargs = example(made, factory, stages, stage, input_grads=not no_input_grads)
    module = split(model, args, kwargs, backend=backend, memory=memory)
    click.echo(module.report())
    if folder:
        module.dump(folder)
        click.echo(f"\nwritten: {folder}")


if __name__ == "__main__":
    main()
